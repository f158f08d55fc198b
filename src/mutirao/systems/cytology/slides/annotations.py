"""Read annotations: QuPath's GeoJSON, ASAP's XML, and tables of points or boxes, in pixels of the finest level.

An annotation that cannot be used is reported in one line with its file and position; the others are used. The area of
an annotation inside a tile is measured by the even-odd rule, exactly along each of many scan lines.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text

Floats = npt.NDArray[np.float64]
LINES = 64  # scan lines through a square: a straight edge is off by at most half a line


def bounds(rings: Sequence[Floats]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of an outline."""
    points = np.concatenate(rings)
    (left, top), (right, bottom) = points.min(0), points.max(0)
    return float(left), float(top), float(right), float(bottom)


def crossings(starts: Floats, ends: Floats, y: float) -> Floats:
    """The x where the edges of all rings cross a horizontal line, sorted; an even number of them."""
    # Half-open: a corner exactly on the line counts once, for one of its two edges, so that the number stays even.
    cuts = (starts[:, 1] <= y) != (ends[:, 1] <= y)
    a = starts[cuts]
    b = ends[cuts]
    return np.sort(a[:, 0] + (y - a[:, 1]) * (b[:, 0] - a[:, 0]) / (b[:, 1] - a[:, 1]))


def covered(rings: Sequence[Floats], lefts: Floats, top: float, width: float, height: float) -> Floats:
    """The area inside the outline of each rectangle of a row, by `LINES` scan lines.

    Inside is what an odd number of edges must be crossed to leave, so holes and crossed outlines need no special case.
    """
    starts = np.concatenate(rings)
    ends = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
    found = np.zeros(len(lefts))
    for y in top + (np.arange(LINES) + 0.5) * height / LINES:
        x = crossings(starts, ends, y)
        for enter, leave in zip(x[::2], x[1::2], strict=True):
            found += np.maximum(0.0, np.minimum(lefts + width, leave) - np.maximum(lefts, enter))
    area: Floats = found * height / LINES
    return area


def area(rings: Sequence[Floats]) -> float:
    """The area inside an outline; a point has none."""
    left, top, right, bottom = bounds(rings)
    if right <= left or bottom <= top:
        return 0.0
    return float(covered(rings, np.array([left]), top, right - left, bottom - top)[0])


# ---- files -----------------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 28  # of an annotation file
FARTHEST = 1e8  # pixels: no slide is as large
ASAP_AREAS = {"polygon", "rectangle", "spline"}
ASAP_POINTS = {"dot", "pointset"}
ALIASES = {
    "x": ("x", "left", "xmin", "x_min", "centroid x px"),
    "y": ("y", "top", "ymin", "y_min", "centroid y px"),
    "w": ("w", "width"),
    "h": ("h", "height"),
    "right": ("right", "xmax", "x_max"),
    "bottom": ("bottom", "ymax", "y_max"),
    "class": ("class", "label", "classification", "category"),
    "slide": ("slide", "image", "file", "filename"),
}
TABLE = "columns x, y and class, for boxes w and h too (or xmax and ymax), perhaps slide; in pixels of the finest level"


@dataclass(frozen=True)
class Mark:
    """A point, or the outline of an area (its holes are rings too), with the class it was given and where it stands."""

    label: str
    rings: tuple[Floats, ...]
    where: str
    slide: str = ""  # if the file says

    @property
    def is_point(self) -> bool:
        """Whether it is a place without an extent."""
        return len(self.rings[0]) == 1


Found = Iterator[Mark | str]  # marks, and one line for each annotation that is not usable


def read_annotations(path: Path) -> tuple[list[Mark], list[str]]:
    """Read the marks of a file, and the problems; ConfigError if its suffix is of none of the formats."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if not path.is_file() or size > MOST_BYTES:
        raise ConfigError(f"{path} is not a regular file of at most {MOST_BYTES:,} bytes")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: annotations end in {', '.join(READERS)}")
    marks = []
    problems = []
    for found in reader(path):
        if isinstance(found, str):
            problems.append(f"{path.name}, {found}")
        else:
            marks.append(found)
    return marks, problems


def outline(points: Any) -> Floats:
    """A ring of points; ValueError if they cannot be on a slide."""
    ring = np.array([[float(p[0]), float(p[1])] for p in points], np.float64)
    if not len(ring) or not np.isfinite(ring).all() or np.abs(ring).max() > FARTHEST:
        raise ValueError("its coordinates cannot be on a slide")
    return ring


# ---- GeoJSON ---------------------------------------------------------------------------------------------------------


def read_geojson(path: Path) -> Found:
    """QuPath's export: a FeatureCollection, one Feature, or the plain array that QuPath wrote before and still can."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {one_line(error)[:120]}") from error
    if isinstance(content, dict) and content.get("type") == "FeatureCollection":
        content = content.get("features")
    elif isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise ConfigError(f"{path} is not GeoJSON; expected a FeatureCollection, or an array of features")
    for number, feature in enumerate(content, 1):
        where = f"feature {number}"
        try:
            label = class_of(feature.get("properties") or {})
            if not label:
                yield f"{where}: it has no class"
                continue
            for rings in shapes(feature["geometry"]):
                yield Mark(label, rings, f"{path.name}, {where}")
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            why = "it is not a feature with a geometry"
            # A ValueError itself is ours and gives a reason. Its subclasses, and other errors, are Python's.
            if type(error) is ValueError:
                why = one_line(error)[:100]
            yield f"{where}: {why}"


def class_of(properties: Mapping[str, Any]) -> str:
    """QuPath's class: `classification` with a `name`, or `names` of a class derived from others."""
    label = properties.get("classification")
    if isinstance(label, Mapping):
        names = label.get("names")
        label = ": ".join(map(str, names)) if isinstance(names, list) else label.get("name")
    if isinstance(label, str):
        return label.strip()
    return ""


def shapes(geometry: Mapping[str, Any]) -> Iterator[tuple[Floats, ...]]:
    """The rings of each point and each polygon of a geometry."""
    kind = geometry["type"]
    if kind == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from shapes(part)
        return
    places = geometry["coordinates"]
    if kind in ("Point", "Polygon"):
        places = [places]
    if kind in ("Point", "MultiPoint"):
        for place in places:
            yield (outline([place]),)
    elif kind in ("Polygon", "MultiPolygon"):
        for polygon in places:
            yield area_of([outline(ring) for ring in polygon])
    else:
        raise ValueError(f"a {str(kind)[:40]} has no area; points and polygons are used")


def area_of(rings: list[Floats]) -> tuple[Floats, ...]:
    """The rings of an area; ValueError if they enclose none."""
    if not rings or any(len(ring) < 3 for ring in rings):
        raise ValueError("a polygon needs three points at least")
    return tuple(rings)


# ---- ASAP ------------------------------------------------------------------------------------------------------------


def read_asap(path: Path) -> Found:
    """ASAP's XML: polygons, rectangles, splines (by their points), dots and sets of points; the group is the class."""
    text = read_text(path)
    # Entities can expand without end, or name other files.
    if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
        raise ConfigError(f"{path} declares a document type, which ASAP does not write; it is not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{path} is not XML: {one_line(error)}") from error
    if root.tag != "ASAP_Annotations":
        raise ConfigError(f"{path} is not a file of ASAP: it begins with <{root.tag[:40]}>, not <ASAP_Annotations>")
    for number, node in enumerate(root.iterfind("Annotations/Annotation"), 1):
        where = f"annotation {number}"
        label = (node.get("PartOfGroup") or "").strip()
        try:
            if label in ("", "None"):
                raise ValueError("it has no class: it is part of no group")
            kind = (node.get("Type") or "").lower()
            ring = asap_places(node)
            if kind in ASAP_POINTS:
                for place in ring:
                    yield Mark(label, (place[None],), f"{path.name}, {where}")
            elif kind in ASAP_AREAS:
                yield Mark(label, area_of([ring]), f"{path.name}, {where}")
            else:
                raise ValueError(
                    f"{kind[:40]!r} is not supported; supported are polygon, rectangle, spline, dot, pointset"
                )
        except (ValueError, TypeError) as error:
            yield f"{where}: {one_line(error)[:120]}"


def asap_places(node: ElementTree.Element) -> Floats:
    """The coordinates of an annotation in their order; some ASAP write a decimal comma."""
    found: list[tuple[float, tuple[float, float]]] = []
    for place in node.iterfind("Coordinates/Coordinate"):
        x = (place.get("X") or "").replace(",", ".")
        y = (place.get("Y") or "").replace(",", ".")
        found.append((float(place.get("Order") or len(found)), (float(x), float(y))))
    return outline([place for _, place in sorted(found, key=lambda pair: pair[0])])


# ---- tables ----------------------------------------------------------------------------------------------------------


def read_points(path: Path) -> Found:
    """A table of points or, with a width and a height, of boxes with the corner (left, top) at x, y."""
    text = read_text(path)
    first = text.split("\n", 1)[0]
    rows = read_rows(text, path, max(",;\t", key=first.count))
    _, header = next(rows, (1, []))
    names = [name.strip().lower() for name in header]
    at: dict[str, int] = {}
    for column, aliases in ALIASES.items():
        for alias in aliases:
            if alias in names:
                at[column] = names.index(alias)
    if not {"x", "y", "class"} <= at.keys():
        raise ConfigError(f"{path} has columns {', '.join(header)[:120] or 'none'}; right would be {TABLE}")
    for line, cells in rows:
        if not any(cell.strip() for cell in cells):
            continue
        # Programs may leave out the empty cells at the end of a line.
        padded = [*cells, *[""] * (len(header) - len(cells))]
        row = {k: padded[i].strip() for k, i in at.items()}
        try:
            if not row["class"]:
                raise ValueError("it has no class")
            x = parse_number(row, "x")
            y = parse_number(row, "y")
            w = extent(row, "w", "right", x)
            h = extent(row, "h", "bottom", y)
            if w < 0 or h < 0 or (w > 0) != (h > 0):
                raise ValueError(f"a box cannot have {w:g} x {h:g} pixels")
            corners = [(x, y)]
            if w:
                corners += [(x + w, y), (x + w, y + h), (x, y + h)]
            yield Mark(row["class"], (outline(corners),), f"{path.name}, line {line}", row.get("slide", ""))
        except ValueError as error:
            yield f"line {line}: {one_line(error)[:120]}"


def extent(row: Mapping[str, str], size: str, end: str, start: float) -> float:
    """A box's width or height, from its own column or from the column of its end; 0 for a point."""
    if row.get(size):
        return parse_number(row, size)
    if row.get(end):
        return parse_number(row, end) - start
    return 0.0


def parse_number(row: Mapping[str, str], name: str) -> float:
    """A cell as a number."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is {row[name][:20]!r}, which is not a number")
    return value


READERS: dict[str, Callable[[Path], Found]] = {
    ".geojson": read_geojson,
    ".json": read_geojson,
    ".xml": read_asap,
    ".csv": read_points,
    ".tsv": read_points,
}
