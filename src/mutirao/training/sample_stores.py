"""Where clients' samples lie, each place once, and who owns which rows: a million clients in one pass."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.training.samples import ClientData, Index, Samples, VirtualClients

log = logging.getLogger("mutirao")

Fault = tuple[ClientId, str]


@dataclass(frozen=True, eq=False)
class SampleStore:
    """Samples that lie together, and who owns which: names[i] has the rows order[offsets[i]:offsets[i + 1]]."""

    x: Any
    y: Tensor
    names: Sequence[ClientId]  # sorted
    order: Index
    offsets: npt.NDArray[np.int64]
    without: Collection[ClientId] = ()
    test: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and type of a sample."""
        return Samples(self.x, self.y).kind

    def samples_of(self, i: int) -> Samples:
        """What the i-th client has of it."""
        return Samples(self.x, self.y, self.order[self.offsets[i] : self.offsets[i + 1]])

    def clients(self) -> Iterator[int]:
        """Those who have some of it, in sorted order."""
        here = np.flatnonzero(np.diff(self.offsets))
        return (i for i in here.tolist() if self.names[i] not in self.without)

    def owner(self, wrong: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        """The first client that owns one of these rows, and which of its samples it is."""
        at = np.flatnonzero(wrong[self.order]) if wrong.any() else np.empty(0, np.intp)
        for i, place in zip((np.searchsorted(self.offsets, at, "right") - 1).tolist(), at.tolist(), strict=True):
            if self.names[i] not in self.without:
                return i, place - int(self.offsets[i])
        return None

    def fault(self, i: int, words: str) -> Fault:
        """What is wrong with the i-th client's."""
        return self.names[i], f"client {self.names[i]}: {'in its test data ' if self.test else ''}{words}"


def stores_of(population: Mapping[ClientId, Any], without: Collection[ClientId] = ()) -> list[SampleStore]:
    """Where the clients' samples lie, each place once; of data that are not at hand only the first client's."""
    if isinstance(population, PopulationWithout):
        return stores_of(population.population, population.names)
    if isinstance(population, VirtualClients):
        found = [
            SampleStore(population.x, population.y, population.names, population.order, population.offsets, without)
        ]
        if (test := population.test) is not None:
            offsets = np.cumsum([0, *map(len, population.tests)])
            rows = np.concatenate([*population.tests, np.empty(0, np.intp)]).astype(np.intp)
            found.append(SampleStore(test.x, test.y, population.names, rows, offsets, without, test=True))
        return found
    names = sorted(name for name in population if name not in without)
    if not isinstance(population, dict):
        try:
            population = {name: population[name] for name in names[:1]}
        except Exception as error:  # a client's own failure, as it will be in the round
            log.info("%s could not be looked at before the first round: %s", names[0], error)
            return []
    held: dict[tuple[int, int, bool], list[tuple[ClientId, Samples]]] = {}
    for name in sorted(population):
        if name in without:
            continue
        data = population[name]
        try:
            own = Samples.of(data)
        except ValueError as error:
            raise ConfigError(f"client {name}: {error}") from error
        for samples, is_test in [(own, False), *([(data.test, True)] if isinstance(data, ClientData) else [])]:
            held.setdefault((id(samples.x), id(samples.y), is_test), []).append((name, samples))
    return [merge_store(some, is_test) for (_, _, is_test), some in held.items()]


def merge_store(some: Sequence[tuple[ClientId, Samples]], test: bool) -> SampleStore:
    """The store of clients who share one."""
    first = some[0][1]
    rows = [np.arange(len(s)) if s.index is None else s.index for _, s in some]
    offsets = np.cumsum([0, *map(len, rows)])
    return SampleStore(first.x, first.y, [name for name, _ in some], np.concatenate(rows), offsets, test=test)
