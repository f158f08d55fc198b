"""Cut slides into tiles: glass is skipped, the rest is read, measured and written, with one thread for each core.

A slide's folder is complete when `slide.json` is in it; until then the slide is cut again. A slide that fails is
reported and does not stop the others.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mutirao.errors import ConfigError, MutiraoError
from mutirao.io import read_csv as rows_in
from mutirao.io import write_whole
from mutirao.research_notice import sign_picture
from mutirao.systems.cytology.slides.readers import Pixels, Slide, SlideError, encode_image, open_slide
from mutirao.systems.cytology.slides.tile_ranking import Choice, tile_measures
from mutirao.systems.cytology.slides.tissue_mask import Masked, mask_slide
from mutirao.training.cpu_cores import core_count

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
            (folder / tile.name).write_bytes(content)  # not atomically: the folder counts only when complete
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
