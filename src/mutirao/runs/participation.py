"""Who was selected when, and how evenly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.metrics import gini, jain
from mutirao.runs.reader import Floats, Record


@dataclass(frozen=True, eq=False)
class Participation:
    """Who was selected when: `matrix` has a row a client, sorted by name, and a column a round."""

    clients: list[ClientId]
    matrix: npt.NDArray[np.bool_]

    @cached_property
    def times(self) -> npt.NDArray[np.int64]:
        """How often each client was selected."""
        return np.asarray(self.matrix.sum(axis=1, dtype=np.int64))

    @property
    def gini(self) -> float:
        """Inequality: 0 all the same, towards 1 one client has it all."""
        return gini(self.times)

    @property
    def jain(self) -> float:
        """Jain's index: 1 all the same."""
        return jain(self.times)

    @property
    def figures(self) -> dict[str, float]:
        """Fairness in numbers."""
        low, high = (int(f(self.times)) if len(self.times) else 0 for f in (np.min, np.max))
        return {
            "gini": self.gini,
            "jain": self.jain,
            "least": low,
            "most": high,
            "range": high - low,
            "never": int((self.times == 0).sum()),
        }


def lorenz(times: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Lorenz curve: which share of all selections the least selected share of clients has; even is the diagonal.

    The area between it and the diagonal is half of Gini's coefficient.

    >>> x, y = lorenz([1, 3])
    >>> y.tolist()
    [0.0, 0.25, 1.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.sort(np.asarray(times, np.float64)))])
    return np.linspace(0, 1, len(sums)), sums / (sums[-1] or 1.0)


def participation(rows: Sequence[Mapping[str, Any]], clients: int = 0, rounds: int = 0) -> Participation:
    """From the rows of `clients.csv`; `clients` counts also those who were never selected."""
    seen = sorted({str(r["client"]) for r in rows})
    names = everybody(seen, clients)
    place = {c: i for i, c in enumerate(names)}
    last = max([rounds, *(int(r["round"]) for r in rows)])
    matrix = np.zeros((len(names), last), np.bool_)
    for r in rows:
        matrix[place[str(r["client"])], int(r["round"]) - 1] = True
    return Participation(names, matrix)


def everybody(seen: Sequence[ClientId], clients: int) -> list[ClientId]:
    """All names: those never seen follow from the numbers of virtual clients, or are called `(unseen 1)` and so on."""
    width = len(str(clients - 1))
    numbered = [f"c{i:0{width}d}" for i in range(clients)]
    if set(seen) <= set(numbered):
        return numbered
    return sorted([*seen, *(f"(unseen {i + 1})" for i in range(clients - len(seen)))])


def participation_in(record: Record) -> Participation:
    """Who was selected when in a run."""
    return participation(record.asked, record.population, record.rounds)
