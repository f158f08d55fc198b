"""CSV tables that only grow, as a run folder has them; what a crash cut off is left out."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.core.files import append_whole, plain, write_whole
from mutirao.core.text import write_plain, write_rows
from mutirao.errors import Damaged

MOST_COLUMNS = 256  # names of metrics come from clients: they must not grow a table without end


class Table:
    """A CSV file that only grows, a block of rows at a time; a new column rewrites it whole, once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0

    def append(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Add rows at the end in one write; return them as they will read back."""
        known = set(self.columns)
        new = list(dict.fromkeys(k for row in rows for k in row if k not in known))[: MOST_COLUMNS - len(known)]
        if new and self.rows:
            old = self.read()
            self.columns += new
            self._write(old)
        elif new:
            self.columns += new
            self._write([])
        cells = self._cells(rows)
        append_whole(self.path, write_plain(cells).encode())
        self.rows += len(rows)
        return [{k: t for k, cell in zip(self.columns, line, strict=True) if (t := str(cell)) != ""} for line in cells]

    def read(self) -> list[dict[str, str]]:
        """All whole rows; empty cells are left out."""
        header, rows = read_csv(self.path)
        return [{k: v for k, v in zip(header, cells, strict=True) if v != ""} for cells in rows]

    def first(self, rows: int) -> list[dict[str, str]]:
        """The first `rows` rows; Damaged if there are fewer."""
        kept = self.read()
        if len(kept) < rows:
            raise Damaged(f"{self.path} has {len(kept)} whole rows, {rows} are expected")
        return kept[:rows]

    def go_on_after(self, rows: int) -> None:
        """Drop what stands behind the first `rows` rows: it belongs to a round that was never finished."""
        everything = self.read()
        if self.path.exists():
            with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
                self.columns = next(csv.reader([file.readline()]), [])
        self.rows = rows
        if len(everything) > rows or not self._ends_whole():
            self._write(everything[:rows])

    def _ends_whole(self) -> bool:
        content = self.path.read_bytes() if self.path.exists() else b""
        return not content or content.endswith(b"\n")

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_whole(self.path, write_rows([self.columns]) + write_plain(self._cells(rows)))

    def _cells(self, rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
        return [[plain(row.get(k, "")) for k in self.columns] for row in rows]


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the whole rows of a CSV file, both empty if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))
    header = next(reader, [])
    return header, [cells for cells in reader if len(cells) == len(header)]
