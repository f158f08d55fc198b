"""Class folders of tiles with metadata: `origins.csv` has the origin of each tile, `tiles.json` the scale of all.

A model trained on tiles of one scale is wrong on others, so size and scale are stored with the training set.
"""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from mutirao.config import one_line
from mutirao.datasets.image_layouts import GLOBAL_TEST, TEST, TRAINING, clients_in
from mutirao.errors import ConfigError
from mutirao.io import read_text, write_whole

SCALE = "tiles.json"
ORIGINS = "origins.csv"
KIND = "mutirao tiles"
CLASS_NAME = re.compile(r"[^\W_][\w .:+()-]{0,59}(?<! )")


@dataclass(frozen=True)
class TileScale:
    """The scale of tiles: their side in pixels, and micrometres a pixel."""

    size: int
    mpp: float

    def __post_init__(self) -> None:
        if not 16 <= self.size <= 65536 or not 0.02 <= self.mpp <= 50:
            raise ConfigError(f"tiles of {self.size!r} pixels at {self.mpp!r} micrometres a pixel cannot be")

    def __str__(self) -> str:
        return f"{self.size} x {self.size} pixels at {self.mpp:g} micrometres a pixel"


@dataclass(frozen=True)
class Origin:
    """A line of `origins.csv`; x and y are the tile's corner in the slide's finest pixels, "" if unknown."""

    file: str
    slide: str
    laboratory: str = ""
    mpp: float | str = ""
    x: int | str = ""
    y: int | str = ""
    size: int | str = ""
    label: str = ""
    source: str = ""
    reader: str = ""


# The table's column is `class`, which Python does not allow as the name of a field.
COLUMNS = tuple("class" if f.name == "label" else f.name for f in fields(Origin))


def is_class_name(name: str) -> bool:
    """Whether this is a valid class name: it becomes a folder's name, and stands in comma-separated lists.

    >>> is_class_name("light dysplastic"), is_class_name("../x"), is_class_name("a,b"), is_class_name("global_test")
    (True, False, False, False)
    """
    layout = {GLOBAL_TEST, TRAINING, TEST}
    return bool(CLASS_NAME.fullmatch(name)) and name not in layout and not name.startswith("client_")


def read_tile_scale(folder: Path) -> TileScale | None:
    """Read the scale of the tiles in a folder, if it is stored; ConfigError if it is invalid."""
    path = folder / SCALE
    if not path.is_file():
        return None
    try:
        found = json.loads(read_text(path))
        return TileScale(int(found["size"]), float(found["mpp"]))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{path} does not say size and mpp of the tiles: {one_line(error)}") from error


def tile_scale_of(data: Path) -> TileScale | None:
    """The scale of an image set in any layout; None if it is unknown, ConfigError if its parts differ.

    With different scales, cells of one class could be twice as large as those of another.
    """
    root = data if data.is_dir() else data.parent
    places = [root, *(root / name for name in (TRAINING, TEST, GLOBAL_TEST)), *clients_in(root)]
    known = {place: found for place in places if (found := read_tile_scale(place))}
    if len(set(known.values())) > 1:
        scales = "; ".join(f"{place}: {found}" for place, found in known.items())
        raise ConfigError(f"the tiles are of different scales: {scales}; cut all at one scale")
    return next(iter(known.values()), None)


def copy_scale(data: Path, *folders: Path) -> None:
    """Store the scale of a set in copies of its parts."""
    if scale := tile_scale_of(data):
        for folder in folders:
            write_tile_scale(folder, scale)


def write_tile_scale(folder: Path, scale: TileScale) -> None:
    """Write `tiles.json`."""
    write_whole(folder / SCALE, json.dumps({"kind": KIND, "size": scale.size, "mpp": scale.mpp}) + "\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV, each cell unchanged: a file name may contain two spaces in a row."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def write_set(
    out: Path, classes: Sequence[str], tiles: Iterable[tuple[Origin, Callable[[Path], None]]], scale: TileScale | None
) -> list[Origin]:
    """Write class folders of tiles with `origins.csv` and `tiles.json`, completely or not at all.

    `out` must be new or empty. Each tile comes with a function that writes its file. A class without a tile has an
    empty folder, so that all sites have the same class list.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose another --out")
    building = out.with_name(f".{out.name}.part")
    shutil.rmtree(building, ignore_errors=True)
    try:
        for name in classes:
            (building / name).mkdir(parents=True)
        written = []
        for origin, write in tiles:
            write(building / origin.file)
            written.append(origin)
        write_whole(building / ORIGINS, csv_text([COLUMNS, *map(astuple, written)]))
        if scale:
            write_tile_scale(building, scale)
        if out.exists():
            out.rmdir()
        building.replace(out)
    # BaseException: Ctrl+C must not leave half of a set behind either.
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return written
