"""Files that are whole or not there: atomic writes, tables that grow, checkpoints that know if they are damaged."""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.arrays import Arrays
from mutirao.errors import Damaged

MOST_COLUMNS = 256  # names of metrics come from clients: they must not grow a table without end


def write_whole(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Replace a file in one step: readers and crashes see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)


def append_whole(path: Path, content: bytes) -> None:
    """Add bytes at the end of a file; OSError if not all of them fit, where a plain write may just write fewer."""
    with path.open("ab", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]


def plain(value: Any) -> Any:
    """A value as CSV and JSON can hold it: NumPy scalars become Python's, text stays on one line."""
    if isinstance(value, np.generic):
        value = value.item()
    return " ".join(value.split()) if isinstance(value, str) else value


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
        block = self._text(rows)
        append_whole(self.path, block.encode())
        self.rows += len(rows)
        return [{k: t for k in self.columns if (t := str(plain(row.get(k, "")))) != ""} for row in rows]

    def read(self) -> list[dict[str, str]]:
        """All whole rows; empty cells are left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.reader(io.StringIO(whole))
        header = next(reader, [])
        return [
            {k: v for k, v in zip(header, cells, strict=True) if v != ""}
            for cells in reader
            if len(cells) == len(header)
        ]

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
        write_whole(self.path, ",".join(self.columns) + "\n" + self._text(rows))

    def _text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([plain(row.get(k, "")) for k in self.columns] for row in rows)
        return out.getvalue()


def typed_row(row: Mapping[str, str]) -> dict[str, Any]:
    """A row of a table with numbers as numbers again."""

    def value(text: str) -> Any:
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        try:
            return float(text)
        except ValueError:
            return text

    return {k: value(v) for k, v in row.items()}


def save_arrays(path: Path, arrays: Arrays, facts: Mapping[str, Any], durable: bool = True) -> int:
    """Write arrays and facts as one safetensors file; return its size."""
    from safetensors.numpy import save

    tidy = {k: np.asarray(v, order="C") for k, v in arrays.items()}
    content = save(tidy, {"mutirao": json.dumps(facts, sort_keys=True)})
    write_whole(path, content, durable)
    return len(content)


def load_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and facts of a file written by `save_arrays`; Damaged if it is anything else."""
    from safetensors.numpy import load

    try:
        content = path.read_bytes()
        arrays = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        facts = json.loads(header["__metadata__"]["mutirao"])
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} was not written by mutirao") from error
    except Exception as error:  # safetensors raises its own kinds for broken headers, and MemoryError for absurd ones
        raise Damaged(f"{path} is corrupt or truncated ({str(error).splitlines()[0][:100]})") from error
    if not isinstance(facts, dict):
        raise Damaged(f"{path} was not written by mutirao")
    return arrays, facts
