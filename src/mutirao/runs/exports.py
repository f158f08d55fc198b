"""Tables of runs for other tools: history or clients of one run, or of all runs below a folder, as Parquet or CSV."""

import io
from pathlib import Path
from typing import Any

from mutirao.core.files import write_whole
from mutirao.core.text import write_rows
from mutirao.errors import ConfigError
from mutirao.runs.reader import Record

TABLES = ("history", "clients")
FORMATS = (".parquet", ".csv")


def export(folder: Path, out: Path, table: str = "history") -> int:
    """Write a table of the run, or of every run below the folder with a column `run`; return the number of rows."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot write {out}: right would be a name that ends in {' or '.join(FORMATS)}")
    if table not in TABLES:
        raise ConfigError(f"there is no table {table!r} (valid: {', '.join(TABLES)})")
    single = (folder / f"{table}.csv").is_file()
    files = [folder / f"{table}.csv"] if single else sorted(folder.rglob(f"{table}.csv"))
    rows = []
    for file in files:
        name = {} if single else {"run": file.parent.relative_to(folder).as_posix()}
        record = Record(file.parent)
        rows += [name | row for row in (record.rows if table == "history" else record.asked)]
    if not rows:
        raise ConfigError(f"{folder} holds no run with a table {table}.csv")
    names = list(dict.fromkeys(k for row in rows for k in row))
    columns = {k: column([row.get(k) for row in rows]) for k in names}
    content = parquet(columns) if out.suffix.lower() == ".parquet" else text(columns)
    write_whole(out, content)
    return len(rows)


def column(values: list[Any]) -> list[Any]:
    """Values of one type: whole numbers, numbers or text, None where there is none."""
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {int}:
        return values
    if kinds <= {int, float}:
        return [None if v is None else float(v) for v in values]
    return [None if v is None else str(v) for v in values]


def text(columns: dict[str, list[Any]]) -> str:
    """The columns as CSV."""
    return write_rows([list(columns), *zip(*columns.values(), strict=True)])


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """The columns as Parquet."""
    try:
        import pyarrow
        from pyarrow import parquet as writer
    except ImportError as error:
        raise ConfigError("Parquet needs a package; install it with: pip install 'mutirao[parquet]'") from error
    out = io.BytesIO()
    writer.write_table(pyarrow.table(columns), out)
    return out.getvalue()
