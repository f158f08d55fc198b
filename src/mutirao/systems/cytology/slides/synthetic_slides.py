"""Synthetic smears of any size, cells with nuclei on glass, from laboratories with their own stain and focus.

A slide is rendered tile by tile into a pyramidal TIFF, so that a gigapixel needs little memory; a table beside it has
the position of every cell, and which are abnormal. `laboratories` makes a whole federation of such slides.
"""

import csv
import hashlib
import json
import logging
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from PIL import Image

from mutirao.config import one_line
from mutirao.core.cpu_threads import core_count
from mutirao.datasets.image_layouts import GLOBAL_TEST
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.cytology.slides.readers import Pixels, check_readers, encode_image
from mutirao.systems.cytology.slides.tiling import Choice, Cut, Tile, read_tile_table, tile_slide
from mutirao.systems.images.features import cache_folder

TILE = 512
# TIFF type number, and struct code
SHORT = (3, "H")
LONG = (4, "I")
RATIONAL = (5, "II")
LONG8 = (16, "Q")


class Pyramid:
    """Writes a BigTIFF level by level, the finest first; a context manager.

    Adobe, "TIFF 6.0", 1992, and its addition of 64-bit offsets (version 43). Tiles are JPEG files of 512 x 512 in
    YCbCr with chroma at half the resolution, as Pillow writes them with `subsampling=2`.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        self.link = 8  # offset of the pointer to the next level

    def add(self, width: int, height: int, tiles: Iterable[bytes], mpp: float) -> None:
        """Write a level from its tiles, row by row."""
        offsets: list[int] = []
        lengths: list[int] = []
        for content in tiles:
            offsets.append(self.file.tell())
            lengths.append(len(content))
            self.file.write(content)
        expected = -(-width // TILE) * -(-height // TILE)
        if len(offsets) != expected:
            raise ValueError(f"{len(offsets)} tiles for a level of {expected}")
        per_cm = (round(1e7 / mpp), 1000)
        entries = [
            (254, LONG, [int(self.link != 8)]),  # 1: a reduced image of the first
            (256, LONG, [width]),
            (257, LONG, [height]),
            (258, SHORT, [8, 8, 8]),
            (259, SHORT, [7]),  # JPEG
            (262, SHORT, [6]),  # YCbCr
            (277, SHORT, [3]),
            (282, RATIONAL, [*per_cm]),
            (283, RATIONAL, [*per_cm]),
            (284, SHORT, [1]),
            (296, SHORT, [3]),  # per centimetre
            (322, LONG, [TILE]),
            (323, LONG, [TILE]),
            (324, LONG8, offsets),
            (325, LONG8, lengths),
            (530, SHORT, [2, 2]),
        ]
        packed = []
        for tag, (kind, code), values in entries:
            count = len(values) // len(code)
            content = struct.pack(f"<{code * count}", *values)
            # Values that do not fit into the eight bytes of an entry are written before the directory.
            if len(content) > 8:
                place = self.file.tell()
                self.file.write(content)
                content = struct.pack("<Q", place)
            packed.append(struct.pack("<HHQ", tag, kind, count) + content.ljust(8, b"\0"))
        here = self.file.tell()
        self.file.write(struct.pack("<Q", len(packed)) + b"".join(packed))
        following = self.file.tell()
        self.file.write(struct.pack("<Q", 0))
        self.file.seek(self.link)
        self.file.write(struct.pack("<Q", here))
        self.file.seek(0, 2)
        self.link = following

    def __enter__(self) -> "Pyramid":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()


FACTOR = 4  # between two levels
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Laboratory:
    """The look of a laboratory's slides: colours (0 to 1) of glass, both kinds of cytoplasm and nuclei, and focus."""

    name: str
    glass: tuple[float, float, float]
    pink: tuple[float, float, float]
    blue: tuple[float, float, float]
    nucleus: tuple[float, float, float]
    blur: float  # micrometres over which an edge fades
    noise: float  # standard deviation, in grey levels


LABORATORIES = (
    Laboratory("lab_1", (0.94, 0.95, 0.95), (0.92, 0.66, 0.70), (0.62, 0.80, 0.82), (0.28, 0.22, 0.42), 0.8, 1.2),
    Laboratory("lab_2", (0.97, 0.96, 0.92), (0.93, 0.72, 0.58), (0.70, 0.82, 0.74), (0.36, 0.26, 0.34), 1.6, 1.8),
    Laboratory("lab_3", (0.88, 0.90, 0.95), (0.80, 0.58, 0.74), (0.52, 0.68, 0.84), (0.20, 0.18, 0.40), 2.4, 2.4),
)
"""Three laboratories with different glass, stains and scanners.

>>> [each.name for each in LABORATORIES]
['lab_1', 'lab_2', 'lab_3']
"""


@dataclass(frozen=True)
class Cells:
    """Every cell of a slide: place and radii in pixels, angle, colours, and whether it is abnormal."""

    x: Floats
    y: Floats
    radius: Floats
    flat: Floats  # the shorter radius over the longer
    angle: Floats
    nucleus: Floats
    blue: npt.NDArray[np.bool_]
    density: Floats
    abnormal: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.x)

    def touching(self, left: int, top: int, side: int) -> npt.NDArray[np.intp]:
        """The cells that overlap a square."""
        r = 1.25 * self.radius
        inside = (self.x + r > left) & (self.x - r < left + side) & (self.y + r > top) & (self.y - r < top + side)
        return np.flatnonzero(inside)


@dataclass(frozen=True)
class Smear:
    """Description of a synthetic slide: pixels, micrometres a pixel, cells a square millimetre, abnormal share.

    >>> cells = Smear(width=2048, height=2048, per_mm2=50.0, abnormal=0.2).cells(seed=0)
    >>> len(cells.x), int(cells.abnormal.sum())
    (53, 11)
    """

    width: int = 8192
    height: int = 8192
    mpp: float = 0.5
    per_mm2: float = 25.0
    abnormal: float = 0.15
    clustered: float = 0.5  # the share of cells that are in clusters
    planted: int | None = None  # number of abnormal cells, instead of a share

    def __post_init__(self) -> None:
        if self.width < 256 or self.height < 256 or self.mpp <= 0:
            raise ConfigError(
                f"a slide of {self.width} x {self.height} pixels at {self.mpp} is too small: 256 at least"
            )

    def cells(self, seed: int, name: str = "") -> Cells:
        """Sample random cells; abnormal ones have large, dark, irregular nuclei in little cytoplasm."""
        draw = rng(seed, 0, "cells", name)
        area = self.width * self.height * self.mpp**2 / 1e6
        n = max(1, int(draw.poisson(self.per_mm2 * area)))
        x = draw.uniform(0, self.width, n)
        y = draw.uniform(0, self.height, n)
        grouped = np.flatnonzero(draw.random(n) < self.clustered)
        if len(grouped):
            heart = grouped[draw.integers(0, max(1, len(grouped) // 8), len(grouped))]
            x[grouped] = np.clip(x[heart] + draw.normal(0, 60 / self.mpp, len(grouped)), 0, self.width - 1)
            y[grouped] = np.clip(y[heart] + draw.normal(0, 60 / self.mpp, len(grouped)), 0, self.height - 1)
        abnormal = draw.random(n) < self.abnormal
        if self.planted is not None:
            abnormal = np.isin(np.arange(n), draw.choice(n, min(n, self.planted), replace=False))
        radius = np.where(abnormal, draw.uniform(12, 20, n), draw.uniform(16, 30, n)) / self.mpp
        nucleus = np.where(abnormal, draw.uniform(5.0, 8.0, n), draw.uniform(3.0, 4.8, n)) / self.mpp
        return Cells(
            x,
            y,
            radius,
            draw.uniform(0.65, 1.0, n),
            draw.uniform(0, np.pi, n),
            nucleus,
            draw.random(n) < 0.5,
            np.where(abnormal, draw.uniform(0.8, 1.3, n), draw.uniform(0.6, 1.0, n)),
            abnormal,
        )


@dataclass(frozen=True)
class TileRenderer:
    """Renders any tile of a slide: glass with grain, then overlapping cells that absorb light."""

    smear: Smear
    cells: Cells
    laboratory: Laboratory
    seed: int
    grain: npt.NDArray[np.float32]

    @classmethod
    def of(cls, smear: Smear, laboratory: Laboratory, seed: int, name: str = "") -> "TileRenderer":
        """A renderer with the cells and the grain of one slide."""
        draw = rng(seed, 0, "grain", name)
        grain = (laboratory.noise * draw.standard_normal((2 * TILE, 2 * TILE, 3))).astype(np.float32)
        return cls(smear, smear.cells(seed, name), laboratory, seed, grain)

    def tile(self, column: int, row: int) -> Pixels:
        """The tile in that column and row, complete even at the edge."""
        left = column * TILE
        top = row * TILE
        draw = rng(self.seed, column, "tile", str(row))
        dx, dy = draw.integers(0, TILE, 2)
        light = np.empty((TILE, TILE, 3), np.float32)
        light[:] = np.asarray(self.laboratory.glass, np.float32)
        for i in self.cells.touching(left, top, TILE):
            self._paint(light, int(i), left, top)
        light *= 255
        light += self.grain[dy : dy + TILE, dx : dx + TILE]
        return np.clip(light, 0, 255).astype(np.uint8)

    def _paint(self, light: npt.NDArray[np.float32], i: int, left: int, top: int) -> None:
        c = self.cells
        lab = self.laboratory
        margin = 1.25 * c.radius[i] + 2
        x0 = max(0, int(c.x[i] - margin) - left)
        x1 = min(TILE, int(c.x[i] + margin) + 2 - left)
        y0 = max(0, int(c.y[i] - margin) - top)
        y1 = min(TILE, int(c.y[i] + margin) + 2 - top)
        if x0 >= x1 or y0 >= y1:
            return
        v, u = np.mgrid[y0:y1, x0:x1].astype(np.float32)
        u = u + (left - c.x[i])
        v = v + (top - c.y[i])
        cos = np.cos(c.angle[i])
        sin = np.sin(c.angle[i])
        along = u * cos + v * sin
        across = (v * cos - u * sin) / c.flat[i]
        distance = np.hypot(along, across)
        turn = np.arctan2(across, along)
        edge = c.radius[i] * (1 + 0.08 * np.cos(5 * turn + c.angle[i]) + 0.05 * np.cos(3 * turn))
        fade = max(1.0, lab.blur / self.smear.mpp)
        plasma = np.clip((edge - distance) / fade + 0.5, 0, 1)
        rough = 1 + (0.09 if c.abnormal[i] else 0.03) * np.cos(4 * turn + 2 * c.angle[i])
        core = np.clip((c.nucleus[i] * rough - np.hypot(u, v)) / fade + 0.5, 0, 1)
        patch = light[y0:y1, x0:x1]
        cytoplasm = lab.pink
        if c.blue[i]:
            cytoplasm = lab.blue
        for colour, cover, strength in ((cytoplasm, plasma, 0.8), (lab.nucleus, core, float(c.density[i]))):
            # Beer and Lambert: transmission is exp(-density), and densities add up where cells overlap.
            density = -np.log(np.asarray(colour, np.float32) / np.asarray(lab.glass, np.float32))
            patch *= np.exp(-strength * cover[..., None].astype(np.float32) * density)


def write_slide(path: Path, smear: Smear, laboratory: Laboratory, seed: int = 0, quality: int = 80) -> Cells:
    """Write a slide as a pyramidal TIFF, and its cells into `NAME.cells.csv` beside it; return the cells.

    >>> from mutirao.systems.cytology.slides.readers import open_slide
    >>> cells = write_slide(Path("slide.tiff"), Smear(1024, 1024), LABORATORIES[0])
    >>> slide = open_slide(Path("slide.tiff"))
    >>> slide.size, slide.mpp
    ((1024, 1024), 0.5)
    """
    renderer = TileRenderer.of(smear, laboratory, seed, path.stem)
    columns = -(-smear.width // TILE)
    rows = -(-smear.height // TILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor(core_count()) as pool:
        side = TILE // FACTOR
        below = np.memmap(Path(scratch) / "level", np.uint8, "w+", shape=(rows * side, columns * side, 3))

        def paint(place: tuple[int, int]) -> bytes:
            row, column = place
            picture = Image.fromarray(renderer.tile(column, row))
            here = slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side)
            below[here] = np.asarray(picture.reduce(FACTOR))
            return encode_image(picture, quality=quality, subsampling=2)

        with Pyramid(part) as pyramid:
            places = [(row, column) for row in range(rows) for column in range(columns)]
            pyramid.add(smear.width, smear.height, pool.map(paint, places), smear.mpp)
            level: Pixels = below[: -(-smear.height // FACTOR), : -(-smear.width // FACTOR)]
            scale = FACTOR
            while True:
                height, width = level.shape[:2]
                pyramid.add(width, height, jpeg_tiles(level, quality), smear.mpp * scale)
                if max(width, height) <= 2 * TILE:
                    break
                level = np.asarray(Image.fromarray(np.asarray(level)).reduce(FACTOR))
                scale *= FACTOR
    part.replace(path)
    write_truth(renderer.cells, path.with_suffix(".cells.csv"))
    return renderer.cells


def jpeg_tiles(level: Pixels, quality: int) -> Iterator[bytes]:
    """The tiles of a coarser level, row by row, padded at the edge with their last pixels."""
    height, width = level.shape[:2]
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            block = np.asarray(level[top : top + TILE, left : left + TILE])
            pads = ((0, TILE - block.shape[0]), (0, TILE - block.shape[1]), (0, 0))
            yield encode_image(Image.fromarray(np.pad(block, pads, mode="edge")), quality=quality, subsampling=2)


def write_truth(cells: Cells, path: Path) -> None:
    """Write a table of cells with position, size and class, which `slides cut` accepts as annotations."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["x", "y", "radius", "nucleus", "abnormal", "class"])
        for row in zip(cells.x, cells.y, cells.radius, cells.nucleus, cells.abnormal.astype(int), strict=True):
            label = "abnormal" if row[4] else "normal"
            writer.writerow([*(f"{v:.1f}" for v in row[:4]), int(row[4]), label])


# ---- a federation of laboratories ------------------------------------------------------------------------------------

log = logging.getLogger("mutirao")

CLASSES = ("abnormal", "normal")
VERSION = 1  # increase it when slides are rendered or cut in another way


def make_laboratories(clients: int, slides: int, side: int, seed: int, planted: bool = False) -> Path:
    """Make folders `client_1/ ..` and `global_test/` of tiles: one laboratory a client, its last slide for the test.

    With `planted` every second slide is abnormal by one or two cells, tiles are in CLASS/SLIDE/, and the last quarter
    of the slides is for the test. The folder is made once for these settings, and cached with the features.
    """
    if planted and slides < 4:
        raise ConfigError(f"slides: {slides} a laboratory are too few for a head of whole slides; 4 at least")
    what: list[int | str] = [VERSION, clients, slides, side, seed]
    test_slides = 1
    if planted:
        what.append("planted")
        test_slides = max(2, slides // 4)
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    out = cache_folder().parent / "synthetic" / key
    if (out / GLOBAL_TEST).is_dir():
        return out
    check_readers()
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    log.info("making %d synthetic slides for %d laboratories", clients * slides, clients)
    for client in range(1, clients + 1):
        laboratory = LABORATORIES[(client - 1) % len(LABORATORIES)]
        for number in range(1, slides + 1):
            name = f"{client}{number:02d}"
            home = part / (GLOBAL_TEST if number > slides - test_slides else f"client_{client}")
            for folder in CLASSES:
                (home / folder).mkdir(parents=True, exist_ok=True)
            slide = part / "work" / f"{name}.tiff"
            smear = Smear(side, side)
            if planted:
                # Every second slide is normal, and the abnormal ones have one and two such cells in turn.
                smear = Smear(side, side, planted=number % 2 and 1 + number // 2 % 2)
            cells = write_slide(slide, smear, laboratory, seed=seed * 1000 + client * 100 + number)
            tile_slide(slide, part / "work" / name, Cut(), Choice())
            if planted:
                label = CLASSES[0] if cells.abnormal.any() else CLASSES[1]
                (part / "work" / name / "tiles").rename(home / label / name)
                continue
            for tile in read_tile_table(part / "work" / name / "tiles.csv"):
                if tile.kept and (label := tile_label(tile, cells)):
                    (part / "work" / name / "tiles" / tile.name).rename(home / label / f"{name}-{tile.name}")
    shutil.rmtree(part / "work")
    try:
        part.replace(out)
    except OSError as error:  # another run was faster: its slides are the same
        if not (out / GLOBAL_TEST).is_dir():
            raise
        log.info("the synthetic slides were made by another run: %s", one_line(error))
    return out


def tile_label(tile: Tile, cells: Cells) -> str:
    """`abnormal` if the tile contains the nucleus of an abnormal cell; "" if it contains no nucleus."""
    inside = (cells.x >= tile.x) & (cells.x < tile.x + tile.side) & (cells.y >= tile.y) & (cells.y < tile.y + tile.side)
    if not inside.any():
        return ""
    if np.any(cells.abnormal & inside):
        return CLASSES[0]
    return CLASSES[1]
