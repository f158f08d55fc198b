"""The curves of a run: all of them read on from where the last reading ended, or one of them, thin, for a list."""

import csv
import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.runs.csv_tables import finite_or_nan

LINE = 1 << 16  # bytes in which one line surely lies
POINTS = 40  # of a sparkline
LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
MOST_LINES = 4000  # of a history that are read for a sparkline: more lines are skipped evenly


@dataclass
class History:
    """`history.csv` by columns, NaN where there is no number; only lines that are new are read."""

    path: Path
    columns: list[str] = field(default_factory=list)
    values: list["array[float]"] = field(default_factory=list)  # one a column
    offset: int = 0
    _head: bytes = b""
    _seen: tuple[int, int] = (0, 0)
    _inode: int = 0

    def __len__(self) -> int:
        if self.values:
            return len(self.values[0])
        return 0

    def read_on(self) -> int:
        """Read what is new; return the row at which the new ones begin, or -1 if nothing is new."""
        try:
            stat = self.path.stat()
        except OSError:
            return -1
        if (stat.st_size, stat.st_mtime_ns) == self._seen:
            return -1
        with self.path.open("rb") as file:
            head = file.readline(LINE)
            # A resumed run drops the rows of an unfinished round by writing a new file.
            replaced = self._inode not in (0, stat.st_ino)
            if head != self._head or stat.st_size < self.offset or replaced:
                self.offset = len(head)
                self._head = head
                self.columns = next(csv.reader(head.decode("utf-8", errors="replace").splitlines()), [])
                self.values = [array("d") for _ in self.columns]
            file.seek(self.offset)
            block = file.read()
        self._seen = (stat.st_size, stat.st_mtime_ns)
        self._inode = stat.st_ino
        # A line without its end is still being written, and is read the next time.
        whole = block[: block.rfind(b"\n") + 1]
        self.offset += len(whole)
        start = len(self)
        for cells in csv.reader(whole.decode("utf-8", errors="replace").splitlines()):
            if len(cells) == len(self.columns):
                for column, cell in zip(self.values, cells, strict=True):
                    column.append(finite_or_nan(cell))
        if len(self) > start or start == 0:
            return start
        return -1

    def column(self, name: str) -> Sequence[float]:
        """A column, empty if there is none."""
        if name in self.columns:
            return self.values[self.columns.index(name)]
        return ()

    def part(self, start: int = 0, only: Iterable[str] = ()) -> dict[str, list[float | None]]:
        """The columns from a row on, with None for NaN, which JSON lacks; `only` some of them."""
        wanted = set(only)
        pairs = zip(self.columns, self.values, strict=True)
        return {
            name: [None if math.isnan(v) else v for v in column[start:]]
            for name, column in pairs
            if not wanted or name in wanted
        }


def read_column(path: Path, name: str) -> list[float]:
    """The numbers of one column of a finished run, without reading the others; of a long history only some."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    if not lines:
        return []
    head = next(csv.reader([lines[0].decode("utf-8", errors="replace")]), [])
    if name not in head:
        return []
    at = head.index(name)
    lines = lines[1 :: max(1, len(lines) // MOST_LINES)]
    # Lines are split by hand, no further than the wanted cell; with quotes a comma may lie within a cell.
    if b'"' in content:
        rows: Any = csv.reader(line.decode("utf-8", errors="replace") for line in lines)
    else:
        rows = (line.split(b",", at + 1) for line in lines)
    values = (finite_or_nan(cells[at]) for cells in rows if len(cells) > at)
    return [v for v in values if v == v]


def thin(values: Sequence[float], points: int = POINTS) -> list[float]:
    """Means of equal stretches, at most `points` of them."""
    if len(values) <= points:
        return list(values)
    ends = [len(values) * i // points for i in range(points + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


def spark(values: Iterable[float]) -> str:
    """A curve as a word, one letter a point, from `0` at its lowest to `_` at its highest: the list has thousands."""
    known = thin([v for v in values if v == v])
    if len(known) < 2:
        return ""
    low = min(known)
    high = max(known)
    scale = 0.0
    if high > low:
        scale = (len(LEVELS) - 1) / (high - low)
    if not math.isfinite(scale):
        return ""
    # Also zero where the difference of both is too large for a float.
    if not scale:
        return LEVELS[len(LEVELS) // 2] * len(known)
    return "".join(LEVELS[round((v - low) * scale)] for v in known)
