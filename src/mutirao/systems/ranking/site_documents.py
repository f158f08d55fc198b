"""What search sites hold: documents as rows of a table, which simulated clients may share, and others to judge by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.training.samples import Index, Population


@dataclass(frozen=True, eq=False)
class Held:
    """Documents to train on, as rows of a table, and documents that a client only judges by, if it has any."""

    table: RankingData
    rows: Index
    test: "Held | None" = None

    @classmethod
    def whole(cls, table: RankingData, test: RankingData | None = None) -> "Held":
        """All documents of a table."""
        return cls(table, np.arange(len(table)), None if test is None else cls.whole(test))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """Its features as they were read."""
        return self.table.x[self.rows]

    @property
    def highest(self) -> int:
        """Its highest grade."""
        own = int(self.table.grades[self.rows].max(initial=0))
        return own if self.test is None else max(own, self.test.highest)


@dataclass
class Holders(Population):
    """Clients by name, whose documents are read when they are first asked for.

    `anybody`: whether any name will do. A site that has a file of its own has all of it, whatever it is called.
    """

    names: Sequence[ClientId]
    read: Callable[[ClientId], Held]
    tests: bool = False
    anybody: bool = False
    _made: dict[ClientId, Held] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether clients keep anything back."""
        return self.tests

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
            self._made[name] = self.read(name)
        return self._made[name]


def names_of_dealt(many: int) -> list[ClientId]:
    """c0, c1, ... with equally many digits."""
    return [f"c{i:0{len(str(many - 1))}d}" for i in range(many)]


def deal_rows(
    table: RankingData,
    parts: Sequence[Index],
    most: int,
    seed: int,
    test: RankingData,
    tests: Sequence[Index] | None = None,
) -> Holders:
    """Clients c0, c1, ... over one table, each with its rows, at most `most` of them (0: all), drawn once.

    With `tests` each judges by those rows of the `test` table.
    """
    draw, held = np.random.default_rng(seed), {}
    for i, (name, part) in enumerate(zip(names_of_dealt(len(parts)), parts, strict=True)):
        rows = part if not most or len(part) <= most else np.sort(draw.choice(part, most, replace=False))
        held[name] = Held(table, rows.astype(np.intp), None if tests is None else Held(test, tests[i]))
    return Holders(list(held), held.__getitem__, tests is not None)


def pool_held(population: Mapping[ClientId, Held]) -> Holders:
    """One client that holds what all the others do: the pooled reference."""
    parts = [population[name] for name in population]
    if all(p.table is parts[0].table for p in parts):
        one = replace(parts[0], rows=np.sort(np.concatenate([p.rows for p in parts])))
        if one.test is not None:
            one = replace(one, test=Held.whole(one.test.table))
    else:
        kept = [p.test.table for p in parts if p.test is not None]
        one = Held.whole(join_tables([p.table.take(p.rows) for p in parts]), join_tables(kept) if kept else None)
    return Holders(["pooled"], lambda name: one, one.test is not None)


def join_tables(tables: Sequence[RankingData], names: Sequence[str] = ()) -> RankingData:
    """All documents in one table, queries kept apart; with `names` their ids say whose they are."""
    firsts = np.cumsum([0, *(len(t.query_ids) for t in tables)])
    queries = [t.queries + first for t, first in zip(tables, firsts, strict=False)]
    ids = (
        [[f"{name}/{i}" for i in t.query_ids.tolist()] for name, t in zip(names, tables, strict=True)]
        if names
        else [t.query_ids.astype(str).tolist() for t in tables]
    )
    return RankingData(
        np.concatenate([t.x for t in tables]),
        np.concatenate([t.grades for t in tables]),
        np.concatenate(queries),
        np.array([i for own in ids for i in own]),
    )
