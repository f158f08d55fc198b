"""Labels of tiles by human readers: the tiles of a folder, and a file for each reader, written at every click.

A reader's file is append-only, and a line counts once it is complete: no acknowledged label is lost in a crash. The
last line of a tile is its label; an empty class withdraws it.
"""

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mutirao.config import one_line
from mutirao.datasets.class_folders import ENDINGS
from mutirao.datasets.tile_folders import ORIGINS, TileScale, csv_text, is_class_name, read_tile_scale
from mutirao.errors import ConfigError
from mutirao.io import append_whole, decode_text, lock, read_csv, read_rows, read_text, sync, write_whole
from mutirao.systems.cytology.slides.tiling import read_tile_table as read_tiles

log = logging.getLogger("mutirao")

HEADER = ("tile", "class", "time")
CLASSES = "labels.json"
READER = re.compile(r"[^\W_][\w-]{0,39}")
MOST_TILES = 100_000
MOST_BYTES = 1 << 28  # of a reader's file


@dataclass(frozen=True)
class LabelTile:
    """A tile to label: its name (the path below the folder), its file, and its origin, as far as known."""

    name: str
    path: Path
    slide: str = ""
    laboratory: str = ""
    x: int | str = ""
    y: int | str = ""


@dataclass(frozen=True)
class Tiles:
    """All tiles of a folder, in the same order for all readers, and their scale if it is known."""

    folder: Path
    tiles: tuple[LabelTile, ...]
    scale: TileScale | None

    @property
    def by_name(self) -> dict[str, LabelTile]:
        """The tiles by their names."""
        return {tile.name: tile for tile in self.tiles}


def tiles_in(folder: Path) -> Tiles:
    """The kept tiles that `mutirao slides tile` wrote into a folder, or else all images in and below it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    cut = [folder]
    if not (folder / "tiles.csv").is_file():
        cut = sorted(p.parent for p in folder.glob("*/tiles.csv"))
    found = list(cut_tiles(folder, cut)) if cut else list(pictures_below(folder))
    if not found:
        raise ConfigError(f"{folder} holds no tiles; expected what mutirao slides tile or cut writes, or pictures")
    if len(found) > MOST_TILES:
        raise ConfigError(f"{folder} holds {len(found):,} tiles, more than {MOST_TILES:,}; label them in parts")
    scales = {scale_at(place) for place in cut} or {read_tile_scale(folder)}
    if len(scales) > 1:
        raise ConfigError(f"{folder} holds tiles of different scales; cut all slides at one scale")
    return Tiles(folder, tuple(found), scales.pop())


def cut_tiles(folder: Path, places: Sequence[Path]) -> Iterator[LabelTile]:
    """The kept tiles of slides that were cut into these folders."""
    for place in places:
        for tile in read_tiles(place / "tiles.csv"):
            path = place / "tiles" / tile.name
            name = path.relative_to(folder).as_posix()
            if tile.kept and path.is_file() and Path(tile.name).name == tile.name and name.isprintable():
                yield LabelTile(name, path, place.name, "", tile.x, tile.y)


def pictures_below(folder: Path) -> Iterator[LabelTile]:
    """All images in and below a folder, with their origins in `origins.csv`.

    They are sorted by file name: the order of class folders would show a reader earlier labels.
    """
    table = folder / ORIGINS
    known = {row.get("file", ""): row for row in read_csv(table)} if table.is_file() else {}
    files = (p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    for path in sorted(files, key=lambda p: (p.name, p)):
        name = path.relative_to(folder).as_posix()
        if not name.isprintable() or any(part.startswith(".") for part in name.split("/")):
            continue
        row = known.get(name, {})
        yield LabelTile(name, path, *(row.get(k, "") for k in ("slide", "laboratory", "x", "y")))


def scale_at(place: Path) -> TileScale | None:
    """The scale of a slide's tiles; None without its `slide.json`."""
    try:
        facts = json.loads(read_text(place / "slide.json"))
        return TileScale(int(facts["size"]), float(facts["mpp"]))
    except (ConfigError, ValueError, KeyError, TypeError, RecursionError):
        return None


# ---- a reader's file -------------------------------------------------------------------------------------------------


def file_of(folder: Path, reader: str) -> Path:
    """The file of a reader's labels."""
    if not READER.fullmatch(reader):
        raise ConfigError(f"--reader: {reader[:60]!r} is not a name; use letters, digits and dashes, as in ana")
    return folder / f"labels-{reader}.csv"


def readers_in(folder: Path) -> list[str]:
    """The readers who have labelled tiles of a folder."""
    names = sorted(p.stem.removeprefix("labels-") for p in folder.glob("labels-*.csv"))
    return [name for name in names if READER.fullmatch(name)]


def whole_lines(path: Path) -> bytes:
    """A file up to its last complete line; what a crash left after it was never acknowledged."""
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES:,} bytes, which labels are not")
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def read_label_lines(path: Path) -> list[tuple[str, str]]:
    """Tile and class of each line of a reader's file, in their order."""
    content = whole_lines(path)
    if not content:
        return []
    rows = read_rows(decode_text(content, path), path)
    _, header = next(rows)
    if tuple(header) != HEADER:
        raise ConfigError(f"{path} is not a file of labels: its columns are not {', '.join(HEADER)}")
    out = []
    for line, cells in rows:
        if len(cells) != len(HEADER):
            raise ConfigError(f"{path}, line {line}: {len(cells)} cells, where a label has {len(HEADER)}")
        out.append((cells[0], cells[1]))
    return out


def last_of(lines: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The label of each tile that has one, by its last line.

    >>> last_of([("a", "normal"), ("b", "normal"), ("a", "abnormal"), ("b", "")])
    {'a': 'abnormal'}
    """
    found = dict(lines)
    return {tile: label for tile, label in found.items() if label}


def label_classes(folder: Path, named: Sequence[str]) -> tuple[str, ...]:
    """The classes that all readers of a folder use: stored when first given; later ones can only be added."""
    for name in named:
        if not is_class_name(name):
            raise ConfigError(f"--classes: {name[:60]!r} cannot be the name of a class, which is also a folder's name")
    path = folder / CLASSES
    known: tuple[str, ...] = ()
    if path.is_file():
        try:
            known = tuple(str(name) for name in json.loads(read_text(path))["classes"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} does not name the classes: {one_line(error)}") from error
    if known and named and list(named[: len(known)]) != list(known):
        raise ConfigError(
            f"the readers of {folder} use the classes {', '.join(known)}; others can only be added at the end"
        )
    classes = tuple(named) or known
    if not 2 <= len(set(classes)) == len(classes) <= 9:
        raise ConfigError("name two to nine classes, each once: --classes normal,abnormal")
    if classes != known:
        write_whole(path, json.dumps({"classes": classes}, ensure_ascii=False) + "\n")
    return classes


class Labels:
    """The labels of one reader, in memory and on disk; `put` returns when they are on the disk."""

    def __init__(self, path: Path, tiles: Sequence[str], classes: Sequence[str]) -> None:
        self.path = path
        self.classes = tuple(classes)
        self.known = frozenset(tiles)
        self.guard = threading.Lock()
        lines = read_label_lines(path) if path.exists() else []
        unknown = sorted({label for _, label in lines if label and label not in self.classes})
        if unknown:
            raise ConfigError(f"{path} has the class {unknown[0]!r}, which is none of {', '.join(classes)}")
        self.lines = [(tile, label) for tile, label in lines if tile in self.known]
        if gone := {tile for tile, _ in lines} - self.known:
            log.warning("%s labels %d tiles that are no longer there", path, len(gone))
        self.now = last_of(self.lines)

    def put(self, changes: Sequence[tuple[str, str]]) -> None:
        """Add labels ("" withdraws one); ConfigError for an unknown tile or class, and then none is added."""
        for tile, label in changes:
            if tile not in self.known:
                raise ConfigError(f"there is no tile {tile[:80]!r}")
            if label and label not in self.classes:
                raise ConfigError(f"there is no class {label[:60]!r}")
        time = datetime.now(UTC).isoformat(timespec="seconds")
        content = csv_text([[tile, label, time] for tile, label in changes]).encode()
        with self.guard:
            before = self.path.stat().st_size
            try:
                append_whole(self.path, content)
                sync(self.path)
            except OSError:
                # The next label must not follow half a line.
                os.truncate(self.path, before)
                raise
            self.lines += changes
            for tile, label in changes:
                self.now.pop(tile, None)
                if label:
                    self.now[tile] = label

    def steps(self, most: int = 100) -> list[tuple[str, str]]:
        """The last changes, each with the tile's label before it, for undo."""
        current: dict[str, str] = {}
        out = []
        for tile, label in self.lines:
            out.append((tile, current.get(tile, "")))
            current[tile] = label
        return out[-most:]


@contextmanager
def open_labels(folder: Path, reader: str, tiles: Tiles, classes: Sequence[str]) -> Iterator[Labels]:
    """Open a reader's file, locked by this process, without an incomplete last line."""
    path = file_of(folder, reader)
    new = not path.exists()
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        # A second page of the same reader would mix its lines with ours.
        lock(handle, path)
        whole = len(whole_lines(path))
        if whole < path.stat().st_size:
            log.warning("%s ended in the middle of a line, which was never acknowledged and is dropped", path)
            os.truncate(path, whole)
        if not whole:
            append_whole(path, csv_text([HEADER]).encode())
        sync(path)
        # A new file needs its entry in the folder on the disk, too, or a power failure may lose it.
        if new:
            sync(folder)
        yield Labels(path, [tile.name for tile in tiles.tiles], classes)
    finally:
        os.close(handle)


def read_labels(folder: Path, readers: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Read the labels of all readers of a folder, or of those given."""
    names = list(readers) or readers_in(folder)
    for name in names:
        if not file_of(folder, name).is_file():
            raise ConfigError(
                f"{folder} has no labels of {name!r}; it has those of {', '.join(readers_in(folder)) or 'no reader'}"
            )
    if not names:
        raise ConfigError(f"no reader has labelled {folder}; begin with mutirao slides label")
    return {name: last_of(read_label_lines(file_of(folder, name))) for name in names}


# ---- from labels to classes ------------------------------------------------------------------------------------------


def combine_labels(
    labels: Mapping[str, Mapping[str, str]], tiles: Sequence[str], rule: str
) -> tuple[dict[str, str], Counter[str]]:
    """Combine the readers' labels into one class for each tile; count the tiles without one, by reason.

    `agreed`: every reader chose the same class. `majority`: more than half of those who labelled the tile did.

    >>> combine_labels({"ana": {"a": "x", "b": "x"}, "rui": {"a": "x", "b": "y"}}, ["a", "b", "c"], "agreed")
    ({'a': 'x'}, Counter({'disputed': 1, 'unlabelled': 1}))
    """
    found = {}
    without = Counter[str]()
    for tile in tiles:
        votes = Counter(given[tile] for given in labels.values() if tile in given)
        if not votes:
            without["unlabelled"] += 1
            continue
        best, count = votes.most_common(1)[0]
        if rule == "agreed" and votes.total() < len(labels):
            without["not labelled by all"] += 1
        elif count == votes.total() or (rule == "majority" and 2 * count > votes.total()):
            found[tile] = best
        else:
            without["disputed"] += 1
    return found, without
