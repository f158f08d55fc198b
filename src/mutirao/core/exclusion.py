"""Excluded clients: they are neither in the population nor visible to the server."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mutirao.config import nearest
from mutirao.core.fleet import ClientId, Fleet, Wrapper
from mutirao.errors import ConfigError


def parse_names(text: str) -> frozenset[ClientId]:
    """The clients that a setting such as `exclude` names, separated by commas."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


class PopulationWithout(Mapping[ClientId, Any]):
    """A population without some of its clients; the data of the others are still created on access.

    >>> dict(PopulationWithout({"ana": 1, "bia": 2}, ["bia"]))
    {'ana': 1}
    """

    def __init__(self, population: Mapping[ClientId, Any], names: Collection[ClientId]) -> None:
        for name in sorted(names):
            if name not in population:
                raise ConfigError(f"exclude: the task has no client {name!r}{nearest(name, population)}")
        if len(population) <= len(names):
            raise ConfigError("exclude: no client is left")
        self.population = population
        self.names = frozenset(names)

    def __len__(self) -> int:
        return len(self.population) - len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return (name for name in self.population if name not in self.names)

    def __getitem__(self, name: ClientId) -> Any:
        if name in self.names:
            raise KeyError(name)
        return self.population[name]


class FleetWithout(Wrapper):
    """A fleet without some of its clients, whether they are connected or not.

    >>> from mutirao import LocalFleet, Reply
    >>> fleet = LocalFleet(lambda request, site: Reply({}, n=1), {"ana": None, "bia": None})
    >>> FleetWithout(fleet, ["bia"]).clients()
    ['ana']
    """

    def __init__(self, fleet: Fleet, names: Collection[ClientId]) -> None:
        super().__init__(fleet)
        self.names = frozenset(names)
        self._all: list[ClientId] | None = None
        self._left: list[ClientId] = []

    def clients(self) -> list[ClientId]:
        """The other clients that are present; the same list while nothing has changed."""
        here = self.fleet.clients()
        if here is not self._all:
            self._all = here
            self._left = [c for c in here if c not in self.names]
        return self._left
