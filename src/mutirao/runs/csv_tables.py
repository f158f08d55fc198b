"""CSV tables of a run folder, to which rows are only appended; a row that a crash cut off is ignored."""

import csv
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.errors import Damaged
from mutirao.io import append_whole, name_path_in_errors, plain_value, write_plain, write_rows

MOST_COLUMNS = 256  # metric names come from clients, who must not grow a table without bound
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
        now = self.path.stat() if self.path.is_file() else None
        mark = now and (now.st_size, now.st_mtime_ns, now.st_ino)
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
                part.unlink(missing_ok=True)  # a partial file must not fill the disk
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
        reader = csv.reader(line for line in file if line.endswith("\n"))  # the last one may be cut off
        header = next(reader, None)
        if header is None:
            return
        sent = False
        while some := list(itertools.islice(reader, PART)):
            sent = True
            yield header, [cells for cells in some if len(cells) == len(header)]
        if not sent:
            yield header, []
