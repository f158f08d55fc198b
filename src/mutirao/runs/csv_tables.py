"""CSV tables that only grow, as a run folder has them, read in parts; what a crash cut off is left out."""

import csv
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.errors import Damaged
from mutirao.io import append_whole, name_path_in_errors, plain_value, write_plain, write_rows

MOST_COLUMNS = 256  # names of metrics come from clients: they must not grow a table without end
PART = 20_000  # rows that are held at once: of a long table never all


class CsvTable:
    """A CSV file that only grows, a block of rows at a time; a new column rewrites it whole, once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self._counted: tuple[Any, int] = (None, 0)  # of the file as it was then

    def append(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Add rows at the end in one write; return them as they will read back."""
        known = set(self.columns)
        new = list(dict.fromkeys(k for row in rows for k in row if k not in known))[: MOST_COLUMNS - len(known)]
        if new:
            self.columns += new
            self._write(self.rows)
        cells = self._cells(rows)
        append_whole(self.path, write_plain(cells).encode())
        self.rows += len(rows)
        return [{k: t for k, cell in zip(self.columns, line, strict=True) if (t := str(cell)) != ""} for line in cells]

    def each(self) -> Generator[dict[str, str], None, None]:
        """All whole rows, one after the other; empty cells are left out."""
        for header, rows in read_csv_parts(self.path):
            for cells in rows:
                yield {k: v for k, v in zip(header, cells, strict=True) if v != ""}

    def read(self) -> list[dict[str, str]]:
        """All whole rows at once, of a table that is not long."""
        return list(self.each())

    def first(self, rows: int) -> list[dict[str, str]]:
        """The first `rows` rows; Damaged if there are fewer."""
        self.check(rows)
        return list(itertools.islice(self.each(), rows))

    def check(self, rows: int) -> None:
        """Damaged if there are not so many rows."""
        if (found := self.count()) < rows:
            raise Damaged(f"{self.path} has {found} whole rows, {rows} are expected")

    def count(self) -> int:
        """How many whole rows there are; a file that did not change is not read again."""
        now = self.path.stat() if self.path.is_file() else None
        mark = now and (now.st_size, now.st_mtime_ns, now.st_ino)
        if self._counted[0] != mark:
            self._counted = mark, sum(len(rows) for _, rows in read_csv_parts(self.path))
        return self._counted[1]

    def go_on_after(self, rows: int) -> None:
        """Drop what stands behind the first `rows` rows: it belongs to a round that was never finished."""
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
        """Put the file in order: the columns there are now, and the first `rows` rows."""
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
                part.unlink(missing_ok=True)  # what did not fit must not fill the disk
                raise

    def _cells(self, rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
        return [[plain_value(row.get(k, "")) for k in self.columns] for row in rows]


def read_csv_parts(path: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The header of a CSV file with its whole rows, at most PART at a time; nothing if there is no file.

    A file with a header alone gives it with no rows.
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
