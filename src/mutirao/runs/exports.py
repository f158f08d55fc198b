"""Export the history or clients of runs as Parquet or CSV, for other tools."""

import io
from pathlib import Path
from typing import Any

from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.runs.column_names import TEXTS, typed
from mutirao.runs.csv_columns import Columns

TABLES = ("history", "clients")
FORMATS = (".parquet", ".csv")


def export_tables(folder: Path, out: Path, table: str = "history") -> int:
    """Write a table of one run, or of all runs below a folder with a column `run`; return the number of rows."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot write {out}: expected a name that ends in {' or '.join(FORMATS)}")
    if table not in TABLES:
        raise ConfigError(f"there is no table {table!r} (valid: {', '.join(TABLES)})")
    single = (folder / f"{table}.csv").is_file()
    files = [folder / f"{table}.csv"] if single else sorted(folder.rglob(f"{table}.csv"))
    found = {file.parent.relative_to(folder).as_posix(): Columns(file) for file in files}
    found = {name: rows for name, rows in found.items() if len(rows)}  # runs without a round are left out
    if not found:
        raise ConfigError(f"{folder} holds no run with a table {table}.csv")
    columns = {} if single else {"run": [name for name, rows in found.items() for _ in range(len(rows))]}
    texts = TEXTS if table == "clients" else frozenset()
    for name in dict.fromkeys(k for rows in found.values() for k in columns_in_order(rows)):
        cells = (cell for rows in found.values() for part in rows.cells(name) for cell in part)
        columns[name] = one_type([(cell if name in texts else typed(cell)) if cell else None for cell in cells])
    content = to_parquet(columns) if out.suffix.lower() == ".parquet" else to_csv(columns)
    write_whole(out, content)
    return sum(map(len, found.values()))


def columns_in_order(rows: Columns) -> list[str]:
    """The columns that are not empty, in the order of their first non-empty rows."""
    first = {}
    for name in rows.names:
        cells = (cell for part in rows.cells(name) for cell in part)
        first[name] = next((i for i, cell in enumerate(cells) if cell), None)
    return sorted((k for k, at in first.items() if at is not None), key=lambda k: first[k] or 0)


def one_type(values: list[Any]) -> list[Any]:
    """The values as one type: all integers, all floats or all text; None stays None."""
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {int}:
        return values
    if kinds <= {int, float}:
        return [None if v is None else float(v) for v in values]
    return [None if v is None else str(v) for v in values]


def to_csv(columns: dict[str, list[Any]]) -> str:
    """The columns as CSV."""
    return write_rows([list(columns), *zip(*columns.values(), strict=True)])


def to_parquet(columns: dict[str, list[Any]]) -> bytes:
    """The columns as Parquet."""
    try:
        import pyarrow
        from pyarrow import parquet as writer
    except ImportError as error:
        raise ConfigError("Parquet needs a package; install it with: pip install 'mutirao[parquet]'") from error
    out = io.BytesIO()
    writer.write_table(pyarrow.table(columns), out)
    return out.getvalue()
