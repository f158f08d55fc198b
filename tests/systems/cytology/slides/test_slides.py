"""Slides: written, read in two ways, masked, cut, ranked; and what happens to those that are broken."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mutirao.cli import main
from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides.readers import OpenSlideSource, SlideError, TiffSource, open_slide
from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Cells, Pyramid, Smear, TileRenderer
from mutirao.systems.cytology.slides.tiling import (
    Choice,
    Cut,
    Tile,
    choose,
    grid,
    mask_slide,
    otsu,
    read_tile_table,
    tile_measures,
    tile_slide,
)


def test_both_readers_see_what_was_drawn(smear: tuple[Path, Cells]) -> None:
    path, _ = smear
    a, b = OpenSlideSource(path), TiffSource(path)
    assert a.sizes == b.sizes == [(3000, 2100), (750, 525)]
    assert a.mpp == pytest.approx(0.5)
    assert b.mpp == pytest.approx(0.5)
    for level, x, y, w, h in [(0, 500, 400, 600, 700), (0, 2900, 2000, 100, 100), (1, 0, 0, 750, 525)]:
        one, other = a.read(level, x, y, w, h).astype(int), b.read(level, x, y, w, h).astype(int)
        assert one.shape == (h, w, 3)
        assert np.abs(one - other).max() <= 2  # two decoders of one JPEG
    drawn = TileRenderer.of(Smear(3000, 2100, 0.5, per_mm2=12), LABORATORIES[1], 3, "smear").tile(1, 1).astype(int)
    assert np.abs(b.read(0, 512, 512, 512, 512) - drawn).mean() < 3  # JPEG loses a little
    a.close(), b.close()


def test_a_level_must_be_whole(tmp_path: Path) -> None:
    with Pyramid(tmp_path / "a.tiff") as pyramid, pytest.raises(ValueError, match="1 tiles for a level of 4"):
        pyramid.add(1024, 1024, [b"x"], 0.5)


def test_every_cell_is_kept_and_empty_glass_is_dropped(smear: tuple[Path, Cells], tmp_path: Path) -> None:
    path, cells = smear
    facts = tile_slide(path, tmp_path / "out", Cut(size=256), Choice())
    tiles = read_tile_table(tmp_path / "out" / "tiles.csv")
    assert facts["tiles"] == len(tiles) == 12 * 9
    kept = np.zeros(len(cells), bool)
    empty = []
    for t in tiles:
        kept |= t.kept & (cells.x // 256 * 256 == t.x) & (cells.y // 256 * 256 == t.y)
        if not len(cells.touching(t.x, t.y, t.side)):
            empty.append(not t.kept)
    assert kept.mean() >= 0.98
    assert len(empty) > 20
    assert np.mean(empty) >= 0.95
    files = {p.name for p in (tmp_path / "out" / "tiles").iterdir()}
    assert files == {t.name for t in tiles if t.why != "background"}
    assert Image.open(tmp_path / "out" / "tiles" / sorted(files)[0]).size == (256, 256)


def test_a_bare_slide_has_nothing_to_keep(tmp_path: Path) -> None:
    from mutirao.systems.cytology.slides.synthetic_slides import write_slide

    path = tmp_path / "bare.tiff"
    write_slide(path, Smear(1024, 1024, 0.5, per_mm2=1e-9), LABORATORIES[2], seed=0)  # one cell at least is drawn
    facts = tile_slide(path, tmp_path / "out", Cut(), Choice())
    assert facts["kept"] <= 2


def test_tiles_at_other_scales_and_with_overlap_cover_the_slide(smear: tuple[Path, Cells]) -> None:
    slide = open_slide(smear[0])
    try:
        seen = mask_slide(slide)
        for cut in (Cut(size=256, mpp=1.0), Cut(size=200, mpp=0.7, overlap=50)):
            covered = np.zeros((2100, 3000), bool)
            for t in grid(slide, cut, seen):
                covered[t.y : t.y + t.side, t.x : t.x + t.side] = True
            assert covered.all()
        half = slide.region(512, 512, 1024, 512).astype(int)
        full = slide.region(512, 512, 1024, 1024).reshape(512, 2, 512, 2, 3).mean((1, 3))
        assert np.abs(half - full).max() <= 1
        with pytest.raises(SlideError, match=r"coarser than --mpp-out 0\.25"):
            grid(slide, Cut(mpp=0.25), seen)
    finally:
        slide.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=2, max_size=200))
def test_otsu_against_all_thresholds(values: list[int]) -> None:
    x = np.array(values, np.uint8)

    def between(t: int) -> float:
        low, high = x[x <= t].astype(float), x[x > t].astype(float)
        return 0.0 if not len(low) or not len(high) else len(low) * len(high) * (low.mean() - high.mean()) ** 2

    assert between(otsu(x)) == pytest.approx(max(between(t) for t in range(256)))


def test_measures_against_numpy() -> None:
    tile = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    grey = np.asarray(Image.fromarray(tile).convert("L"), float)
    variance = np.mean([grey[i : i + 8, j : j + 8].var() for i in range(0, 64, 8) for j in range(0, 48, 8)])
    from scipy.stats import entropy

    found = tile_measures(tile)
    assert found[0] == pytest.approx(variance, rel=1e-4)
    assert found[1] == pytest.approx(entropy(np.unique(grey, return_counts=True)[1], base=2))
    assert tile_measures(np.full((64, 64, 3), 200, np.uint8)) == (0.0, 0.0)


def test_choices_by_threshold_share_and_count() -> None:
    tiles = [Tile(f"{i}", i, 0, 0, 1, 1.0, float(i), float(i)) for i in range(10)]
    tiles.append(Tile("glass", 99, 0, 0, 1, 0.0, why="background"))
    kept = [t.name for t in choose(tiles, Choice(min_variance=2, min_entropy=3, top=4)) if t.kept]
    assert kept == ["6", "7", "8", "9"]
    why = {t.name: t.why for t in choose(tiles, Choice(min_variance=2, min_entropy=3, quantile=0.5))}
    assert why["1"] == "variance"
    assert why["2"] == "entropy"
    assert why["5"] == "rank"
    assert why["6"] == ""
    assert why["glass"] == "background"
    with pytest.raises(ConfigError, match="quantile"):
        Choice(quantile=0)


def without_resolution(path: Path, to: Path) -> None:
    """The same slide with the unit of its resolution set to 'none', in every level."""
    content = bytearray(path.read_bytes())
    where = struct.unpack_from("<Q", content, 8)[0]
    while where:
        count = struct.unpack_from("<Q", content, where)[0]
        for i in range(count):
            entry = where + 8 + 20 * i
            if struct.unpack_from("<H", content, entry)[0] == 296:
                struct.pack_into("<H", content, entry + 12, 1)
        where = struct.unpack_from("<Q", content, where + 8 + 20 * count)[0]
    to.write_bytes(content)


def test_broken_slides_are_named_and_the_others_go_on(smear: tuple[Path, Cells], tmp_path: Path) -> None:
    bad = tmp_path / "slides"
    bad.mkdir()
    whole = smear[0].read_bytes()
    (bad / "good.tiff").write_bytes(whole)
    (bad / "cut.tiff").write_bytes(whole[: len(whole) // 2])
    (bad / "text.svs").write_text("this is no slide")
    (bad / "zero.svs").write_bytes(b"")
    holed = bytearray(whole)
    holed[3000 : len(whole) // 2] = bytes(len(whole) // 2 - 3000)
    (bad / "holed.tiff").write_bytes(holed)
    without_resolution(smear[0], bad / "scaleless.tiff")
    run = CliRunner().invoke(main, ["slides", "tile", str(bad), "--out", str(tmp_path / "out"), "--json"])
    assert run.exit_code == 1
    found = json.loads(run.stdout)
    assert [s["slide"] for s in found["slides"]] == ["good.tiff"]
    problems = {Path(p.split()[0]).name if not p.startswith("cannot") else "": p for p in found["problems"]}
    assert set(problems) == {"cut.tiff", "text.svs", "zero.svs", "holed.tiff", "scaleless.tiff"}
    assert "does not say how large its pixels are; give --mpp" in problems["scaleless.tiff"]
    assert "0 bytes" in problems["zero.svs"]
    assert "not a slide that can be read" in problems["text.svs"]
    assert "damaged" in problems["holed.tiff"]
    assert all("\n" not in p for p in problems.values())
    again = CliRunner().invoke(
        main, ["slides", "tile", str(bad / "scaleless.tiff"), "--mpp", "0.5", "--out", str(tmp_path / "out")]
    )
    assert again.exit_code == 0, again.output
    (tmp_path / "t.csv").write_text("slide,mpp\nscaleless,0.25\n")
    table = ["--mpp-table", str(tmp_path / "t.csv"), "--out", str(tmp_path / "o2"), "--mpp-out", "0.5", "--json"]
    other = CliRunner().invoke(main, ["slides", "tile", str(bad / "scaleless.tiff"), *table])
    assert json.loads(other.stdout)["slides"][0]["slide_mpp"] == 0.25


def test_a_path_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.svs"
    path.write_bytes(b"x")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SlideError, match=r"cannot read .*locked.svs: Permission denied"):
        open_slide(path)


def test_a_finished_slide_is_left_alone_and_an_unfinished_one_done_again(
    smear: tuple[Path, Cells], tmp_path: Path
) -> None:
    words = ["slides", "tile", str(smear[0]), "--out", str(tmp_path)]
    assert "done before" not in CliRunner().invoke(main, words).output
    table = tmp_path / "smear" / "tiles.csv"
    before = table.stat().st_mtime_ns
    assert "done before" in CliRunner().invoke(main, words).output
    assert table.stat().st_mtime_ns == before
    assert "done before" not in CliRunner().invoke(main, [*words, "--size", "256"]).output
    (tmp_path / "smear" / "slide.json").unlink()
    assert "done before" not in CliRunner().invoke(main, [*words, "--size", "256"]).output


def test_select_and_preview(smear: tuple[Path, Cells], tmp_path: Path) -> None:
    CliRunner().invoke(main, ["slides", "tile", str(smear[0]), "--out", str(tmp_path)])
    chosen_ = CliRunner().invoke(main, ["slides", "select", str(tmp_path), "--top", "3", "--prune", "--json"])
    assert json.loads(chosen_.output)["smear"]["kept"] == 3
    assert len(list((tmp_path / "smear" / "tiles").iterdir())) == 3
    drawn = CliRunner().invoke(main, ["slides", "preview", str(smear[0]), "--tiles", str(tmp_path / "smear")])
    assert drawn.exit_code == 0, drawn.output
    picture = np.asarray(Image.open(tmp_path / "smear" / "preview.jpg"), int)
    green = (picture[..., 1] - picture[..., 0] > 60) & (picture[..., 1] - picture[..., 2] > 30)
    assert green.sum() > 50


def test_a_real_slide(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "slides" / "CMU-1-Small-Region.svs"
    facts = tile_slide(path, tmp_path, Cut(), Choice())
    assert (facts["width"], facts["height"], facts["slide_mpp"]) == (2220, 2967, 0.499)
    assert 0 < facts["kept"] < facts["tiles"]
