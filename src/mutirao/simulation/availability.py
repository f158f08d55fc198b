"""Availability: which clients of a simulated population are present in a round, at random or by a schedule.

An availability is called as `(names, time, before, seed) -> mask` with the mask of the previous time (None at first).
Every round takes one time step; while no client is present, the server waits, step by step, until one is.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId, Fleet, Wrapper
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.io import read_csv
from mutirao.randomness import rng

log = logging.getLogger("mutirao")

Mask = npt.NDArray[np.bool_]
Availability = Callable[[Sequence[ClientId], int, Mask | None, int], Mask]
MEMORY = "available.present"
CLOCK = "available.time"
LOOKED = "available.looked"
LONGEST = 1000  # time steps that the server waits for a client


def always(names: Sequence[ClientId], time: int, before: Mask | None, seed: int) -> Mask:
    """All clients are available in every round.

    >>> always(["ana", "bia"], 1, None, seed=0)
    array([ True,  True])
    """
    return np.ones(len(names), np.bool_)


@dataclass(frozen=True)
class Markov:
    """Each client independently: an available one leaves with probability `leave`, an absent one returns with `come`.

    In the long run a share come / (come + leave) is there, and begins so; a stay lasts 1 / leave steps on average.

    >>> names = [f"c{i}" for i in range(10_000)]
    >>> Markov(leave=0.1, come=0.3)(names, 1, None, seed=0).mean().round(2).item()  # 0.3 / (0.1 + 0.3)
    0.75
    """

    leave: float = 0.1
    come: float = 0.3

    def __post_init__(self) -> None:
        if not (0 <= self.leave <= 1 and 0 < self.come <= 1):
            raise ValueError(f"leave is {self.leave!r} and come is {self.come!r}, but both must be probabilities")

    def __call__(self, names: Sequence[ClientId], time: int, before: Mask | None, seed: int) -> Mask:
        lot = rng(seed, time, "available").random(len(names))
        if before is None:
            return np.asarray(lot < self.come / (self.come + self.leave))
        return np.where(before, lot >= self.leave, lot < self.come)


@dataclass(frozen=True)
class Daily:
    """By time of day: each client is available for a `share` of a day of `period` steps, always at the same time.

    When its day began is sampled once, within `spread` of a day: 1.0 is all around the globe, 0.0 one time zone.

    >>> day = Daily(period=8, share=0.25, spread=0.0)
    >>> [int(day(["ana"], hour, None, seed=0)[0]) for hour in range(1, 17)]
    [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    """

    period: int = 24
    share: float = 0.5
    spread: float = 1.0

    def __post_init__(self) -> None:
        if not (self.period >= 1 and 0 < self.share <= 1 and 0 <= self.spread <= 1):
            raise ValueError("period must be at least 1, share above 0 up to 1 and spread between 0 and 1")

    def __call__(self, names: Sequence[ClientId], time: int, before: Mask | None, seed: int) -> Mask:
        began = rng(seed, 0, "available").random(len(names)) * self.spread * self.period
        return np.asarray((time - 1 + began) % self.period < self.share * self.period)


@dataclass(frozen=True)
class Schedule:
    r"""By a CSV file with the columns `client,from,until`, both included; clients not in it are always available.

    >>> _ = Path("who.csv").write_text("client,from,until\nana,1,2\n")
    >>> [Schedule("who.csv")(["ana", "bia"], time, None, seed=0).tolist() for time in (2, 3)]
    [[True, True], [False, True]]
    """

    file: str

    def __call__(self, names: Sequence[ClientId], time: int, before: Mask | None, seed: int) -> Mask:
        times = read_schedule(self.file)
        if time == 1:
            check_names(self.file, times, names)
        return np.array([c not in times or any(a <= time <= b for a, b in times[c]) for c in names], np.bool_)


NAMES = {"always": always, "markov": Markov, "daily": Daily, "schedule": Schedule}


def read_schedule(file: str) -> dict[ClientId, list[tuple[int, int]]]:
    """The times at which each client of a schedule is present."""
    found: dict[ClientId, list[tuple[int, int]]] = {}
    rows = read_csv(Path(file).expanduser())
    try:
        for row in rows:
            found.setdefault(row["client"], []).append((int(row["from"]), int(row["until"])))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"available.file: {file} must have the columns client, from, until") from error
    return found


def check_names(file: str, named: Collection[ClientId], clients: Sequence[ClientId]) -> None:
    """Refuse a schedule that names none of the clients; warn of unknown names, which may join later or be excluded."""
    others = sorted(set(named) - set(clients))
    few = ", ".join(others[:5])
    if len(others) > 5:
        few += ", ..."
    if others and len(others) == len(named):
        raise ConfigError(f"available.file: {file} names {few}, but clients are called {', '.join(clients[:3])}, ...")
    if others:
        log.warning("%s names %s, but there are no such clients", file, few)


def next_available(
    available: Availability, names: Sequence[ClientId], time: int, before: Mask | None, seed: int
) -> tuple[Mask, int]:
    """The clients present at the first time, from `time` on, at which any is; and that time."""
    mask = np.zeros(len(names), np.bool_)
    for now in range(time, time + LONGEST):
        mask = available(names, now, before, seed)
        before = mask
        if mask.any():
            break
    return mask, now


class Churn(Wrapper):
    """A fleet with clients that are absent at times, as `available` says; mask and time are kept in the run's memory.

    >>> import numpy as np
    >>> from mutirao import LocalFleet, Reply
    >>> fleet = LocalFleet(lambda request, site: Reply({}, n=1), {f"c{i}": None for i in range(8)})
    >>> run = Run({"w": np.zeros(1)})
    >>> churned = Churn(fleet, Markov(leave=0.5, come=0.5), run)
    >>> len(fleet.clients()), churned.clients()
    (8, ['c1', 'c2', 'c3', 'c4', 'c6'])
    """

    def __init__(self, fleet: Fleet, available: Availability, run: Run) -> None:
        super().__init__(fleet)
        self.available = available
        self.run = run
        self._round = -1
        self._all: list[ClientId] = []
        self._here: list[ClientId] = []
        self._counts: dict[int, tuple[int, int]] = {}  # by round: clients present, and time steps waited for them

    def clients(self) -> list[ClientId]:
        """The clients present in the current round; the same list object throughout the round."""
        names = self.fleet.clients()
        number = self.run.round + 1
        if number != self._round or names is not self._all:
            mask, waited = self._look(names, number)
            self._round = number
            self._all = names
            self._here = [names[i] for i in np.flatnonzero(mask)]
            # The record of the round before may still be due.
            self._counts = {n: c for n, c in self._counts.items() if n == number - 1}
            self._counts[number] = len(self._here), waited
        return self._here

    def _look(self, names: Sequence[ClientId], number: int) -> tuple[Mask, int]:
        """The mask of a round and the time steps waited for it; resuming does not sample it again."""
        memory = self.run.memory
        before = memory.get(MEMORY)
        # If clients have joined or left for good, the mask is of other names: presence is sampled afresh.
        known: Mask | None = None
        if before is not None and len(before) == len(names):
            known = before.astype(np.bool_)
        looked, waited = map(int, memory.get(LOOKED, (-1, 0)))
        if known is not None and looked == number:
            return known, waited
        next_time = int(memory.get(CLOCK, np.zeros((), np.int64))) + 1
        mask, time = next_available(self.available, names, next_time, known, self.run.seed)
        memory |= {MEMORY: mask, CLOCK: np.asarray(time), LOOKED: np.array([number, time - next_time])}
        return mask, time - next_time

    def record(self, done: Round) -> None:
        """Add to the record of a round how many clients were present, and how long it waited."""
        available, waited = self._counts.get(int(done.row.get("round", self._round)), (len(self._here), 0))
        done.row.update(available=available, waited=waited)
        self.fleet.record(done)
