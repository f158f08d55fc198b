"""Who takes part in a round. A selector is called as `(roster, round, rng) -> clients` and picks among those present.

A selector that must ask clients first offers `.probes(roster, round, rng)`; one that uses what clients report says so
in `needs`. All that is known of clients stands in the roster's columns, so a choice among a million is a few array
operations.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.fleet import ClientId
from mutirao.roster import Roster


def everyone(roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
    """All clients that are present."""
    return named(roster, roster.here())


@dataclass(frozen=True)
class Uniform:
    """So many of those present, drawn without replacement, each as likely as any other.

    `count` is a whole number of clients (1 is one client), or a share in (0, 1] of those present (1.0 is all).
    """

    count: int | float

    def __post_init__(self) -> None:
        check_count(self.count)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        return named(roster, rng.choice(here, how_many(self.count, len(here)), replace=False, shuffle=False))


NAMES = {"everyone": everyone, "uniform": Uniform}


def check_count(count: int | float) -> None:
    """Refuse what is neither a number of clients nor a share of them."""
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not (count >= 1 if whole else isinstance(count, float) and 0 < count <= 1):
        raise ValueError(f"count is {count!r}, but must be a whole number of at least 1 or a share above 0 up to 1.0")


def how_many(count: int | float, present: int) -> int:
    """A count or a share as a number of clients: at least one, at most all that are present."""
    wanted = round(count * present) if isinstance(count, float) else count
    return min(max(1, wanted), present)


def named(roster: Roster, rows: npt.NDArray[np.intp]) -> list[ClientId]:
    """The clients of these rows, sorted by name."""
    return [roster.ids[i] for i in np.sort(rows)]
