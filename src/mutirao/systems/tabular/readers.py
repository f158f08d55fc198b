"""Readers of tables: CSV of any delimiter and encoding, plain or gzipped, and Parquet."""

import gzip
import io
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.io import line_at, read_rows
from mutirao.systems.tabular.table import DAY, IDENTIFIER, Column, Table, as_column, days_of, format_number, is_name

log = logging.getLogger("mutirao")

DELIMITERS = ",;\t|"
SNIFFED = 50  # rows that a delimiter must split into equally many cells
MOST_BYTES = 8 * 2**30  # of a decompressed table
ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
KINDS = ("number", "date", "category")
MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def read_kinds(text: str) -> dict[str, str]:
    """Parse the setting `columns`: `ward=category,age=number`.

    >>> read_kinds("ward=category, age=number")
    {'ward': 'category', 'age': 'number'}
    """
    out: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, kind = (p.strip() for p in part.rpartition("="))
        if not equals or not name or kind not in KINDS:
            raise ConfigError(f"columns: {part!r} is not NAME=KIND with a kind of {', '.join(KINDS)}")
        out[name] = kind
    return out


def read_table_file(path: Path, kinds: Mapping[str, str] | None = None, ignore: Collection[str] = ()) -> Table:
    """Read a file, without the columns to ignore; ConfigError says what is wrong with it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a file ending in {', '.join(ENDINGS)}")
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    kinds = kinds or {}
    is_parquet = content[:4] == b"PAR1"
    if path.suffix.lower() == ".parquet" and not is_parquet:
        raise ConfigError(f"{path} is not a Parquet file that can be read: it does not begin as one")
    parse = parse_parquet if is_parquet else parse_csv
    table = parse(path, content, kinds, ignore)
    for name in kinds:
        if name not in table.columns and name not in ignore:
            raise ConfigError(f"columns: {path} has no column {name!r}{nearest(name, table.columns)}")
    return table


def parse_csv(path: Path, content: bytes, kinds: Mapping[str, str], ignore: Collection[str]) -> Table:
    """Parse text with a header; the delimiter is detected."""
    text = decode_table(decompress(content, path), path)
    delimiter = detect_delimiter(text, path)
    rows = read_rows(text, path, delimiter)
    names: list[str] = []
    cells: list[list[str]] = []
    for line, row in rows:
        # A blank line is skipped; a row of several empty cells is kept, as all its values are missing.
        if not any(cell.strip() for cell in row) and (len(row) < 2 or not names):
            continue
        if not names:
            names = [name.strip() for name in row]
            check_column_names(path, names)
        elif len(row) != len(names):
            raise ConfigError(f"{path}, line {line}: {len(row)} cells, but the header has {len(names)} columns")
        else:
            cells.append(row)
    if not names:
        raise ConfigError(f"{path} is empty; expected a header and rows")
    note_ignored(path, names, ignore)
    columns: dict[str, Column] = {}
    for k, name in enumerate(names):
        if name not in ignore:
            values = [row[k] for row in cells]
            columns[name] = as_column(f"{path}: column {name!r}", values, kinds.get(name, ""), delimiter == ";")
    return Table(columns, len(cells))


def check_column_names(path: Path, names: list[str]) -> None:
    """Refuse repeated names of columns, and names that are too long or not printable."""
    for name in names:
        if not is_name(name):
            raise ConfigError(f"{path}: {name[:40]!r} is no valid name of a column: too long, or not printable")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{path} has more than one column called {twice[0]!r}; rename all but one")


def note_ignored(path: Path, names: Collection[str], ignore: Collection[str]) -> None:
    """Warn of names to ignore that no column has: misspelt ones, or columns of another site's file."""
    for name in sorted(set(ignore) - set(names)):
        log.warning("ignore: %s has no column %r%s", path, name, nearest(name, names))


def decompress(content: bytes, path: Path) -> bytes:
    """Decompress gzipped content; other content is returned as it is."""
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is not a complete gzip file: {error}") from error
    if len(plain) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes when it is decompressed")
    return plain


def decode_table(content: bytes, path: Path) -> str:
    """Decode UTF-8 or UTF-16, or else Windows-1252, which includes Latin-1; no byte is ever replaced."""
    for mark, encoding in MARKS:
        if content.startswith(mark):
            try:
                return content.decode(encoding)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} begins as {encoding} text, but byte {error.start} is invalid") from error
    if (zero := content.find(b"\0")) >= 0:
        raise ConfigError(f"{path}, line {line_at(content, zero, 1)}: a zero byte; it is not a text file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    # Not Latin-1, in which every byte is a character: Windows-1252 refuses the five bytes that it leaves undefined.
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError as error:
        line = line_at(content, error.start, 1)
        byte = content[error.start]
        raise ConfigError(
            f"{path}, line {line}: byte 0x{byte:02x} is neither UTF-8 nor Windows-1252; save the file as UTF-8"
        ) from error
    log.info("%s is not UTF-8; it is decoded as Windows-1252 (Latin-1)", path)
    return text


def detect_delimiter(text: str, path: Path) -> str:
    """The delimiter that splits the first lines into the most cells, equally many in each."""
    best = ","
    widest = 1
    for delimiter in DELIMITERS:
        head = [row for _, row in islice(read_rows(text[: 1 << 20], path, delimiter), SNIFFED) if row]
        if len(head) > 2 and len(text) > 1 << 20:
            head.pop()  # it may be incomplete
        # A delimiter splits all rows into equally many cells; a character of the text does so by chance only.
        if head and len({len(row) for row in head}) == 1 and len(head[0]) > widest:
            best = delimiter
            widest = len(head[0])
    if widest == 1:
        # Rows of unequal length: reading them reports which one is wrong.
        best = max(DELIMITERS, key=text.lstrip().partition("\n")[0].count)
    return best


def parse_parquet(path: Path, content: bytes, kinds: Mapping[str, str], ignore: Collection[str]) -> Table:
    """Parse Parquet; its types are the kinds of columns, except for those in `kinds`."""
    try:
        import pyarrow
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow; install mutirao[parquet]") from error
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        names = list(file.schema_arrow.names)
        check_column_names(path, names)
        note_ignored(path, names, ignore)
        found = file.read(columns=[name for name in names if name not in ignore])
    except (ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from error
    columns: dict[str, Column] = {}
    for name in found.column_names:
        columns[name] = from_arrow(f"{path}: column {name!r}", found.column(name), kinds.get(name, ""))
    return Table(columns, found.num_rows)


def from_arrow(where: str, column: Any, forced: str) -> Column:
    """Convert a column of Arrow."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    values = column.to_pylist()
    if types.is_null(kind):
        return Column("empty", np.full(len(values), np.nan))
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if number and forced in ("", "number"):
        numbers = np.array([np.nan if v is None else float(v) for v in values], np.float64)
        if np.isinf(numbers).any():
            raise ConfigError(f"{where} contains an infinite number; leave the cell empty, or remove the column")
        if np.isnan(numbers).all():
            return Column("empty", numbers)
        return Column("number", numbers)
    if (types.is_date(kind) or types.is_timestamp(kind)) and forced in ("", "date"):
        if types.is_timestamp(kind):
            moments = column.cast("timestamp[us]").to_numpy().astype("datetime64[us]")
            days = moments.astype(np.float64) / (DAY * 1e6)
            return Column("date", np.where(np.isnat(moments), np.nan, days))
        return Column("date", np.array([np.nan if v is None else days_of(v) for v in values], np.float64))
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)
    if not (text or number or types.is_date(kind)):
        raise ConfigError(f"{where} is of type {kind}; expected numbers, text, dates or booleans, or ignore= it")
    cells: list[str] = []
    for value in values:
        if value is None:
            cells.append("")
        elif isinstance(value, float):
            cells.append(format_number(value))
        else:
            cells.append(str(value))
    return as_column(where, cells, forced)


def check_table(path: Path | str | None) -> list[str]:
    """What `mutirao data check` reports of a table, column by column."""
    if path is None:
        raise ConfigError("tabular: give the path of a table: a CSV or Parquet file")
    table = read_table_file(Path(path))
    findings = [f"{path}: {len(table):,} rows, {len(table.columns)} columns"]
    for name, column in table.columns.items():
        missing = int(column.missing.sum())
        line = f"{name}: {describe_column(column)}"
        if missing:
            line += f", {missing:,} missing"
        if IDENTIFIER.fullmatch(name):
            line += " (an identifier by its name, so no feature)"
        findings.append(line)
    return findings


def describe_column(column: Column) -> str:
    """A short description of a column."""
    known = column.values[~column.missing]
    if column.kind == "empty":
        return "no values"
    if column.kind == "category":
        counts = Counter(known.tolist()).most_common(3)
        return f"category, {len(set(known.tolist())):,} values: " + ", ".join(f"{v!r} {n:,}" for v, n in counts)
    low = float(known.min())
    high = float(known.max())
    if column.kind == "date":
        first, last = np.array([low, high]).astype("datetime64[D]")
        return f"date, {first} to {last}"
    return f"number, {low:g} to {high:g}"
