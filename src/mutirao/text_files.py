"""Text from elsewhere, read by one rule: UTF-8, or Latin-1 where its publisher ships it so, or a refusal with its line.

A byte that is not understood is never replaced: two names that differ in it would become one.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mutirao.errors import ConfigError
from mutirao.io import plain

BOM = b"\xef\xbb\xbf"  # how some Windows programs mark UTF-8


def read_text(path: Path, latin1: bool = False) -> str:
    """The text of a file; `latin1` if its publisher ships it in that encoding."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return decode(content.removeprefix(BOM), path, latin1=latin1)


def decode(content: bytes, where: Path, first: int = 1, latin1: bool = False) -> str:
    """Whole lines of a file as text, the first of which is line `first`."""
    if (zero := content.find(b"\0")) >= 0:
        raise ConfigError(f"{where}, line {line_at(content, zero, first)}: a zero byte: it is not a text file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if latin1:
            return content.decode("latin-1")
        line, byte = line_at(content, error.start, first), content[error.start]
        raise ConfigError(
            f"{where}, line {line}: byte 0x{byte:02x} is not UTF-8 text; right would be a file saved as UTF-8"
        ) from error


def line_at(content: bytes, at: int, first: int) -> int:
    """The line in which a byte stands."""
    return first + content.count(b"\n", 0, at)


def read_rows(text: str, where: Path, separator: str = ",") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table with the lines they end in; a carriage return ends a line as a line feed does."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{where}, line {reader.line_num}: {error}") from error


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table with a header, by column; blank lines are left out, missing cells are empty."""
    rows = read_rows(read_text(path), path)
    _, header = next(rows, (1, []))
    return [{name: cells[k] if k < len(cells) else "" for k, name in enumerate(header)} for _, cells in rows if cells]


def write_rows(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, one a line: a cell's own line breaks, carriage returns among them, become blanks."""
    return write_plain([plain(cell) for cell in row] for row in rows)


def write_plain(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV whose cells are `plain` already."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
