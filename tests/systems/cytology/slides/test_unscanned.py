"""Slides that were not scanned everywhere, glass that is overexposed, and OME-TIFF's word on the size of its pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from mutirao.systems.cytology.slides.readers import SlideError, ome_mpp, open_slide
from mutirao.systems.cytology.slides.tiling import (
    Choice,
    Cut,
    mask_slide,
    read_tile_table,
    stain,
    threshold,
    tile_slide,
    unscanned,
)

Pixels = npt.NDArray[np.uint8]


def discs(picture: npt.NDArray[Any], places: list[tuple[int, int, int]], draw: np.random.Generator) -> None:
    """Paint round pieces of stained tissue."""
    for y, x, radius in places:
        rows, columns = np.ogrid[: picture.shape[0], : picture.shape[1]]
        inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
        picture[inside] = draw.normal((190, 120, 170), 15, (inside.sum(), 3)).clip(0, 255)


def scanned_in_part() -> tuple[Pixels, Pixels]:
    """A slide of 2 micrometres a pixel whose middle alone was scanned, on greyish glass; and where its tissue is."""
    draw = np.random.default_rng(0)
    middle = (draw.normal(236, 2.5, (1400, 1600, 1)) + draw.normal(0, 1, (1400, 1600, 3))).clip(0, 255)
    discs(middle, [(500, 600, 260), (1000, 1250, 150)], draw)
    whole = np.full((2400, 3000, 3), 255, np.uint8)
    whole[500:1900, 700:2300] = middle
    tissue = np.zeros(whole.shape[:2], np.uint8)
    tissue[500:1900, 700:2300] = middle.min(2) < 200
    return whole, tissue


def write(path: Path, pixels: Pixels, **more: Any) -> Path:
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(256, 256), **more)
    return path


def test_tiles_of_glass_are_dropped_though_most_of_the_slide_was_never_scanned(tmp_path: Path) -> None:
    pixels, tissue = scanned_in_part()
    path = write(tmp_path / "part.tiff", pixels, resolution=(5000, 5000), resolutionunit="CENTIMETER")
    tile_slide(path, tmp_path / "out", Cut(size=100, mpp=2.0), Choice(min_variance=0, min_entropy=0))
    tiles = read_tile_table(tmp_path / "out" / "tiles.csv")
    held = {(t.x, t.y): tissue[t.y : t.y + t.side, t.x : t.x + t.side].mean() for t in tiles}
    kept = {(t.x, t.y) for t in tiles if t.kept}
    assert not [place for place in kept if held[place] == 0]  # it was every tile of glass that was scanned
    assert {place for place, share in held.items() if share > 0.02} <= kept
    slide = open_slide(path)
    seen = mask_slide(slide)
    slide.close()
    assert seen.mask.mean() == pytest.approx(tissue.mean(), abs=0.01)
    old = stain(seen.picture) > threshold(stain(seen.picture))
    assert old.mean() > 3 * tissue.mean()  # what pure white makes of the glass if it is taken for it


def test_overexposed_glass_is_glass_and_not_taken_for_unscanned() -> None:
    draw = np.random.default_rng(1)
    picture = np.full((700, 700, 3), 255, np.uint8)
    places = draw.integers(20, 680, (120, 2))
    discs(picture, [(int(y), int(x), int(r)) for (y, x), r in zip(places, draw.integers(4, 9, 120), strict=True)], draw)
    assert not unscanned(picture).any()
    filled = picture.copy()
    filled[:, :200] = 255
    filled[:, 200:] = np.minimum(filled[:, 200:], 238)
    assert unscanned(filled)[:, :195].all()
    assert not unscanned(filled)[:, 205:].any()
    assert not unscanned(np.full((50, 60, 3), 255, np.uint8)).any()


@pytest.mark.parametrize(("size", "unit", "mpp"), [(0.25, "µm", 0.25), (250.0, "nm", 0.25), (0.0005, "mm", 0.5)])
def test_an_ome_tiff_tells_its_pixels_size(tmp_path: Path, size: float, unit: str, mpp: float) -> None:
    about = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeY": size}
    about |= {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    path = write(tmp_path / "cells.ome.tiff", np.full((600, 600, 3), 230, np.uint8), metadata=about)
    slide = open_slide(path)
    assert slide.mpp == pytest.approx(mpp)
    assert slide.region(0, 0, 100, 50).shape == (50, 50, 3)
    slide.close()


def test_what_an_ome_tiff_says_badly_is_not_guessed(tmp_path: Path) -> None:
    told = '<OME xmlns="http://x"><Image><Pixels PhysicalSizeX="{}" PhysicalSizeXUnit="{}"/></Image></OME>'
    assert ome_mpp(told.format("0.5", "μm")) == 0.5  # the Greek letter, too
    for size, unit in [("0.5", "pixel"), ("wide", "µm"), ("nan", "µm"), ("900", "µm"), ("-1", "µm")]:
        assert ome_mpp(told.format(size, unit)) is None
    assert ome_mpp("<OME><Image/></OME>") is None
    assert ome_mpp("<OME") is None
    assert ome_mpp('<!DOCTYPE a [<!ENTITY b "0.5">]>' + told.format("&b;", "µm")) is None
    path = write(tmp_path / "silent.ome.tiff", np.full((300, 300, 3), 230, np.uint8), metadata={"axes": "YXS"})
    with pytest.raises(SlideError, match="does not say how large its pixels are"):
        open_slide(path)
