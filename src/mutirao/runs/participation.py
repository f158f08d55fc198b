"""Which clients were selected in which round, and how evenly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.metrics import gini, jain
from mutirao.runs.reader import Floats, Record

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Participation:
    """The selections of a run: index of the client (sorted by name) and of the round, each pair once.

    >>> rows = [{"round": 1, "client": "ana"}, {"round": 1, "client": "bia"}, {"round": 2, "client": "ana"}]
    >>> found = participation(rows)
    >>> found.clients, found.times, round(found.gini, 2)
    (['ana', 'bia'], array([2, 1]), 0.17)
    """

    clients: list[ClientId]
    rounds: int
    who: Places  # the client's index, for each selection
    when: Places  # the round's index

    @classmethod
    def of(cls, clients: list[ClientId], rounds: int, who: npt.ArrayLike, when: npt.ArrayLike) -> "Participation":
        """From indices with possible repetitions, as when a round is attempted again."""
        pairs = np.unique(np.asarray(who, np.int64) * max(1, rounds) + np.asarray(when, np.int64))
        return cls(clients, rounds, *np.divmod(pairs, max(1, rounds)))

    def among(self, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """The selections of some clients as a matrix of clients by rounds."""
        chosen = np.asarray(rows, np.intp)
        place = np.full(len(self.clients), -1, np.intp)
        place[chosen] = np.arange(len(chosen))
        matrix = np.zeros((len(chosen), self.rounds), np.bool_)
        held = place[self.who] >= 0
        matrix[place[self.who[held]], self.when[held]] = True
        return matrix

    @cached_property
    def times(self) -> Places:
        """How often each client was selected."""
        return np.bincount(self.who, minlength=len(self.clients)).astype(np.int64)

    @property
    def gini(self) -> float:
        """Gini coefficient: 0 if all were selected equally often, towards 1 if one client always was."""
        return gini(self.times)

    @property
    def jain(self) -> float:
        """Jain's fairness index: 1 if all were selected equally often."""
        return jain(self.times)

    @property
    def figures(self) -> dict[str, float]:
        """Figures of fairness."""
        low = int(self.times.min()) if len(self.times) else 0
        high = int(self.times.max(initial=0))
        return {
            "gini": self.gini,
            "jain": self.jain,
            "least": low,
            "most": high,
            "range": high - low,
            "never": int((self.times == 0).sum()),
        }


def lorenz(times: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Lorenz curve: the share of all selections that the least selected share of clients has.

    Even selection is the diagonal; the area between it and the curve is half of the Gini coefficient.

    >>> x, y = lorenz([1, 3])
    >>> y.tolist()
    [0.0, 0.25, 1.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.sort(np.asarray(times, np.float64)))])
    return np.linspace(0, 1, len(sums)), sums / (sums[-1] or 1.0)


def participation(rows: Iterable[Mapping[str, Any]], clients: int = 0, rounds: int = 0) -> Participation:
    """Participation by the rows of `clients.csv`; `clients` is the population, with those never selected.

    >>> participation([{"round": 1, "client": "c0"}, {"round": 2, "client": "c0"}], clients=2).times
    array([2, 0])
    """
    seen: dict[ClientId, int] = {}
    pairs = [(seen.setdefault(str(r["client"]), len(seen)), int(r["round"])) for r in rows]
    codes, numbers = np.array(pairs, np.int64).reshape(-1, 2).T
    return place_by_name(list(seen), codes, numbers, clients, rounds)


def place_by_name(names: list[ClientId], codes: Places, numbers: Places, clients: int, rounds: int) -> Participation:
    """Participation by client names, each row's index into them, and each row's round."""
    everyone = all_clients(sorted(names), clients)
    places = {c: i for i, c in enumerate(everyone)}
    place = np.array([places[c] for c in names], np.int64)
    return Participation.of(everyone, int(numbers.max(initial=rounds)), place[codes], numbers - 1)


def all_clients(seen: Sequence[ClientId], clients: int) -> list[ClientId]:
    """All client names. Unseen ones follow from the numbering of virtual clients, or are called `(unseen 1)` etc."""
    # Virtual clients are called c0, c1, ... with leading zeros, as `virtual_clients` numbers them.
    width = len(str(clients - 1))
    numbered = [f"c{i:0{width}d}" for i in range(clients)]
    if set(seen) <= set(numbered):
        return numbered
    return sorted([*seen, *(f"(unseen {i + 1})" for i in range(clients - len(seen)))])


def participation_in(record: Record, clients: int | None = None) -> Participation:
    """Participation in a run, of `clients` clients if given."""
    names, codes = record.clients.codes("client")
    numbers = record.clients.wholes("round")
    held = record.selected
    population = record.population if clients is None else clients
    return place_by_name(names, codes[held], numbers[held], population, record.rounds)
