"""Cut annotated slides into a training set: tiles at the marks, in a folder for each class, with their origins.

A point, or an area that fits into a tile, gives one tile centred on it. A larger area gives the tiles of the slide's
grid of which it covers a share. A setting decides about tiles that marks of two classes claim.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mutirao.core.cpu_threads import core_count
from mutirao.datasets.tile_folders import Origin, TileScale, is_class_name, write_set
from mutirao.errors import ConfigError, MutiraoError
from mutirao.systems.cytology.slides.annotations import READERS, Floats, Mark, area, bounds, covered, read_annotations
from mutirao.systems.cytology.slides.readers import Slide, encode_image, open_slide
from mutirao.systems.cytology.slides.tiling import Cut, side_for

Rule = Literal["leave", "largest", "first"]
Place = tuple[int, int]


@dataclass(frozen=True)
class CuttingPlan:
    """How marks become tiles: which classes (none: all), their new names, and the rule for tiles that two claim."""

    classes: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cover: float = 0.5  # the share of a tile, or of an area that is smaller, that makes a claim
    conflict: Rule = "leave"

    def __post_init__(self) -> None:
        if not 0 < self.cover <= 1:
            raise ConfigError(f"--cover: {self.cover!r} is not a share above 0 and up to 1")
        for name in {*self.classes, *self.rename.values()}:
            if not is_class_name(name):
                raise ConfigError(f"{name[:60]!r} cannot be the name of a class, which is also a folder's name")
        if self.conflict == "first" and not self.classes:
            raise ConfigError(
                "--conflict first: needs --classes, the winning class first, as in --classes abnormal,normal"
            )


@dataclass
class Tally:
    """The result of cutting: tiles by class, tiles that two classes claimed, and the problems, one line each."""

    tiles: Counter[str] = field(default_factory=Counter)
    contested: int = 0
    problems: list[str] = field(default_factory=list)


def sort_marks(
    marked: Mapping[Path, Sequence[Mark]], plan: CuttingPlan, tally: Tally
) -> dict[Path, list[tuple[str, Mark]]]:
    """The marks of each slide with their classes; marks of other classes are reported and left out."""
    names = {name.lower(): name for name in plan.classes}
    rename = {old.lower(): new for old, new in plan.rename.items()}
    kept: dict[Path, list[tuple[str, Mark]]] = {slide: [] for slide in marked}
    other = Counter[str]()
    for slide, marks in marked.items():
        for mark in marks:
            label = rename.get(mark.label.lower(), mark.label)
            if not plan.classes and is_class_name(label):
                # Normal and normal are one class, and one folder on many disks; the first spelling is used.
                names.setdefault(label.lower(), label)
            if label.lower() in names:
                kept[slide].append((names[label.lower()], mark))
            else:
                other[label] += 1
    why = "not a valid name for a folder; give it one with --rename"
    if plan.classes:
        why = f"none of {', '.join(plan.classes)}"
    tally.problems += [f"{n:,} marks of the class {label[:60]!r}, which is {why}" for label, n in other.items()]
    return kept


def centred(rings: Sequence[Floats], side: int, size: tuple[int, int]) -> Place:
    """The corner of the tile centred on an outline, moved so that it lies on the slide."""
    left, top, right, bottom = bounds(rings)
    x = round((left + right - side) / 2)
    y = round((top + bottom - side) / 2)
    return max(0, min(x, size[0] - side)), max(0, min(y, size[1] - side))


def on_grid(rings: Sequence[Floats], side: int, size: tuple[int, int], cover: float) -> Iterator[tuple[Place, float]]:
    """The tiles of the slide's grid of which an outline covers a share, with that share; whole tiles only."""
    left, top, right, bottom = bounds(rings)
    xs = np.arange(max(0, int(left // side)), min(size[0] // side, int(right // side) + 1)) * side
    ys = np.arange(max(0, int(top // side)), min(size[1] // side, int(bottom // side) + 1)) * side
    for y in ys.tolist():
        shares = covered(rings, xs.astype(np.float64), y, side, side) / side**2
        for x, share in zip(xs.tolist(), shares.tolist(), strict=True):
            if share >= cover:
                yield (x, y), share


class Claims:
    """The marks of a slide, indexed to find the classes that claim a tile."""

    def __init__(self, marks: Sequence[tuple[str, Mark]], side: int, cover: float) -> None:
        self.marks = marks
        self.side = side
        self.cover = cover
        self.boxes = np.array([bounds(mark.rings) for _, mark in marks]).reshape(-1, 4)
        self.areas = [area(mark.rings) for _, mark in marks]

    def of(self, place: Place) -> dict[str, float]:
        """The largest share by which each class claims the tile: of the tile, or of an area that is smaller."""
        x, y = place
        side = self.side
        b = self.boxes
        near = (b[:, 0] < x + side) & (b[:, 2] >= x) & (b[:, 1] < y + side) & (b[:, 3] >= y)
        found: dict[str, float] = {}
        for i in np.flatnonzero(near):
            label, mark = self.marks[int(i)]
            share = 1.0  # a point in it, or an outline without an area
            if self.areas[i]:
                inside = float(covered(mark.rings, np.array([float(x)]), y, side, side)[0])
                share = inside / min(self.areas[i], side**2)
            if share >= self.cover:
                found[label] = max(share, found.get(label, 0.0))
        return found


def resolve_conflict(claims: Mapping[str, float], plan: CuttingPlan) -> str | None:
    """The class of a tile that several classes claim; None if it is left out.

    >>> resolve_conflict({"normal": 0.9, "abnormal": 0.6}, CuttingPlan(("abnormal", "normal"), conflict="first"))
    'abnormal'
    """
    if len(claims) == 1:
        return next(iter(claims))
    if plan.conflict == "first":
        return min(claims, key=plan.classes.index)
    ranked = sorted(claims.items(), key=lambda item: -item[1])
    if plan.conflict == "leave" or ranked[0][1] == ranked[1][1]:
        return None
    return ranked[0][0]


def places_of(
    slide: Slide, marks: Sequence[tuple[str, Mark]], cut: Cut, plan: CuttingPlan, tally: Tally
) -> dict[Place, tuple[str, str]]:
    """The positions of tiles with their classes and marks; marks that give no tile are reported."""
    side = side_for(slide, cut)
    size = slide.size
    used: list[tuple[str, Mark]] = []
    # A mark claims its own tile, even if the slide's edge has moved it away from the mark.
    wanted: dict[Place, dict[str, float]] = {}
    sources: dict[Place, str] = {}
    for label, mark in marks:
        left, top, right, bottom = bounds(mark.rings)
        if left >= size[0] or top >= size[1] or right < 0 or bottom < 0:
            tally.problems.append(
                f"{mark.where}: ({left:g}, {top:g}) is not on {slide.path.name}, {size[0]} x {size[1]}"
            )
            continue
        used.append((label, mark))
        if max(right - left, bottom - top) <= side:
            own = [(centred(mark.rings, side, size), 1.0)]
        else:
            own = list(on_grid(mark.rings, side, size, plan.cover))
        if not own:
            tally.problems.append(f"{mark.where}: it covers {plan.cover:g} of no tile; smaller tiles or --cover")
        for place, share in own:
            shares = wanted.setdefault(place, {})
            shares[label] = max(share, shares.get(label, 0.0))
            sources.setdefault(place, mark.where)
    claims = Claims(used, side, plan.cover)
    found: dict[Place, tuple[str, str]] = {}
    for place, own_claims in wanted.items():
        all_claims = dict(own_claims)
        for label, share in claims.of(place).items():
            all_claims[label] = max(share, all_claims.get(label, 0.0))
        tally.contested += len(all_claims) > 1
        if winner := resolve_conflict(all_claims, plan):
            found[place] = (winner, sources[place])
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))  # row by row


def match_annotations(slides: Sequence[Path], files: Sequence[Path], tally: Tally) -> dict[Path, list[Mark]]:
    """The marks of each slide, matched by a table's column `slide` or by file name; one slide and one file match."""
    by_name = {}
    for slide in slides:
        by_name[slide.name] = slide
        by_name[slide.stem] = slide
    out: dict[Path, list[Mark]] = {slide: [] for slide in slides}
    for file in files:
        try:
            marks, problems = read_annotations(file)
        except MutiraoError as error:
            tally.problems.append(str(error))
            continue
        tally.problems += problems
        own = by_name.get(file.stem) or by_name.get(Path(file.stem).stem)  # smear.csv, smear.cells.csv
        if own is None and len(slides) == len(files) == 1:
            own = slides[0]
        lost = Counter[str]()
        for mark in marks:
            named = Path(mark.slide.replace("\\", "/")).name
            target = own
            if named:
                target = by_name.get(named, by_name.get(Path(named).stem))
            if target:
                out[target].append(mark)
            else:
                lost[named] += 1
        for name, n in lost.items():
            tally.problems.append(f"{file.name}: {n:,} marks, but there is no slide called {name[:80] or file.stem}")
    return out


def annotations_in(paths: Sequence[Path]) -> list[Path]:
    """The given annotation files, and those in the given folders."""
    found: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in READERS)
        found += [p for p in inside if not p.name.startswith(".")]
    if not found:
        raise ConfigError(f"no annotations in {', '.join(map(str, paths))}; they end in {', '.join(READERS)}")
    return found


def cut_marks(
    slides: Sequence[Path],
    annotations: Sequence[Path],
    out: Path,
    cut: Cut,
    plan: CuttingPlan,
    mpp: Callable[[Path], float | None] = lambda path: None,
    laboratory: Callable[[Path], str] = lambda path: "",
    reader: str = "",
    watch: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Write the training set; marks and slides that cannot be used are listed in the tally's problems."""
    tally = Tally()
    marked = match_annotations(slides, annotations, tally)
    names = [s.stem for s in slides]
    kept = sort_marks(marked, plan, tally)
    found = sorted({label for marks in kept.values() for label, _ in marks})
    classes = plan.classes or found
    if not found:
        raise ConfigError("; ".join([f"no mark can be used in {len(annotations)} files", *tally.problems[:3]]))

    def tiles() -> Iterator[tuple[Origin, Callable[[Path], None]]]:
        for path, name in zip(slides, names, strict=True):
            if not kept[path]:
                tally.problems.append(f"{path.name}: there is no mark on it")
                continue
            try:
                slide = open_slide(path, mpp(path))
                places = places_of(slide, kept[path], cut, plan, tally)
            except MutiraoError as error:
                tally.problems.append(str(error))
                continue
            # Slides of one name in different formats keep their suffix, or their tiles would overwrite each other.
            known = name if names.count(name) == 1 else path.name
            side = side_for(slide, cut)
            facts: dict[str, Any] = {"slide": known, "laboratory": laboratory(path), "mpp": cut.mpp, "size": cut.size}
            try:
                with ThreadPoolExecutor(core_count(), "mutirao-cut") as pool:
                    read = partial(picture_at, slide, side, cut.size)
                    for (place, (label, source)), content in zip(places.items(), pool.map(read, places), strict=True):
                        file = f"{label}/{known}_x{place[0]}_y{place[1]}.png"
                        tally.tiles[label] += 1
                        origin = Origin(
                            file, **facts, x=place[0], y=place[1], label=label, source=source, reader=reader
                        )
                        yield origin, partial(write_tile, content)
            except MutiraoError as error:
                tally.problems.append(str(error))
            finally:
                slide.close()
            watch(f"{path.name}: {len(places):,} tiles from {len(kept[path]):,} marks")

    write_set(out, classes, tiles(), TileScale(cut.size, cut.mpp))
    return tally


def picture_at(slide: Slide, side: int, size: int, place: Place) -> bytes:
    """The content of a tile's PNG file."""
    return encode_image(Image.fromarray(slide.region(*place, side, size)), "PNG", compress_level=1)


def write_tile(content: bytes, path: Path) -> None:
    """Write a file, without a temporary one: the folder is moved into place when it is complete."""
    path.write_bytes(content)
