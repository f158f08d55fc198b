"""Tables as people have them: CSV of any delimiter and encoding, plain or gzipped, or Parquet."""

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
from mutirao.systems.tabular.table import DAY, IDENTIFIER, Column, Table, as_column, days_of, is_name

log = logging.getLogger("mutirao")

DELIMITERS = ",;\t|"
SNIFFED = 50  # rows that a delimiter must cut alike
MOST_BYTES = 8 * 2**30  # of a table unpacked
ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
KINDS = ("number", "date", "category")
MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def read_kinds(text: str) -> dict[str, str]:
    """What the setting `columns` says of kinds: `ward=category,age=number`.

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


def read_file(path: Path, kinds: Mapping[str, str] | None = None, ignore: Collection[str] = ()) -> Table:
    """A file as a table, without the columns to ignore; a clear line says what is wrong with it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; right would be a file ending in {', '.join(ENDINGS)}")
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    kinds = kinds or {}
    cut = read_parquet if content[:4] == b"PAR1" else read_csv
    if cut is read_csv and path.suffix.lower() == ".parquet":
        raise ConfigError(f"{path} is not a Parquet file that can be read: it does not begin as one")
    table = cut(path, content, kinds, ignore)
    for name in kinds:
        if name not in table.columns and name not in ignore:
            raise ConfigError(f"columns: {path} has no column {name!r}{nearest(name, table.columns)}")
    return table


def read_csv(path: Path, content: bytes, kinds: Mapping[str, str], ignore: Collection[str]) -> Table:
    """Text with a header; the delimiter is the one that cuts the first lines alike."""
    text = decode_table(unpack(content, path), path)
    delimiter = sniff(text, path)
    rows = read_rows(text, path, delimiter)
    names: list[str] = []
    cells: list[list[str]] = []
    for line, row in rows:
        if not any(cell.strip() for cell in row) and (len(row) < 2 or not names):
            continue
        if not names:
            names = [name.strip() for name in row]
            check_names(path, names)
        elif len(row) != len(names):
            raise ConfigError(f"{path}, line {line}: {len(row)} cells, and the header has {len(names)} columns")
        else:
            cells.append(row)
    if not names:
        raise ConfigError(f"{path} is empty; right would be a header and rows")
    note_ignored(path, names, ignore)
    columns = {
        name: as_column(f"{path}: column {name!r}", [row[k] for row in cells], kinds.get(name, ""), delimiter == ";")
        for k, name in enumerate(names)
        if name not in ignore
    }
    return Table(columns, len(cells))


def check_names(path: Path, names: list[str]) -> None:
    """Refuse a column that is there twice, or has a name that nobody can write."""
    for name in names:
        if not is_name(name):
            raise ConfigError(f"{path}: {name[:40]!r} is no name of a column: too long, or not of letters")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{path} has more than one column called {twice[0]!r}; rename all but one")


def note_ignored(path: Path, names: Collection[str], ignore: Collection[str]) -> None:
    """Say which name to ignore no column has: it may be a misspelt one, or a column of another site's file."""
    for name in sorted(set(ignore) - set(names)):
        log.warning("ignore: %s has no column %r%s", path, name, nearest(name, names))


def unpack(content: bytes, path: Path) -> bytes:
    """The content of a gzipped file, or the content itself."""
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}") from error
    if len(plain) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes when it is unpacked")
    return plain


def decode_table(content: bytes, path: Path) -> str:
    """Text in UTF-8 or UTF-16, or else in Windows-1252, which holds Latin-1: no byte is ever replaced."""
    for mark, encoding in MARKS:
        if content.startswith(mark):
            try:
                return content.decode(encoding)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} begins as {encoding} text and is not: byte {error.start}") from error
    if (zero := content.find(b"\0")) >= 0:
        raise ConfigError(f"{path}, line {line_at(content, zero, 1)}: a zero byte: it is not a text file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError as error:
        line, byte = line_at(content, error.start, 1), content[error.start]
        raise ConfigError(
            f"{path}, line {line}: byte 0x{byte:02x} is neither UTF-8 nor Windows-1252; save the file as UTF-8"
        ) from error
    log.info("%s is not UTF-8: it is taken as Windows-1252 (Latin-1)", path)
    return text


def sniff(text: str, path: Path) -> str:
    """The delimiter by which the first lines have most cells, and equally many."""
    best, widest = ",", 1
    for delimiter in DELIMITERS:
        head = [row for _, row in islice(read_rows(text[: 1 << 20], path, delimiter), SNIFFED) if row]
        whole = head[:-1] if len(head) > 2 and len(text) > 1 << 20 else head  # the last may be cut
        if whole and len({len(row) for row in whole}) == 1 and len(whole[0]) > widest:
            best, widest = delimiter, len(whole[0])
    if widest == 1:  # rows of unequal length: which of them is wrong shows when they are read
        best = max(DELIMITERS, key=text.lstrip().partition("\n")[0].count)
    return best


def read_parquet(path: Path, content: bytes, kinds: Mapping[str, str], ignore: Collection[str]) -> Table:
    """A Parquet file; its types are the kinds, but for those that are forced."""
    try:
        import pyarrow
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow; install mutirao[parquet]") from error
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        names = list(file.schema_arrow.names)
        check_names(path, names)
        note_ignored(path, names, ignore)
        found = file.read(columns=[name for name in names if name not in ignore])
    except (ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from error
    columns = {
        name: from_arrow(f"{path}: column {name!r}", found.column(name), kinds.get(name, ""))
        for name in found.column_names
    }
    return Table(columns, found.num_rows)


def from_arrow(where: str, column: Any, forced: str) -> Column:
    """A column of Arrow's as one of ours."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    values = column.to_pylist()
    if types.is_null(kind):
        return Column("empty", np.full(len(values), np.nan))
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if number and forced in ("", "number"):
        numbers = np.array([np.nan if v is None else float(v) for v in values], np.float64)
        if np.isinf(numbers).any():
            raise ConfigError(f"{where} holds an infinite number; leave the cell empty, or take the column out")
        return Column("empty" if np.isnan(numbers).all() else "number", numbers)
    if (types.is_date(kind) or types.is_timestamp(kind)) and forced in ("", "date"):
        if types.is_timestamp(kind):
            moments = column.cast("timestamp[us]").to_numpy().astype("datetime64[us]")
            days = moments.astype(np.float64) / (DAY * 1e6)
            return Column("date", np.where(np.isnat(moments), np.nan, days))
        return Column("date", np.array([np.nan if v is None else days_of(v) for v in values], np.float64))
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)
    if not (text or number or types.is_date(kind)):
        raise ConfigError(f"{where} is of type {kind}; right would be numbers, text, dates or truths, or ignore= it")
    plain = (Column("number", np.array([v], np.float64)).labels()[0] if isinstance(v, float) else v for v in values)
    return as_column(where, ["" if v is None else str(v) for v in plain], forced)


def check_table(path: Path | str | None) -> list[str]:
    """What is found in a table, column by column."""
    if path is None:
        raise ConfigError("tabular: give the path of a table: a CSV or Parquet file")
    table = read_file(Path(path))
    findings = [f"{path}: {len(table):,} rows, {len(table.columns)} columns"]
    for name, column in table.columns.items():
        missing = int(column.missing.sum())
        gaps = f", {missing:,} missing" if missing else ""
        note = " (by its name an identifier: no feature)" if IDENTIFIER.fullmatch(name) else ""
        findings.append(f"{name}: {describe_column(column)}{gaps}{note}")
    return findings


def describe_column(column: Column) -> str:
    """A column in a few words."""
    known = column.values[~column.missing]
    if column.kind == "empty":
        return "no values"
    if column.kind == "category":
        counts = Counter(known.tolist()).most_common(3)
        return f"category, {len(set(known.tolist())):,} values: " + ", ".join(f"{v!r} {n:,}" for v, n in counts)
    low, high = float(known.min()), float(known.max())
    if column.kind == "date":
        first, last = np.array([low, high]).astype("datetime64[D]")
        return f"date, {first} to {last}"
    return f"number, {low:g} to {high:g}"
