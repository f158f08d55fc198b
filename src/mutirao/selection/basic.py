"""Selection without any information: all clients, some at random, or all in turn."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import Counted, how_many, names_in


def everyone(roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
    """All clients that are present.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> everyone(roster, 1, np.random.default_rng(0))
    ['ana', 'bia', 'caio']
    """
    return names_in(roster, roster.here())


@dataclass(frozen=True)
class Uniform(Counted):
    """A uniform sample of the clients present, without replacement.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio", "davi"])
    >>> Uniform(2)(roster, 1, np.random.default_rng(0))
    ['caio', 'davi']
    >>> len(Uniform(0.75)(roster, 1, np.random.default_rng(0)))  # a share of those present
    3
    """

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        return names_in(roster, rng.choice(here, how_many(self.count, len(here)), replace=False, shuffle=False))


@dataclass(frozen=True)
class RoundRobin(Counted):
    """All clients in turn: those that have waited longest, by name among equals.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> for round in (1, 2, 3):
    ...     chosen = RoundRobin(2)(roster, round, np.random.default_rng(0))
    ...     roster.mark(round, chosen, {})
    ...     print(chosen)
    ['ana', 'bia']
    ['ana', 'caio']
    ['ana', 'bia']
    """

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        turn = np.argsort(roster.last_selected[here], kind="stable")  # rows are sorted by name
        return names_in(roster, here[turn[: how_many(self.count, len(here))]])
