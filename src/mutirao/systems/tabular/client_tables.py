"""Which client has which rows: an embedded set, one table, a folder of tables, or a file at each site.

Each client holds out some of its rows for evaluation.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import build, nearest
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.partitioning import PartitionSummary, describe
from mutirao.randomness import rng
from mutirao.systems.tabular.readers import ENDINGS, read_kinds, read_table_file
from mutirao.systems.tabular.schema import Task
from mutirao.systems.tabular.table import IDENTIFIER, Column, Kind, Rows, Table
from mutirao.training.samples import Population

log = logging.getLogger("mutirao")

EMBEDDED = {"breast_cancer": "diagnosis", "wine": "cultivar", "diabetes": "progression"}  # and the target's name
FEWEST = 10  # fewest rows of a table to train on
FEW_CLASSES = 20  # a target of whole numbers with more values than this is no class
BINS = 10  # quantile bins by which rows are partitioned where the target is a number

ReadTable = Callable[[ClientId], tuple[Table, Column]]  # a client's features, and its targets


@dataclass(frozen=True, eq=False)
class ClientTables:
    """A client's training and test rows, with their targets apart from the features."""

    train: Table
    test: Table
    train_targets: Column
    test_targets: Column


@dataclass(frozen=True)
class HoldOut:
    """How a client splits its rows: the share it holds out, and the most it trains on (0: all).

    With `vali` the test rows are set aside unseen, and the same share of the others is used for evaluation instead.
    """

    share: float
    most: int
    task: Task
    seed: int
    vali: bool = False

    @classmethod
    def of(cls, config: Any, task: Task) -> "HoldOut":
        """By the settings of a recipe."""
        return cls(config.test, config.samples, task, config.seed, config.judge_by == "vali")

    def __call__(self, table: Table, target: Column, name: ClientId) -> ClientTables:
        """Split the rows by (seed, client), stratified by class where there are classes."""
        draw = rng(self.seed, 0, "own test", name)
        n = len(table)
        classes = target.labels() if self.task == "classification" else [""] * n
        test = stratified_rows(classes, self.count(n), draw)
        train = np.setdiff1d(np.arange(n), test)
        if self.vali:
            # The test rows are those of a run without vali, so that tuning never sees any of them.
            own = rng(self.seed, 0, "own validation", name)
            test = train[stratified_rows([classes[i] for i in train], self.count(len(train)), own)]
            train = np.setdiff1d(train, test)
        if self.most and len(train) > self.most:
            train = np.sort(draw.choice(train, self.most, replace=False))
        return ClientTables(table.take(train), table.take(test), target.take(train), target.take(test))

    def count(self, rows: int) -> int:
        """How many of so many rows are held out: never all of them."""
        return min(round(self.share * rows), rows - 1)


def stratified_rows(classes: Sequence[str], count: int, draw: np.random.Generator) -> Rows:
    """Sample so many rows, each class in its share; what rounding leaves over goes to the classes it cut most.

    >>> stratified_rows(["a"] * 8 + ["b"] * 2, 5, np.random.default_rng(0)).tolist()
    [2, 4, 6, 7, 9]
    """
    _, group, sizes = np.unique(np.asarray(classes, object).astype(str), return_inverse=True, return_counts=True)
    order = draw.permutation(len(group))
    exact = sizes * (max(0, count) / max(1, len(group)))
    # The method of the largest remainder: quotas are rounded down, and what is left goes to the largest fractions.
    quota = np.floor(exact).astype(np.intp)
    quota[np.argsort(quota - exact, kind="stable")[: max(0, count) - int(quota.sum())]] += 1
    picked = [order[group[order] == k][:size] for k, size in enumerate(quota.tolist())]
    return np.sort(np.concatenate([np.empty(0, np.intp), *picked]))


@dataclass
class TablePopulation(Population):
    """Clients by name; their rows are read and split on first access.

    With `accepts_any_client`, every name is valid: a site with a file of its own has all of it, whatever its name.
    """

    names: Sequence[ClientId]
    read: ReadTable
    hold_out: HoldOut
    accepts_any_client: bool = False
    _cache: dict[ClientId, ClientTables] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether clients hold out any rows."""
        return self.hold_out.share > 0

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return self.accepts_any_client or name in self.names

    def __getitem__(self, name: ClientId) -> ClientTables:
        if name not in self:
            raise KeyError(name)
        if name not in self._cache:
            self._cache[name] = self.hold_out(*self.read(name), name)
        return self._cache[name]


def pool_tables(population: Mapping[ClientId, ClientTables]) -> dict[ClientId, ClientTables]:
    """One client with the rows of all: the pooled reference."""
    clients = list(population.values())
    return {
        "pooled": ClientTables(
            _stack([c.train for c in clients]),
            _stack([c.test for c in clients]),
            _concatenate([c.train_targets for c in clients]),
            _concatenate([c.test_targets for c in clients]),
        )
    }


def _stack(tables: Sequence[Table]) -> Table:
    columns: dict[str, Column] = {}
    for name in tables[0].columns:
        columns[name] = _concatenate([t.columns[name] for t in tables])
    return Table(columns, sum(map(len, tables)))


def _concatenate(columns: Sequence[Column]) -> Column:
    kind: Kind = next((c.kind for c in columns if c.kind != "empty"), "empty")
    if kind == "category":
        # A client without any value has an empty column of NaN, with the labels of missing categories.
        labels = [np.array(c.labels(), object) for c in columns]
        return Column(kind, np.concatenate(labels))
    return Column(kind, np.concatenate([c.values for c in columns]))


@dataclass(frozen=True)
class TableSource:
    """The clients' rows, what is predicted, and whether this party has the rows of all clients."""

    population: TablePopulation
    target: str
    task: Task
    has_all_rows: bool = True
    partition: PartitionSummary | None = None


def load_source(config: Any) -> TableSource:
    """The clients that a configuration describes."""
    is_embedded = config.data in EMBEDDED
    place = Path(config.data).expanduser()
    target = config.target or EMBEDDED.get(config.data, "")
    if config.sites and (is_embedded or not config.data):
        return remote_source(config, target)
    if is_embedded:
        return partition_table(config, read_embedded(config.data), target)
    if not config.data:
        raise ConfigError(f"data: name a table, a folder of tables, or one of {', '.join(EMBEDDED)}")
    if place.is_dir():
        return read_folder(config, place, target)
    table = read_configured_table(config, place)
    if not config.sites:
        return partition_table(config, table, target)
    task = infer_task(config, table, target, place)

    def read(name: ClientId) -> tuple[Table, Column]:
        return split_features(config, table, target, place)

    population = TablePopulation(["site"], read, HoldOut.of(config, task), accepts_any_client=True)
    return TableSource(population, target, task, has_all_rows=False)


def remote_source(config: Any, target: str) -> TableSource:
    """The sites as the server sees them: their number, and none of their rows."""
    if not config.target:
        raise ConfigError("target: name the column of the sites' files that is predicted")
    if config.task == "auto":
        raise ConfigError("task: set classification or regression; the server has no file to infer it from")

    def refuse(name: ClientId) -> tuple[Table, Column]:
        raise ConfigError(f"data: {name} has a file of its own, which is not here; a site names its own with --data")

    names = [f"site {k}" for k in range(1, config.clients + 1)]
    population = TablePopulation(names, refuse, HoldOut.of(config, config.task), accepts_any_client=True)
    return TableSource(population, target, config.task, has_all_rows=False)


def read_configured_table(config: Any, path: Path) -> Table:
    """Read a file with the settings `columns` and `ignore`."""
    return read_table_file(path, read_kinds(config.columns), parse_names(config.ignore))


def partition_table(config: Any, table: Table, target: str) -> TableSource:
    """Partition one table over clients, by one of its columns or by the setting `partition`."""
    place = Path(config.data)
    task = infer_task(config, table, target, place)
    features, targets = split_features(config, table, target, place)
    labels = partition_labels(targets, task)
    rows: dict[ClientId, Rows] = {}
    if config.client:
        # Rows without a target are in neither features nor targets, so they have to go here as well.
        owner = np.array(row_owners(config, table), object)[~table.columns[target].missing]
        for name in sorted(set(owner.tolist())):
            rows[name] = np.flatnonzero(owner == name)
    else:
        split = build("partition", config.partition)
        parts = split(labels, clients=config.clients, rng=rng(config.seed, 0, "partition"))
        digits = len(str(len(parts) - 1))
        for k, part in enumerate(parts):
            rows[f"c{k:0{digits}d}"] = part

    def read(name: ClientId) -> tuple[Table, Column]:
        return features.take(rows[name]), targets.take(rows[name])

    population = TablePopulation(list(rows), read, HoldOut.of(config, task))
    return TableSource(population, target, task, partition=describe(labels, list(rows.values())))


def read_folder(config: Any, folder: Path, target: str) -> TableSource:
    """A folder with a table for each client, named after it."""
    files: dict[ClientId, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = table_suffix(path)
        if suffix and path.is_file():
            files[path.name[: -len(suffix)]] = path
    if not files:
        raise ConfigError(f"{folder} contains no tables; expected a file a client, ending in {', '.join(ENDINGS)}")
    tables = {name: read_configured_table(config, path) for name, path in files.items()}
    first = next(iter(files))
    task = infer_task(config, tables[first], target, files[first])

    @cache
    def read(name: ClientId) -> tuple[Table, Column]:
        return split_features(config, tables[name], target, files[name])

    # Every file is read now, so that an invalid one is refused before the first round.
    for name in files:
        read(name)
    return TableSource(TablePopulation(list(files), read, HoldOut.of(config, task)), target, task)


def table_suffix(path: Path) -> str:
    """The ending by which a file is a table; empty if it is none."""
    return next((end for end in sorted(ENDINGS, key=len, reverse=True) if path.name.lower().endswith(end)), "")


def split_features(config: Any, table: Table, target: str, place: Path) -> tuple[Table, Column]:
    """Features and targets of the rows with a target; identifiers and the client's column are no features."""
    forced = read_kinds(config.columns)
    identifiers = [name for name in table.columns if IDENTIFIER.fullmatch(name) and name not in (*forced, target)]
    if identifiers:
        log.warning("%s: not used as features, as their names are of identifiers: %s", place, ", ".join(identifiers))
    known = np.flatnonzero(~table.columns[target].missing)
    if len(known) < len(table):
        log.warning("%s: %d rows have no %s and are left out", place, len(table) - len(known), target)
    if len(known) < FEWEST:
        raise ConfigError(f"{place} has {len(known)} rows with a {target!r}; expected at least {FEWEST}")
    features = table.without([target, config.client, *identifiers])
    if not features.columns:
        raise ConfigError(f"{place} has no column to predict {target!r} from")
    return features.take(known), table.columns[target].take(known)


def infer_task(config: Any, table: Table, target: str, place: Path) -> Task:
    """The setting `task`; with `auto`, classification if the target is text or has few whole numbers only."""
    column = find_column("target", table, target, place, needed="name the column that is predicted")
    if config.task == "regression" and column.kind == "category":
        name = next(v for v in column.labels() if v)
        raise ConfigError(f"target: {target!r} of {place} is text such as {name[:40]!r}; task=regression needs numbers")
    if config.task != "auto":
        found: Task = config.task
        return found
    known = column.values[~column.missing].tolist()
    has_few_values = len(set(known)) <= min(FEW_CLASSES, max(2, len(known) // 2))
    is_class = column.kind == "category" or (has_few_values and all(float(v).is_integer() for v in known))
    task: Task = "classification" if is_class else "regression"
    log.warning("task=auto: %s of %r, by its values", task, target)
    return task


def find_column(setting: str, table: Table, name: str, place: Path, needed: str) -> Column:
    """The column that a setting names, or one clear line."""
    if not name:
        raise ConfigError(f"{setting}: {needed}; {place} has {_first(table.columns)}")
    if name not in table.columns:
        raise ConfigError(f"{setting}: {place} has no column {name!r}{nearest(name, table.columns)}")
    column = table.columns[name]
    if column.kind == "empty":
        raise ConfigError(f"{setting}: column {name!r} of {place} has no values")
    return column


def _first(names: Collection[str]) -> str:
    shown = list(names)[:20]
    if len(names) > 20:
        shown.append("...")
    return ", ".join(shown)


def row_owners(config: Any, table: Table) -> list[ClientId]:
    """The client each row belongs to, by the column that the setting `client` names."""
    place = Path(config.data)
    if config.client == config.target:
        raise ConfigError(f"client: {config.client!r} is the target, too")
    needed = "name the column that says which client each row belongs to"
    owners = find_column("client", table, config.client, place, needed).labels()
    if "" in owners:
        raise ConfigError(f"client: column {config.client!r} of {place} is empty in row {owners.index('') + 1}")
    return owners


def partition_labels(targets: Column, task: Task) -> npt.NDArray[Any]:
    """The labels that a partition goes by: classes, or quantile bins of the numbers."""
    if task == "classification":
        return np.unique(np.array(targets.labels()), return_inverse=True)[1]
    edges = np.quantile(targets.numbers, np.arange(1, BINS) / BINS)
    return np.searchsorted(edges, targets.numbers)


@cache
def read_embedded(name: str) -> Table:
    """One of scikit-learn's embedded sets."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    columns = {str(n): Column("number", found.data[:, k]) for k, n in enumerate(found.feature_names)}
    target = Column("number", found.target.astype(np.float64))
    if name != "diabetes":
        target = Column("category", np.array([str(found.target_names[k]) for k in found.target], object))
    return Table({**columns, EMBEDDED[name]: target}, len(found.target))
