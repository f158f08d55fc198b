"""Who holds which rows: clients by a column, by a partition or by files, each keeping some rows back to judge by."""

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
from mutirao.systems.tabular.readers import ENDINGS, read_file, read_kinds
from mutirao.systems.tabular.schema import Task
from mutirao.systems.tabular.table import IDENTIFIER, Column, Kind, Rows, Table
from mutirao.training.samples import Population

Read = Callable[[ClientId], tuple[Table, Column]]  # a client's features, and its targets


@dataclass(frozen=True, eq=False)
class Held:
    """What a client holds: rows to train on and rows it only judges by, and their targets apart from the features."""

    train: Table
    test: Table
    targets: Column  # of the training rows
    kept: Column  # of those kept back


@dataclass(frozen=True)
class Keep:
    """How a client cuts its rows: the share it keeps back, and the most it trains on (0: all).

    With `vali` the test rows are put aside, for nobody to see, and the same share of the others judges instead.
    """

    share: float
    most: int
    task: Task
    seed: int
    vali: bool = False

    @classmethod
    def of(cls, config: Any, task: Task) -> "Keep":
        """By the settings of a recipe."""
        return cls(config.test, config.samples, task, config.seed, config.judge_by == "vali")

    def __call__(self, table: Table, target: Column, name: ClientId) -> Held:
        """The rows cut by (seed, client), of each class alike where there are classes."""
        draw, n = rng(self.seed, 0, "own test", name), len(table)
        classes = target.labels() if self.task == "classification" else [""] * n
        test = pick_alike(classes, self.count(n), draw)
        train = np.setdiff1d(np.arange(n), test)
        if self.vali:
            own = rng(self.seed, 0, "own validation", name)
            test = train[pick_alike([classes[i] for i in train], self.count(len(train)), own)]
            train = np.setdiff1d(train, test)
        if self.most and len(train) > self.most:
            train = np.sort(draw.choice(train, self.most, replace=False))
        return Held(table.take(train), table.take(test), target.take(train), target.take(test))

    def count(self, rows: int) -> int:
        """How many of so many rows are kept back: never all of them."""
        return min(round(self.share * rows), rows - 1)


def pick_alike(classes: Sequence[str], count: int, draw: np.random.Generator) -> Rows:
    """So many rows, of each class in its share; what rounding leaves over goes to those that were cut most.

    >>> pick_alike(["a"] * 8 + ["b"] * 2, 5, np.random.default_rng(0)).tolist()
    [2, 4, 5, 7, 8]
    """
    _, group, sizes = np.unique(np.asarray(classes, object).astype(str), return_inverse=True, return_counts=True)
    order = draw.permutation(len(group))
    exact = sizes * (max(0, count) / max(1, len(group)))
    quota = np.floor(exact).astype(np.intp)
    quota[np.argsort(quota - exact, kind="stable")[: max(0, count) - int(quota.sum())]] += 1
    picked = [order[group[order] == k][:many] for k, many in enumerate(quota.tolist())]
    return np.sort(np.concatenate([np.empty(0, np.intp), *picked]))


@dataclass
class Holders(Population):
    """Clients by name, whose rows are read and cut when they are first asked for.

    `accepts_any_client`: whether any name is accepted. A site with a file of its own has all of it, whatever its name.
    """

    names: Sequence[ClientId]
    read: Read
    keep: Keep
    accepts_any_client: bool = False
    _made: dict[ClientId, Held] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether clients keep anything back."""
        return self.keep.share > 0

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return self.accepts_any_client or name in self.names

    def __getitem__(self, name: ClientId) -> Held:
        if name not in self:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self.keep(*self.read(name), name)
        return self._made[name]


def pool_held(population: Mapping[ClientId, Held]) -> dict[ClientId, Held]:
    """One client that holds what all the others do: the pooled reference."""
    parts = [population[name] for name in population]

    def join(some: Sequence[Column]) -> Column:
        kind: Kind = next((c.kind for c in some if c.kind != "empty"), "empty")
        values = [c.values if kind != "category" else np.array(c.labels(), object) for c in some]
        return Column(kind, np.concatenate(values))

    def stack(some: Sequence[Table]) -> Table:
        return Table({n: join([t.columns[n] for t in some]) for n in some[0].columns}, sum(map(len, some)))

    train, test = stack([p.train for p in parts]), stack([p.test for p in parts])
    return {"pooled": Held(train, test, join([p.targets for p in parts]), join([p.kept for p in parts]))}


log = logging.getLogger("mutirao")

EMBEDDED = {"breast_cancer": "diagnosis", "wine": "cultivar", "diabetes": "progression"}  # and the name of the target
FEWEST = 10  # rows of a table that is trained on
FEW_CLASSES = 20  # whole numbers with more values than this are no classes
BINS = 10  # of a number that is predicted, when rows are dealt by it


@dataclass(frozen=True)
class Source:
    """Who holds what, what is predicted, and whether this party has the rows of all."""

    holders: Holders
    target: str
    task: Task
    everything: bool = True
    dealt: PartitionSummary | None = None


def find_source(config: Any) -> Source:
    """The parties that a configuration describes."""
    embedded, place = config.data in EMBEDDED, Path(config.data).expanduser()
    target = config.target or EMBEDDED.get(config.data, "")
    if config.sites and (embedded or not config.data):
        return elsewhere(config, target)
    if embedded:
        return deal_out(config, read_embedded(config.data), target)
    if not config.data:
        raise ConfigError(f"data: name a table, a folder of tables, or one of {', '.join(EMBEDDED)}")
    if place.is_dir():
        return read_folder(config, place, target)
    table = read_one(config, place)
    if config.sites:
        kept = Keep.of(config, found := task_of(config, table, target, place))
        return Source(
            Holders(["site"], lambda name: cut(config, table, target, place), kept, True), target, found, False
        )
    return deal_out(config, table, target)


def elsewhere(config: Any, target: str) -> Source:
    """The sites as the server knows them: how many they are, and that it holds none of their rows."""
    if not config.target:
        raise ConfigError("target: say which column of the sites' files is to be predicted")
    if config.task == "auto":
        raise ConfigError("task: say classification or regression; the server has no file to see it from")

    def refuse(name: ClientId) -> tuple[Table, Column]:
        raise ConfigError(f"data: {name} has a file of its own, which is not here; a site names its own with --data")

    keep = Keep.of(config, config.task)
    names = [f"site {k}" for k in range(1, config.clients + 1)]
    return Source(Holders(names, refuse, keep, accepts_any_client=True), target, config.task, everything=False)


def read_one(config: Any, path: Path) -> Table:
    """A file by the settings of its columns."""
    return read_file(path, read_kinds(config.columns), parse_names(config.ignore))


def deal_out(config: Any, table: Table, target: str) -> Source:
    """One table dealt to clients, by a column of it or by a partition."""
    place = Path(config.data)
    task = task_of(config, table, target, place)
    keep = Keep.of(config, task)
    features, targets = cut(config, table, target, place)
    if config.client:
        owner = [
            name for name, there in zip(owners(config, table), ~table.columns[target].missing, strict=True) if there
        ]
        names = sorted(set(owner))
        keys = np.array([names.index(name) for name in owner], np.intp)
        parts = [np.flatnonzero(keys == k) for k in range(len(names))]
    else:
        split = build("partition", config.partition)
        parts = split(labels_of(targets, task), clients=config.clients, rng=rng(config.seed, 0, "partition"))
        width = len(str(len(parts) - 1))
        names = [f"c{k:0{width}d}" for k in range(len(parts))]
    rows = {str(name): part for name, part in zip(names, parts, strict=True)}

    def read(name: ClientId) -> tuple[Table, Column]:
        return features.take(rows[name]), targets.take(rows[name])

    return Source(Holders(list(rows), read, keep), target, task, dealt=describe(labels_of(targets, task), parts))


def read_folder(config: Any, folder: Path, target: str) -> Source:
    """A folder with a table for each client, named after it."""
    files = {p.name[: -len(end)]: p for p in sorted(folder.iterdir()) if (end := ending(p)) and p.is_file()}
    if not files:
        raise ConfigError(f"{folder} holds no tables; right would be a file a client, ending in {', '.join(ENDINGS)}")
    tables = {name: read_one(config, path) for name, path in files.items()}
    first = next(iter(files))
    task = task_of(config, tables[first], target, files[first])
    keep = Keep.of(config, task)

    @cache
    def read(name: ClientId) -> tuple[Table, Column]:
        return cut(config, tables[name], target, files[name])

    for name in files:
        read(name)  # what is wrong with a file is said before the first round
    return Source(Holders(list(files), read, keep), target, task)


def ending(path: Path) -> str:
    """The ending by which a file is a table; empty if it is none."""
    return next((end for end in sorted(ENDINGS, key=len, reverse=True) if path.name.lower().endswith(end)), "")


def cut(config: Any, table: Table, target: str, place: Path) -> tuple[Table, Column]:
    """Features and targets of the rows whose target is known; identifiers and the client's column are no features."""
    forced = read_kinds(config.columns)
    numbering = [name for name in table.columns if IDENTIFIER.fullmatch(name) and name not in (*forced, target)]
    if numbering:
        log.warning("%s: no features, but identifiers by their names: %s", place, ", ".join(numbering))
    known = np.flatnonzero(~table.columns[target].missing)
    if len(known) < len(table):
        log.warning("%s: %d rows have no %s, and are left out", place, len(table) - len(known), target)
    if len(known) < FEWEST:
        raise ConfigError(f"{place} has {len(known)} rows with a {target!r}; at least {FEWEST} are needed")
    features = table.without([target, config.client, *numbering])
    if not features.columns:
        raise ConfigError(f"{place} has no column to predict {target!r} from")
    return features.take(known), table.columns[target].take(known)


def task_of(config: Any, table: Table, target: str, place: Path) -> Task:
    """What is asked of the target; `auto`: classes if it is text, or has a few whole numbers only."""
    column = find_column("target", table, target, place, needed="say which column is to be predicted")
    if config.task == "regression" and column.kind == "category":
        name = next(v for v in column.labels() if v)
        raise ConfigError(f"target: {target!r} of {place} is text such as {name[:40]!r}; task=regression needs numbers")
    if config.task != "auto":
        found: Task = config.task
        return found
    known = column.values[~column.missing]
    few = len(set(known.tolist())) <= min(FEW_CLASSES, max(2, len(known) // 2))
    classes = column.kind == "category" or (few and all(float(v).is_integer() for v in known.tolist()))
    task: Task = "classification" if classes else "regression"
    log.warning("task=auto: %s of %r, by its values", task, target)
    return task


def find_column(setting: str, table: Table, name: str, place: Path, needed: str) -> Column:
    """A column that a setting names, or one clear line."""
    if not name:
        raise ConfigError(f"{setting}: {needed}; {place} has {few(table.columns)}")
    if name not in table.columns:
        raise ConfigError(f"{setting}: {place} has no column {name!r}{nearest(name, table.columns)}")
    column = table.columns[name]
    if column.kind == "empty":
        raise ConfigError(f"{setting}: column {name!r} of {place} has no values")
    return column


def few(names: Collection[str]) -> str:
    """The first of these names."""
    return ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")


def owners(config: Any, table: Table) -> list[ClientId]:
    """Whose each row is, by the column that says so."""
    place = Path(config.data)
    if config.client == config.target:
        raise ConfigError(f"client: {config.client!r} is the target, too")
    found = find_column("client", table, config.client, place, needed="say which column tells whose a row is").labels()
    if "" in found:
        raise ConfigError(f"client: column {config.client!r} of {place} is empty in row {found.index('') + 1}")
    return found


def labels_of(targets: Column, task: Task) -> npt.NDArray[Any]:
    """What a partition deals rows by: classes, or tenths of the numbers."""
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
