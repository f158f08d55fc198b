"""Who holds which rows: clients by a column, by a partition or by files, each keeping some rows back to judge by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.core.fleet import ClientId
from mutirao.randomness import rng
from mutirao.systems.tabular.schema import Task
from mutirao.systems.tabular.table import Column, Kind, Rows, Table
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

    `anybody`: whether any name will do. A site that has a file of its own has all of it, whatever it is called.
    """

    names: Sequence[ClientId]
    read: Read
    keep: Keep
    anybody: bool = False
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
        return self.anybody or name in self.names

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
