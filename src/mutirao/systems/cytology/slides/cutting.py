"""From annotations to a training set: tiles at the marks of slides, in a folder for each class, with their places.

A point, or an area that fits into a tile, gives one tile centred on it. A larger area gives those tiles of the slide's
grid of which it covers a share. A tile that marks of two classes claim goes by a rule that is named.
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

from mutirao.datasets.tile_folders import Origin, Scale, is_class_name, write_set
from mutirao.errors import ConfigError, MutiraoError
from mutirao.systems.cytology.slides.annotations import READERS, Floats, Mark, area, bounds, covered, read_annotations
from mutirao.systems.cytology.slides.readers import Slide, encode, open_slide
from mutirao.systems.cytology.slides.tiling import Cut, side_for
from mutirao.training.cpu_cores import core_count

Rule = Literal["leave", "largest", "first"]
Place = tuple[int, int]


@dataclass(frozen=True)
class CuttingPlan:
    """How marks become tiles: which classes (none: all), under which names, and whose a tile is that two claim."""

    classes: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cover: float = 0.5  # the share of a tile, or of an area that is smaller, that makes a claim
    conflict: Rule = "leave"

    def __post_init__(self) -> None:
        if not 0 < self.cover <= 1:
            raise ConfigError(f"--cover: {self.cover!r} is not a share above 0 and up to 1")
        for name in {*self.classes, *self.rename.values()}:
            if not is_class_name(name):
                raise ConfigError(f"{name[:60]!r} cannot be the name of a class: it is to be a folder's name")
        if self.conflict == "first" and not self.classes:
            raise ConfigError("--conflict first: name the classes, the one that wins first: --classes abnormal,normal")


@dataclass
class Tally:
    """What became of the marks: tiles by class, tiles that two classes claimed, and the problems, a line each."""

    tiles: Counter[str] = field(default_factory=Counter)
    contested: int = 0
    problems: list[str] = field(default_factory=list)


def sort_marks(
    marked: Mapping[Path, Sequence[Mark]], plan: CuttingPlan, tally: Tally
) -> dict[Path, list[tuple[str, Mark]]]:
    """The marks of each slide with their classes; those of classes that are not asked for are told and left out."""
    names = {name.lower(): name for name in plan.classes}
    rename = {old.lower(): new for old, new in plan.rename.items()}
    kept: dict[Path, list[tuple[str, Mark]]] = {slide: [] for slide in marked}
    strange = Counter[str]()
    for slide, marks in marked.items():
        for mark in marks:
            label = rename.get(mark.label.lower(), mark.label)
            if not plan.classes and is_class_name(label):
                names.setdefault(label.lower(), label)  # Normal and normal are one class, and one folder on many disks
            if label.lower() in names:
                kept[slide].append((names[label.lower()], mark))
            else:
                strange[label] += 1
    wanted = f"none of {', '.join(plan.classes)}" if plan.classes else "no name for a folder; give it one with --rename"
    tally.problems += [f"{n:,} marks of the class {label[:60]!r}, which is {wanted}" for label, n in strange.items()]
    return kept


def centred(rings: Sequence[Floats], side: int, size: tuple[int, int]) -> Place:
    """The corner of the tile centred on an outline, moved so that it lies on the slide."""
    left, top, right, bottom = bounds(rings)
    x, y = round((left + right - side) / 2), round((top + bottom - side) / 2)
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
    """All marks of a slide, ready to be asked which classes claim a tile."""

    def __init__(self, marks: Sequence[tuple[str, Mark]], side: int, cover: float) -> None:
        self.marks, self.side, self.cover = marks, side, cover
        self.boxes = np.array([bounds(mark.rings) for _, mark in marks]).reshape(-1, 4)
        self.areas = [area(mark.rings) for _, mark in marks]

    def of(self, place: Place) -> dict[str, float]:
        """The largest share by which each class claims the tile: of the tile, or of an area that is smaller."""
        (x, y), side, b = place, self.side, self.boxes
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


def settle(claims: Mapping[str, float], plan: CuttingPlan) -> str | None:
    """The class that a tile goes to; None if it is left out.

    >>> settle({"normal": 0.9, "abnormal": 0.6}, CuttingPlan(("abnormal", "normal"), conflict="first"))
    'abnormal'
    """
    if len(claims) < 2 or plan.conflict == "first":
        return min(claims, key=plan.classes.index) if len(claims) > 1 else next(iter(claims))
    ranked = sorted(claims.items(), key=lambda item: -item[1])
    if plan.conflict == "leave" or ranked[0][1] == ranked[1][1]:
        return None
    return ranked[0][0]


def places_of(
    slide: Slide, marks: Sequence[tuple[str, Mark]], cut: Cut, plan: CuttingPlan, tally: Tally
) -> dict[Place, tuple[str, str]]:
    """Where tiles are cut, their classes, and the marks they come from; marks that give none are told."""
    side, size = side_for(slide, cut), slide.size
    used: list[tuple[str, Mark]] = []
    wanted: dict[Place, dict[str, float]] = {}  # a mark claims its own tile, even where the slide's edge moved that
    sources: dict[Place, str] = {}
    for label, mark in marks:
        left, top, right, bottom = bounds(mark.rings)
        if left >= size[0] or top >= size[1] or right < 0 or bottom < 0:
            tally.problems.append(
                f"{mark.where}: ({left:g}, {top:g}) is not on {slide.path.name}, {size[0]} x {size[1]}"
            )
            continue
        used.append((label, mark))
        small = max(right - left, bottom - top) <= side
        own = [(centred(mark.rings, side, size), 1.0)] if small else [*on_grid(mark.rings, side, size, plan.cover)]
        if not own:
            tally.problems.append(f"{mark.where}: it covers {plan.cover:g} of no tile; smaller tiles or --cover")
        for place, share in own:
            mine = wanted.setdefault(place, {})
            mine[label] = max(share, mine.get(label, 0.0))
            sources.setdefault(place, mark.where)
    claims = Claims(used, side, plan.cover)
    settled: dict[Place, tuple[str, str]] = {}
    for place, own_claims in wanted.items():
        all_claims = claims.of(place)
        both = {c: max(own_claims.get(c, 0.0), all_claims.get(c, 0.0)) for c in {**own_claims, **all_claims}}
        tally.contested += len(both) > 1
        if label_ := settle(both, plan):
            settled[place] = label_, sources[place]
    return dict(sorted(settled.items(), key=lambda item: (item[0][1], item[0][0])))


def pair(slides: Sequence[Path], files: Sequence[Path], tally: Tally) -> dict[Path, list[Mark]]:
    """Each slide with its marks: by a table's column `slide`, else by the file's name; a lone pair belongs together."""
    by_name = {name: slide for slide in slides for name in (slide.name, slide.stem)}
    out: dict[Path, list[Mark]] = {slide: [] for slide in slides}
    for file in files:
        try:
            marks, problems = read_annotations(file)
        except MutiraoError as error:
            tally.problems.append(str(error))
            continue
        tally.problems += problems
        named_so = by_name.get(file.stem) or by_name.get(Path(file.stem).stem)  # smear.csv, smear.cells.csv
        own = named_so or (slides[0] if len(slides) == len(files) == 1 else None)
        lost = Counter[str]()
        for mark in marks:
            named = Path(mark.slide.replace("\\", "/")).name
            slide = by_name.get(named, by_name.get(Path(named).stem)) if named else own
            if slide:
                out[slide].append(mark)
            else:
                lost[named] += 1
        for name, n in lost.items():
            tally.problems.append(f"{file.name}: {n:,} marks, but there is no slide called {name[:80] or file.stem}")
    return out


def annotations_in(paths: Sequence[Path]) -> list[Path]:
    """The annotation files named, and those in the folders named."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in READERS) if path.is_dir() else [path]
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
    """Write the training set; what cannot be used is in the tally's problems, and the rest goes on."""
    tally = Tally()
    marked = pair(slides, annotations, tally)
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
            known = name if names.count(name) == 1 else path.name
            side = side_for(slide, cut)
            facts: dict[str, Any] = {"slide": known, "laboratory": laboratory(path), "mpp": cut.mpp, "size": cut.size}
            try:
                with ThreadPoolExecutor(core_count(), "mutirao-cut") as pool:
                    read = partial(picture_at, slide, side, cut.size)
                    for (place, (label, source)), content in zip(places.items(), pool.map(read, places), strict=True):
                        file = f"{label}/{known}_x{place[0]}_y{place[1]}.png"
                        tally.tiles[label] += 1
                        where: dict[str, Any] = {
                            "x": place[0],
                            "y": place[1],
                            "label": label,
                            "source": source,
                            "reader": reader,
                        }
                        yield Origin(file, **facts, **where), partial(save, content)
            except MutiraoError as error:
                tally.problems.append(str(error))
            finally:
                slide.close()
            watch(f"{path.name}: {len(places):,} tiles from {len(kept[path]):,} marks")

    write_set(out, classes, tiles(), Scale(cut.size, cut.mpp))
    return tally


def picture_at(slide: Slide, side: int, size: int, place: Place) -> bytes:
    """A tile as a PNG file."""
    return encode(Image.fromarray(slide.region(*place, side, size)), "PNG", compress_level=1)


def save(content: bytes, path: Path) -> None:
    """Write a file of a folder that counts only once it is whole."""
    path.write_bytes(content)
