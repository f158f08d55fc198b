"""CSV tables of a run folder, to which rows are only appended; a row that a crash cut off is ignored.

A table is read by columns, in about as much memory as it takes on disk, also with a million rows. Columns that are not
named here are metrics or clients' figures.
"""

import csv
import itertools
import math
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import Damaged
from mutirao.io import append_whole, name_path_in_errors, plain_value, write_plain, write_rows

# Metric names come from clients, which must not be able to grow a table without bound.
MOST_COLUMNS = 256
PART = 20_000  # rows in memory at once


class CsvTable:
    """A CSV file to which blocks of rows are appended; a new column rewrites it once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self._counted: tuple[Any, int] = (None, 0)  # (state of the file, its rows)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Append rows in one write; return them as they will be read."""
        known = set(self.columns)
        names = dict.fromkeys(name for row in rows for name in row)
        new = [name for name in names if name not in known][: MOST_COLUMNS - len(known)]
        if new:
            self.columns += new
            self._write(self.rows)
        cells = self._cells(rows)
        append_whole(self.path, write_plain(cells).encode())
        self.rows += len(rows)
        return [non_empty(self.columns, map(str, line)) for line in cells]

    def each(self) -> Generator[dict[str, str], None, None]:
        """All complete rows, one after the other, without their empty cells."""
        for header, rows in read_csv_parts(self.path):
            for cells in rows:
                yield non_empty(header, cells)

    def read(self) -> list[dict[str, str]]:
        """All complete rows in memory, for short tables."""
        return list(self.each())

    def first(self, rows: int) -> list[dict[str, str]]:
        """The first `rows` rows; raises Damaged if there are fewer."""
        self.check(rows)
        return list(itertools.islice(self.each(), rows))

    def check(self, rows: int) -> None:
        """Raise Damaged if there are fewer rows."""
        found = self.count()
        if found < rows:
            raise Damaged(f"{self.path} has {found} complete rows, expected {rows}")

    def count(self) -> int:
        """The number of complete rows; an unchanged file is not read again."""
        mark = None
        if self.path.is_file():
            now = self.path.stat()
            mark = (now.st_size, now.st_mtime_ns, now.st_ino)
        if self._counted[0] != mark:
            self._counted = mark, sum(len(rows) for _, rows in read_csv_parts(self.path))
        return self._counted[1]

    def go_on_after(self, rows: int) -> None:
        """Remove all but the first `rows` rows: the others belong to a round that was never committed."""
        self.columns, _ = next(read_csv_parts(self.path), ([], []))
        self.rows = rows
        if self.count() > rows or not self._ends_whole():
            self._write(rows)

    def _ends_whole(self) -> bool:
        if not self.path.is_file() or not self.path.stat().st_size:
            return True
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _write(self, rows: int) -> None:
        """Rewrite the file with the current columns and the first `rows` rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        old = self.each()
        kept = itertools.islice(old, rows)
        with name_path_in_errors(self.path):
            try:
                with part.open("wb") as file:
                    file.write(write_rows([self.columns]).encode())
                    while block := list(itertools.islice(kept, PART)):
                        file.write(write_plain(self._cells(block)).encode())
                    file.flush()
                    os.fsync(file.fileno())
                old.close()
                part.replace(self.path)
            except OSError:
                # A partial file must not fill the disk.
                part.unlink(missing_ok=True)
                raise

    def _cells(self, rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
        cells: list[list[Any]] = []
        for row in rows:
            cells.append([plain_value(row.get(name, "")) for name in self.columns])
        return cells


def non_empty(header: Sequence[str], cells: Iterable[str]) -> dict[str, str]:
    """A row as a dictionary, without its empty cells."""
    return {name: cell for name, cell in zip(header, cells, strict=True) if cell != ""}


def read_csv_parts(path: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The header of a CSV file and its complete rows, at most PART at a time; nothing if there is no file.

    A file with a header only yields it once, without rows.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        # A crash may have cut off the last line.
        reader = csv.reader(line for line in file if line.endswith("\n"))
        header = next(reader, None)
        if header is None:
            return
        sent = False
        while some := list(itertools.islice(reader, PART)):
            sent = True
            yield header, [cells for cells in some if len(cells) == len(header)]
        if not sent:
            yield header, []


Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.intp]
# A file may contain any number. Up to 2^53 every integer is exact as a float, and fits into 64 bits.
LARGEST = 2.0**53
BREAK = "\n"  # between the cells of a column; our own tables have none within a cell


class Columns:
    """A CSV file by columns; a missing column is empty."""

    def __init__(self, path: Path) -> None:
        self.names: list[str] = []
        self.lengths: list[int] = []  # of each part, in rows
        self._parts: dict[str, list[str]] = {}  # a column as one text for each part, a line for each cell
        self._numbers: dict[str, Floats] = {}
        self._codes: dict[str, tuple[list[str], Codes]] = {}
        for self.names, rows in read_csv_parts(path):
            if rows:
                self.lengths.append(len(rows))
                for name, cells in zip(self.names, zip(*rows, strict=True), strict=True):
                    self._parts.setdefault(name, []).append(join_cells(cells))
        self.length = sum(self.lengths)

    def __len__(self) -> int:
        return self.length

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def cells(self, name: str) -> Iterator[list[str]]:
        """A column's cells as text, part by part."""
        if name not in self._parts:
            yield from ([""] * length for length in self.lengths)
            return
        for text in self._parts[name]:
            yield text.split(BREAK)

    def texts(self, name: str) -> tuple[str, ...]:
        """A column's cells as text; use `codes` for long tables."""
        return tuple(cell for part in self.cells(name) for cell in part)

    def codes(self, name: str) -> tuple[list[str], Codes]:
        """A column's distinct texts, in the order of their first rows, and each row's index into them."""
        if name not in self._codes:
            seen: dict[str, int] = {}
            codes = np.zeros(self.length, np.intp)
            at = 0
            for part in self.cells(name):
                codes[at : at + len(part)] = [seen.setdefault(cell, len(seen)) for cell in part]
                at += len(part)
            self._codes[name] = list(seen), codes
        return self._codes[name]

    def where(self, name: str, text: str) -> npt.NDArray[np.bool_]:
        """The rows in which a column has this text."""
        texts, codes = self.codes(name)
        if text not in texts:
            return np.zeros(self.length, np.bool_)
        return np.asarray(codes == texts.index(text))

    def numbers(self, name: str) -> Floats:
        """A column as numbers, NaN for other cells."""
        if name not in self._numbers:
            values = np.full(self.length, np.nan)
            if name in self:
                values = np.concatenate([numbers_of(part) for part in self.cells(name)])
            self._numbers[name] = values
        return self._numbers[name]

    def wholes(self, name: str) -> npt.NDArray[np.int64]:
        """A column as integers, 0 for other cells."""
        return np.clip(np.nan_to_num(self.numbers(name)), -LARGEST, LARGEST).astype(np.int64)


def join_cells(cells: tuple[str, ...]) -> str:
    """Cells as one text, a line for each."""
    text = BREAK.join(cells)
    if text.count(BREAK) < len(cells):
        return text
    # A line break within a cell would shift all later cells of the column.
    return BREAK.join(str(plain_value(cell)) for cell in cells)


def numbers_of(cells: list[str]) -> Floats:
    """Cells as numbers, NaN for all that are not finite."""
    try:
        values = np.array([cell or "nan" for cell in cells], np.float64)
    except ValueError:
        # One conversion of all cells is the fast path. It fails as a whole if any cell is no number.
        return np.array([finite_or_nan(cell) for cell in cells], np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def finite_or_nan(text: str) -> float:
    """A finite number, or NaN."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    if math.isfinite(value):
        return value
    return math.nan


# history.csv has a row for each round. All other columns are metrics; those that begin with `train_` are the clients'
# training metrics.
HISTORY = frozenset({"round", "seconds", "selected", "replied", "failed", "rejected", "bytes_down", "bytes_up"})
HISTORY |= {"probed", "probe_bytes", "probe_seconds", "sim_seconds", "sim_joules", "available", "waited", "clip"}
HISTORY |= {"drifted"}
# clients.csv has a row for each client selected in a round. All other columns are figures that clients reported or the
# method computed.
TEXTS = frozenset({"client", "group", "failure", "rejected"})  # never converted to numbers: a client may be called 007
SIMULATED = frozenset({"sim_seconds", "sim_joules"})
CLIENTS = TEXTS | SIMULATED | {"round", "try", "replied", "n", "n_declared", "weight", "age"}
USUAL = ("accuracy", "balanced_accuracy", "ndcg@5", "rmse", "auc")  # the monitor of runs that name none


def metrics_among(names: Iterable[str]) -> list[str]:
    """The columns of history.csv that are metrics of the model."""
    return [name for name in names if name not in HISTORY and not name.startswith("train_")]


def metrics_in_row(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a row of history, without the counters."""
    return {name: row[name] for name in metrics_among(row)}


def client_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The clients' figures in a row of clients.csv."""
    return {k: float(v) for k, v in row.items() if k not in CLIENTS and isinstance(v, int | float)}


def likely_monitor(names: Iterable[str]) -> str:
    """The metric that a run probably monitors, by the columns of its history."""
    metrics = metrics_among(names)
    return next((name for name in (*USUAL, *metrics) if name in metrics), "")


def typed_row(row: Mapping[str, str], texts: Set[str] = frozenset()) -> dict[str, Any]:
    """A row of a table with numbers converted, except in the text columns."""
    return {k: v if k in texts else typed(v) for k, v in row.items()}


def typed(text: str) -> Any:
    """A cell as an integer or float if it is one, otherwise unchanged."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
