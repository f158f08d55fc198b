"""Cut slides into tiles: glass is skipped, the rest is read, measured and written, with one thread for each core.

A slide's folder is complete when `slide.json` is in it; until then the slide is cut again. A slide that fails is
reported and does not stop the others.

Tiles are ranked by sharpness and content: local variance and entropy. Glass is found on an overview of the slide.

A cervical smear is not tissue: single cells lie far apart on clear glass. Otsu's threshold alone fails on it, since
hardly any pixel belongs to a cell; so it is limited to a few deviations above the glass. Most scanners fill areas that
were not scanned with pure white, which is not glass: with it, the glass itself would look stained.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from mutirao.core.cpu_threads import core_count
from mutirao.errors import ConfigError, MutiraoError
from mutirao.io import read_csv as rows_in
from mutirao.io import write_whole
from mutirao.research_notice import sign_picture
from mutirao.systems.cytology.slides.readers import Pixels, Slide, SlideError, encode_image, open_slide

Mask = npt.NDArray[np.bool_]
STRAIGHT = 24  # pixels of an overview: a longer straight edge is not that of a cell


def otsu(values: npt.ArrayLike) -> int:
    """The threshold t that splits bytes into <= t and > t with the largest variance between them (Otsu, 1979)."""
    counts = np.bincount(np.asarray(values, np.uint8).ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(counts)
    sums = np.cumsum(counts * np.arange(256))
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return int(np.nanargmax(np.where(np.isfinite(between), between, -1.0)))


def stain(picture: Pixels) -> npt.NDArray[np.uint8]:
    """How far a pixel is from white: saturation (max - min) and darkness (255 - max) together, that is 255 - min."""
    darkest: npt.NDArray[np.uint8] = picture.min(2)
    return 255 - darkest


def threshold(stained: npt.NDArray[np.uint8]) -> float:
    """Otsu's threshold, limited to between 5 and 12 deviations above the glass.

    The glass is the median below Otsu's threshold; its deviation is estimated from the pixels at or below that
    (robustly: 1.4826 times their median distance to it), because pale cytoplasm is only above it.
    """
    t = otsu(stained)
    below = stained[stained <= t].astype(np.float64)
    glass = float(np.median(below))
    distances = glass - below[below <= glass]
    deviation = max(1.4826 * float(np.median(distances)), 0.7)
    return float(np.clip(t, glass + 5 * deviation, glass + 12 * deviation))


def unscanned(picture: Pixels) -> Mask:
    """Areas that were not scanned: pure white with mostly straight, vertical or horizontal edges.

    Overexposed glass is pure white, too, but its edges run around cells, and are round.
    """
    # Opened, so that only solid areas are left, and no single bright pixels.
    white = ndimage.binary_opening(picture.min(2) >= 254, np.ones((5, 5), bool))
    vertical = white[:, 1:] != white[:, :-1]
    horizontal = white[1:] != white[:-1]
    straight = ndimage.binary_opening(vertical, np.ones((STRAIGHT, 1), bool)).sum()
    straight += ndimage.binary_opening(horizontal, np.ones((1, STRAIGHT), bool)).sum()
    if 2 * straight > vertical.sum() + horizontal.sum():
        return white
    return np.zeros_like(white)


@dataclass(frozen=True)
class Masked:
    """An overview of a slide, its mask of cells, and the finest pixels that one of its pixels covers."""

    picture: Pixels
    mask: Mask
    scale: float

    def share(self, x: int, y: int, side: int) -> float:
        """The share of a square of the slide (finest pixels) that is not glass."""
        left = int(x / self.scale)
        top = int(y / self.scale)
        right = max(left + 1, round((x + side) / self.scale))
        bottom = max(top + 1, round((y + side) / self.scale))
        part = self.mask[top:bottom, left:right]
        if part.size:
            return float(part.mean())
        return 0.0


def mask_slide(slide: Slide, mpp: float = 6.0) -> Masked:
    """Find the cells on an overview of about `mpp` micrometres a pixel; isolated pixels are dust and count as glass."""
    picture = slide.overview(mpp)
    stained = stain(picture)
    filled = unscanned(picture)
    found = np.zeros_like(filled)
    if not filled.all():
        found = (stained > threshold(stained[~filled])) & ~filled
    # The stained pixels in the 3 x 3 square around each pixel: a grain of dust has at most one besides itself.
    padded = np.pad(found, 1)
    height, width = found.shape
    neighbours = np.zeros(found.shape, np.uint8)
    for dy in range(3):
        for dx in range(3):
            neighbours += padded[dy : dy + height, dx : dx + width]
    return Masked(picture, found & (neighbours > 2), slide.size[0] / width)


Floats = npt.NDArray[np.float64]
WINDOW = 8


def tile_measures(tile: Pixels) -> tuple[float, float]:
    """Local variance (the mean over windows of 8 x 8 of their grey levels' variance) and entropy (bits a pixel).

    Blurred tiles have little local variance, bare ones little entropy: -sum p log2 p of the 256 grey levels.
    """
    grey = Image.fromarray(tile).convert("L")
    counts = np.asarray(grey.histogram(), np.float64)
    p = counts[counts > 0] / counts.sum()
    values = np.asarray(grey, np.float32)
    high, wide = (n // WINDOW * WINDOW for n in values.shape)
    windows = values[:high, :wide].reshape(high // WINDOW, WINDOW, wide // WINDOW, WINDOW)
    # Var(v) = E(v^2) - E(v)^2 in each window; einsum sums the squares without an array of them.
    variance = np.einsum("abcd,abcd->ac", windows, windows) / WINDOW**2 - windows.mean((1, 3)) ** 2
    return float(np.maximum(variance, 0).mean()), float(max(0.0, -(p * np.log2(p)).sum()))


@dataclass(frozen=True)
class Choice:
    """Which tiles are kept: those above both thresholds; of these the best `quantile` (a share) or `top` (a count).

    >>> score, why = Choice(top=1)(variance=[20.0, 5.0, 0.1], entropy=[4.0, 3.0, 0.0])
    >>> why
    ['', 'rank', 'variance']
    """

    min_variance: float = 0.5
    min_entropy: float = 0.1
    quantile: float = 1.0
    top: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ConfigError(f"quantile: {self.quantile!r} is not a share above 0 and up to 1")
        if self.top < 0 or self.min_variance < 0 or self.min_entropy < 0:
            raise ConfigError("top, min_variance and min_entropy cannot be below 0")

    def __call__(self, variance: Sequence[float], entropy: Sequence[float]) -> tuple[Floats, list[str]]:
        """A score in [0, 1] for each tile, and the reason to drop it (empty: it is kept)."""
        v = np.asarray(variance, np.float64)
        e = np.asarray(entropy, np.float64)
        scores = (shares_below(v) + shares_below(e)) / 2
        why = np.full(len(v), "", object)
        why[e < self.min_entropy] = "entropy"
        why[v < self.min_variance] = "variance"
        left = np.flatnonzero(why == "")
        ranked = left[np.argsort(-scores[left], kind="stable")]
        keep = int(np.ceil(self.quantile * len(ranked)))
        if self.top:
            keep = min(keep, self.top)
        why[ranked[keep:]] = "rank"
        return scores, [str(w) for w in why]


def shares_below(values: Floats) -> Floats:
    """For each value the share of the others below it, ties counting half; a single value has 1."""
    from scipy.stats import rankdata

    n = len(values)
    if n > 1:
        return (rankdata(values) - 1) / (n - 1)
    return np.ones(n)


COLUMNS = ("tile", "x", "y", "level", "side", "cover", "variance", "entropy", "score", "kept", "why")
PREVIEW = 1600  # pixels of the longer side


@dataclass(frozen=True)
class Cut:
    """How a slide is cut: tiles of `size` pixels at `mpp` (or `magnification`: 10 / mpp), overlapping by `overlap`.

    >>> Cut(size=256, mpp=0.5).size * Cut(size=256, mpp=0.5).mpp  # micrometres a side
    128.0
    """

    size: int = 512
    mpp: float = 0.5
    overlap: int = 0
    min_cover: float = 0.005  # share of a tile that must not be glass
    image: str = "jpg"
    quality: int = 90

    def __post_init__(self) -> None:
        if self.size < 16 or not 0 <= self.overlap < self.size:
            raise ConfigError(f"tiles of {self.size} pixels that overlap by {self.overlap}: size >= 16, overlap < size")
        if not 0.02 <= self.mpp <= 50:
            raise ConfigError(f"mpp: {self.mpp!r} is not between 0.02 and 50 micrometres a pixel")
        if self.image not in ("jpg", "png"):
            raise ConfigError(f"image: {self.image!r} is not one of jpg, png")


@dataclass(frozen=True)
class Tile:
    """One tile: its corner and side in the finest pixels, its measures, and why it was dropped."""

    name: str
    x: int
    y: int
    level: int
    side: int
    cover: float
    variance: float | None = None
    entropy: float | None = None
    score: float | None = None
    why: str = ""

    @property
    def kept(self) -> bool:
        """Whether there is no reason to drop it."""
        return not self.why

    def row(self) -> dict[str, Any]:
        """The tile as a line of the table."""
        found = asdict(self) | {"tile": self.name, "kept": int(self.kept)}
        return {k: found[k] if found[k] is not None else "" for k in COLUMNS}


def side_for(slide: Slide, cut: Cut) -> int:
    """The side of a tile in the slide's finest pixels; SlideError if the slide is too coarse for it."""
    scale = cut.mpp / slide.mpp
    if scale < 0.99:
        raise SlideError(
            f"{slide.path} has {slide.mpp:.3g} micrometres a pixel, coarser than --mpp-out {cut.mpp:.3g}; "
            f"use --mpp-out {slide.mpp:.3g} or more"
        )
    return round(cut.size * scale)


def grid(slide: Slide, cut: Cut, seen: Masked) -> list[Tile]:
    """All tiles of a slide, row by row; those on glass are marked `background`. Tiles may extend beyond the edge."""
    side = side_for(slide, cut)
    scale = cut.mpp / slide.mpp
    step = max(1, round((cut.size - cut.overlap) * scale))
    level = slide.level_for(side / cut.size)
    width, height = slide.size
    tiles = []
    for y in range(0, max(1, height - round(cut.overlap * scale)), step):
        for x in range(0, max(1, width - round(cut.overlap * scale)), step):
            cover = seen.share(x, y, side)
            why = "background" if cover < cut.min_cover else ""
            tiles.append(Tile(f"x{x}_y{y}.{cut.image}", x, y, level, side, round(cover, 4), why=why))
    return tiles


def measure_tiles(
    slide: Slide, tiles: Sequence[Tile], cut: Cut, folder: Path | None, workers: int = 0
) -> Iterator[Tile]:
    """The tiles in their order; all but glass are read, measured and, with a folder, written."""

    def work(tile: Tile) -> Tile:
        if tile.why:
            return tile
        pixels = slide.region(tile.x, tile.y, tile.side, cut.size)
        variance, entropy = tile_measures(pixels)
        if folder is not None:
            image = Image.fromarray(pixels)
            if cut.image == "png":
                content = encode_image(image, "PNG", compress_level=1)
            else:
                content = encode_image(image, "JPEG", quality=cut.quality)
            # Not atomically: the folder counts only when it is complete.
            (folder / tile.name).write_bytes(content)
        return replace(tile, variance=round(variance, 3), entropy=round(entropy, 4))

    with ThreadPoolExecutor(workers or core_count(), "mutirao-tiles") as pool:
        yield from pool.map(work, tiles)


def choose(tiles: Sequence[Tile], choice: Choice) -> list[Tile]:
    """The tiles with scores and reasons by `choice`; those on glass stay dropped."""
    measured = [i for i, t in enumerate(tiles) if t.variance is not None]
    scores, why = choice([tiles[i].variance or 0.0 for i in measured], [tiles[i].entropy or 0.0 for i in measured])
    out = list(tiles)
    for i, score, reason in zip(measured, scores, why, strict=True):
        out[i] = replace(tiles[i], score=round(float(score), 4), why=reason)
    return out


def write_tile_table(tiles: Sequence[Tile], path: Path) -> None:
    """Write `tiles.csv`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(t.row() for t in tiles)
    write_whole(path, out.getvalue())


def read_tile_table(path: Path) -> list[Tile]:
    """The tiles of a table written by `write_table`."""
    if not path.exists():
        raise ConfigError(f"{path} is missing; run mutirao slides tile first")
    try:
        return [tile_of(row) for row in rows_in(path)]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not a table of tiles: {error}") from error


def tile_of(row: dict[str, str]) -> Tile:
    """A line of the table as a tile."""
    values = {k: float(row[k]) if row[k] else None for k in ("variance", "entropy", "score")}
    place = {k: int(row[k]) for k in ("x", "y", "level", "side")}
    return Tile(row["tile"], **place, cover=float(row["cover"]), **values, why=row["why"])  # type: ignore[arg-type]


def draw_preview(picture: Pixels, scale: float, tiles: Sequence[Tile], path: Path) -> None:
    """Draw the kept tiles in green on an overview of the slide, and those dropped by rank or measure in orange."""
    canvas, by = shrink_picture(picture, scale)
    pen = ImageDraw.Draw(canvas)
    dropped = [t for t in tiles if t.why not in ("", "background")]
    kept = [t for t in tiles if t.kept]
    for colour, group in (("#d9822b", dropped), ("#1b7f3b", kept)):
        for t in group:
            pen.rectangle((t.x / by, t.y / by, (t.x + t.side) / by - 1, (t.y + t.side) / by - 1), outline=colour)
    write_whole(path, encode_image(sign_picture(canvas), quality=88, subsampling=0))


def shrink_picture(picture: Pixels, scale: float) -> tuple[Image.Image, float]:
    """Shrink an overview to preview size; return it with the finest pixels that one of its pixels covers."""
    shrink = max(1.0, max(picture.shape[:2]) / PREVIEW)
    size = (round(picture.shape[1] / shrink), round(picture.shape[0] / shrink))
    return Image.fromarray(picture).resize(size, Image.Resampling.BOX).convert("RGB"), scale * shrink


def preview_overview(slide: Slide) -> tuple[Pixels, float]:
    """An overview of preview size, and the finest pixels that one of its pixels covers."""
    picture = slide.overview(max(slide.size) / PREVIEW * slide.mpp)
    return picture, slide.size[0] / picture.shape[1]


def identity(path: Path, cut: Cut, mpp: float | None) -> dict[str, Any]:
    """The file and settings of a complete folder: if they change, the slide is cut again."""
    found = path.stat()
    return {"slide": path.name, "bytes": found.st_size, "modified": found.st_mtime_ns, "mpp_given": mpp, **asdict(cut)}


def tile_slide(
    path: Path, out: Path, cut: Cut, choice: Choice, mpp: float | None = None, workers: int = 0
) -> dict[str, Any]:
    """Cut one slide into `out`: tiles/, tiles.csv, preview.jpg, and last slide.json, which is returned.

    >>> from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Smear, write_slide
    >>> _ = write_slide(Path("smear.tiff"), Smear(1024, 1024, per_mm2=200.0), LABORATORIES[0])
    >>> facts = tile_slide(Path("smear.tiff"), Path("tiles"), Cut(size=256), Choice(top=2), workers=1)
    >>> facts["tiles"], facts["background"], facts["kept"]
    (16, 1, 2)
    """
    slide = open_slide(path, mpp)
    try:
        # First of all: a folder with slide.json counts as complete, and from here on this one is not.
        (out / "slide.json").unlink(missing_ok=True)
        (out / "tiles").mkdir(parents=True, exist_ok=True)
        for old in (out / "tiles").iterdir():
            old.unlink()
        seen = mask_slide(slide)
        tiles = choose(list(measure_tiles(slide, grid(slide, cut, seen), cut, out / "tiles", workers)), choice)
        write_tile_table(tiles, out / "tiles.csv")
        draw_preview(*preview_overview(slide), tiles, out / "preview.jpg")
        facts = {
            **identity(path, cut, mpp),
            "slide_mpp": slide.mpp,
            "width": slide.size[0],
            "height": slide.size[1],
            "tiles": len(tiles),
            "background": sum(t.why == "background" for t in tiles),
            "kept": sum(t.kept for t in tiles),
        }
        write_whole(out / "slide.json", json.dumps(facts, indent=2) + "\n")
        return facts
    finally:
        slide.close()


def known_facts(out: Path, path: Path, cut: Cut, mpp: float | None) -> dict[str, Any] | None:
    """The facts of a slide that was cut before with the same settings, else None."""
    try:
        facts: dict[str, Any] = json.loads((out / "slide.json").read_text(encoding="utf-8"))
        wanted = identity(path, cut, mpp)
    except (OSError, ValueError, RecursionError):
        return None
    if all(facts.get(k) == v for k, v in wanted.items()):
        return facts
    return None


def tile_all(
    paths: Sequence[Path],
    out: Path,
    cut: Cut,
    choice: Choice,
    mpp: Callable[[Path], float | None],
    watch: Callable[[Path, dict[str, Any] | str, bool], None],
    workers: int = 0,
) -> list[str]:
    """Cut all slides, each into a folder of its name; return the problems, one line each."""
    names = [p.stem for p in paths]
    problems = []
    for path, name in zip(paths, names, strict=True):
        folder = out / (name if names.count(name) == 1 else path.name)
        try:
            known = known_facts(folder, path, cut, mpp(path))
            watch(path, known or tile_slide(path, folder, cut, choice, mpp(path), workers), known is not None)
        except (MutiraoError, OSError) as error:
            text = str(error) if isinstance(error, MutiraoError) else f"{path}: {error.strerror or error}"
            problems.append(text)
            watch(path, text, False)
    return problems
