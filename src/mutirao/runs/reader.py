"""Read a run folder. Its content is not trusted: names and reasons in it come from clients.

`export_tables` writes tables of one or many runs as Parquet or CSV.
"""

import io
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.metrics import Direction, direction_of
from mutirao.runs.audit_trail import read_events
from mutirao.runs.csv_tables import TEXTS, CsvTable, likely_monitor, metrics_among, typed, typed_row
from mutirao.runs.csv_tables import Columns as Columns
from mutirao.runs.csv_tables import Floats as Floats
from mutirao.runs.csv_tables import finite_or_nan as finite_or_nan

TABLES = ("history", "clients")
FORMATS = (".parquet", ".csv")


def export_tables(folder: Path, out: Path, table: str = "history") -> int:
    """Write a table of one run, or of all runs below a folder with a column `run`; return the number of rows."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot write {out}: expected a name that ends in {' or '.join(FORMATS)}")
    if table not in TABLES:
        raise ConfigError(f"there is no table {table!r} (valid: {', '.join(TABLES)})")
    files = [folder / f"{table}.csv"]
    single = files[0].is_file()
    if not single:
        files = sorted(folder.rglob(f"{table}.csv"))
    found = {file.parent.relative_to(folder).as_posix(): Columns(file) for file in files}
    # Runs without a round are left out.
    found = {name: rows for name, rows in found.items() if len(rows)}
    if not found:
        raise ConfigError(f"{folder} holds no run with a table {table}.csv")
    columns: dict[str, list[Any]] = {}
    if not single:
        columns["run"] = [name for name, rows in found.items() for _ in range(len(rows))]
    texts = TEXTS if table == "clients" else frozenset()
    for name in dict.fromkeys(k for rows in found.values() for k in columns_in_order(rows)):
        cells = (cell for rows in found.values() for part in rows.cells(name) for cell in part)
        convert = str if name in texts else typed
        columns[name] = one_type([convert(cell) if cell else None for cell in cells])
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
    # Parquet columns have one type: a column of numbers with one text is a column of texts.
    convert = float if kinds <= {int, float} else str
    return [None if v is None else convert(v) for v in values]


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


Counts = npt.NDArray[np.intp]


@dataclass
class Record:
    """A run folder, finished or not; files that cannot be read count as empty.

    >>> import mutirao
    >>> _ = mutirao.execute("quickstart", {"rounds": 2, "per_round": 3}, "runs/record", pictures=False)
    >>> record = Record.of(Path("runs/record"))
    >>> record.rounds, record.monitor, record.population, int(record.selections()[1].sum())
    (2, 'accuracy', 50, 6)
    """

    path: Path
    text: str = ""  # config.toml
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> "Record":
        """Read a run folder; ConfigError if it is none."""
        if not any((path / name).is_file() for name in ("config.toml", "audit.jsonl", "summary.json", "history.csv")):
            raise ConfigError(f"{path} holds no finished run, nor one that has begun")
        text = text_in(path / "config.toml")
        try:
            config = tomllib.loads(text)
        except (ValueError, RecursionError):
            # RecursionError: a file from elsewhere may be nested deeper than the parser can follow.
            config = {}
        return cls(path, text, config, json_of(path / "summary.json"), read_events(path / "audit.jsonl")[0])

    @classmethod
    def begun(cls, path: Path) -> "Record":
        """Read a run folder; ConfigError if no round was made in it."""
        if not Columns(path / "history.csv").length:
            raise ConfigError(f"{path} holds no run with at least one round")
        return cls.of(path)

    @cached_property
    def history(self) -> Columns:
        """A row for each round."""
        return Columns(self.path / "history.csv")

    @cached_property
    def clients(self) -> Columns:
        """A row for each client selected in a round."""
        return Columns(self.path / "clients.csv")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of history, with numbers converted."""
        return [typed_row(row) for row in CsvTable(self.path / "history.csv").read()]

    @cached_property
    def asked(self) -> list[dict[str, Any]]:
        """The rows of clients.csv, with numbers converted. All are in memory, so it is for small runs."""
        return [typed_row(row, TEXTS) for row in CsvTable(self.path / "clients.csv").read()]

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.summary.get("recipe") or self.config.get("recipe") or self.path.name)

    @property
    def metrics(self) -> list[str]:
        """The evaluation metrics, with the monitored one first."""
        metrics = metrics_among(self.history.names)
        if self.monitor not in metrics:
            return metrics
        return [self.monitor, *(name for name in metrics if name != self.monitor)]

    @property
    def monitor(self) -> str:
        """The monitored metric, which determines the best round."""
        return str(self.summary.get("judge", "")) or likely_monitor(self.history.names)

    def direction(self, metric: str) -> Direction | None:
        """Which way a metric is better; None if neither the run declares it nor its name is known."""
        declared = self.summary.get("directions")
        return direction_of(metric, declared if isinstance(declared, Mapping) else None)

    @property
    def rounds(self) -> int:
        """The number of rounds made."""
        return len(self.history)

    @property
    def population(self) -> int:
        """The number of clients, selected or not."""
        declared = self.summary.get("clients") or self.config.get("clients") or 0
        seen = len(self.clients.codes("client")[0])
        if not isinstance(declared, int | float):
            return seen
        return max(int(declared), seen)

    @property
    def selected(self) -> npt.NDArray[np.bool_]:
        """The rows of `clients.csv` with a selected client: warm-up and agreement before round 1 do not count."""
        return np.asarray((self.clients.wholes("round") >= 1) & ~self.clients.where("try", "0"))

    def selections(self) -> tuple[list[str], Counts]:
        """All recorded clients, and how often each was selected."""
        names, codes = self.clients.codes("client")
        return names, np.bincount(codes[self.selected], minlength=len(names))

    def participation(self) -> tuple[list[str], Counts]:
        """All recorded clients, and how often each gave a reply that was aggregated."""
        names, codes = self.clients.codes("client")
        counted = self.clients.where("replied", "1") & self.clients.where("rejected", "")
        return names, np.bincount(codes[counted], minlength=len(names))

    def lost(self) -> Iterator[tuple[str, str, str, str]]:
        """(round, client, kind, reason) of every request without a usable reply."""
        rows = np.flatnonzero(~(self.clients.where("failure", "") & self.clients.where("rejected", ""))).tolist()
        if not rows:
            return
        columns = [self.clients.codes(n) for n in ("round", "client", "failure", "rejected")]
        for row in rows:
            round, client, failure, rejected = (texts[codes[row]] for texts, codes in columns)
            if failure:
                kind, _, reason = failure.partition(": ")
                yield round, client, kind, reason or kind
            elif rejected:
                yield round, client, "rejected", rejected

    def groups(self) -> dict[str, list[str]]:
        """Groups of clients, if the method forms any."""
        declared = self.summary.get("groups")
        if isinstance(declared, Mapping):
            return {
                str(name): list(map(str, members)) for name, members in declared.items() if isinstance(members, list)
            }
        if "group" not in self.clients:
            return {}
        (names, who), (groups, where) = (self.clients.codes(n) for n in ("client", "group"))
        found: dict[str, list[str]] = {}
        pairs, first = np.unique(where * len(names) + who, return_index=True)
        for pair in pairs[np.argsort(first)].tolist():
            group, client = divmod(pair, len(names))
            if groups[group]:
                found.setdefault(groups[group], []).append(names[client])
        return found

    def privacy(self) -> dict[str, float]:
        """The privacy budget spent: every epsilon and delta in the summary."""
        flat: dict[str, Any] = {}
        for key, value in self.summary.items():
            if isinstance(value, Mapping) and key == "privacy":
                flat |= {str(k): v for k, v in value.items()}
            elif key.split("_")[0] in ("epsilon", "delta"):
                flat[key] = value
        return {k: float(v) for k, v in flat.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def text_in(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        content = json.loads(text_in(path))
    except (ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def clean(value: Any) -> Any:
    """A value that JSON can represent: NaN and infinity become None, NumPy numbers become Python's."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    return value
