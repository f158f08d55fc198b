"""Who took part in a run, how evenly, and what it took to get somewhere: read from the tables of any run folder."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.metrics import gini, jain, rounds_to
from mutirao.runs.tables import Table, typed_row
from mutirao.stats import Interval, interval

Floats = npt.NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
FEW = 5  # runs whose figures are listed one by one
COSTS = ("seconds", "bytes", "sim_seconds", "sim_joules")


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


def participation(rows: Rows, clients: int = 0, rounds: int = 0) -> Participation:
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


@dataclass(frozen=True, eq=False)
class Story:
    """A run as its folder tells it."""

    folder: Path
    history: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    clients: int

    @classmethod
    def read(cls, folder: Path) -> "Story":
        """The run in a folder, finished or not."""
        history = [typed_row(r) for r in Table(folder / "history.csv").read()]
        if not history:
            raise ConfigError(f"{folder} holds no run with at least one round")
        rows = [{**typed_row(r), "client": r["client"]} for r in Table(folder / "clients.csv").read()]
        return cls(folder, history, rows, population_of(folder))

    @cached_property
    def participation(self) -> Participation:
        """Who was selected when."""
        return participation(self.rows, self.clients, len(self.history))

    def values(self, metric: str) -> list[float]:
        """A metric by round, NaN where it was not evaluated."""
        if not any(metric in row for row in self.history):
            raise ConfigError(f"{self.folder}: no round has a metric {metric!r}")
        return [float(row.get(metric, math.nan)) for row in self.history]

    def best_so_far(self, metric: str) -> Floats:
        """The highest value up to each round."""
        return np.fmax.accumulate(np.array(self.values(metric)))

    def cost_to(self, metric: str, target: float) -> dict[str, float] | None:
        """What had been spent at the end of the first round that reached the target; None if none did."""
        end = rounds_to(self.values(metric), target)
        if end is None:
            return None
        spent = self.history[:end]
        both = [{**row, "bytes": row.get("bytes_down", 0) + row.get("bytes_up", 0)} for row in spent]
        sums = {k: float(sum(row[k] for row in both)) for k in COSTS if all(k in row for row in both)}
        return {"rounds": float(end), **sums}

    def by_client(self, metric: str = "accuracy") -> dict[ClientId, float]:
        """The last value each client reported of its own data, of those who ever did."""
        return {r["client"]: float(r[metric]) for r in self.rows if metric in r}

    def worst_decile(self, metric: str = "accuracy") -> float:
        """The mean over the tenth of the clients with the lowest values in the end.

        By test samples of their own, if the run judged every client; else by what they last reported of their training.
        """
        if any(f"{metric}_worst_decile" in row for row in self.history):
            return next(v for v in reversed(self.values(f"{metric}_worst_decile")) if not math.isnan(v))
        values = np.sort(list(self.by_client(metric).values()))
        return float(values[: -(-len(values) // 10)].mean()) if len(values) else math.nan


def population_of(folder: Path) -> int:
    """How many clients a run has, as its summary says or, while it is running, its configuration; 0: not known."""
    if "clients" in (summary := summary_of(folder)):
        return int(summary["clients"])
    config = folder / "config.toml"
    found = re.search(r"^clients = (\d+)$", config.read_text(encoding="utf-8"), re.M) if config.exists() else None
    return int(found[1]) if found else 0


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of a finished run, or nothing."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stories(folder: Path) -> dict[str, list[Story]]:
    """The runs of a folder by method: those of a study, or the one run it holds."""
    if (folder / "history.csv").exists():
        return {folder.name or "run": [Story.read(folder)]}
    methods: dict[str, list[Story]] = {}
    for file in sorted((folder / "cells").glob("*/*/history.csv")):
        methods.setdefault(file.parent.parent.name, []).append(Story.read(file.parent))
    if not methods:
        raise ConfigError(f"{folder} holds neither a run nor a study")
    order = order_of(folder)
    return dict(sorted(methods.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def order_of(folder: Path) -> dict[str, int]:
    """The order of a study's methods, as in its table."""
    try:
        lines = json.loads((folder / "table.json").read_text(encoding="utf-8"))["lines"]
        return {m: i for i, m in enumerate(dict.fromkeys(line["method"] for line in lines))}
    except (OSError, ValueError, KeyError):
        return {}


@dataclass(frozen=True)
class Reached:
    """How many rounds the runs of a method took to a target; None: it was never reached."""

    target: float
    rounds: tuple[int | None, ...]
    of: int  # rounds made

    @property
    def interval(self) -> Interval:
        """Mean and 95% interval over runs; not known unless all runs got there."""
        if any(r is None for r in self.rounds):
            return Interval(math.nan, math.nan)
        return interval([float(r) for r in self.rounds if r is not None])

    def __str__(self) -> str:
        each = ", ".join(f"> {self.of}" if r is None else str(r) for r in self.rounds)
        if len(self.rounds) > FEW:
            got = sorted(r for r in self.rounds if r is not None)
            each = f"{got[0]} to {got[-1]}" if got else "never"
            each += f"; {len(self.rounds) - len(got)} of {len(self.rounds)} not" if len(got) < len(self.rounds) else ""
        found = self.interval
        if math.isnan(found.mean) or len(self.rounds) < 2:
            return each
        return f"{found.mean:.1f} ± {found.half:.1f} ({each})"


def reached(runs: Sequence[Story], metric: str, target: float) -> Reached:
    """Rounds to a target over the runs of a method."""
    rounds = tuple(rounds_to(run.values(metric), target) for run in runs)
    return Reached(target, rounds, min(len(run.history) for run in runs))


def mean_best(runs: Sequence[Story], metric: str) -> Floats:
    """The best value so far by round, averaged over runs as far as all of them go."""
    shortest = min(len(run.history) for run in runs)
    return np.asarray(np.mean([run.best_so_far(metric)[:shortest] for run in runs], axis=0))


def dominance(methods: Mapping[str, Sequence[Story]], metric: str) -> dict[str, float]:
    """The share of rounds in which each method has the highest best-so-far value, on average over its runs.

    Methods that are level share the round.
    """
    curves = {name: mean_best(runs, metric) for name, runs in methods.items()}
    shortest = min(len(curve) for curve in curves.values())
    table = np.nan_to_num(np.array([curve[:shortest] for curve in curves.values()]), nan=-np.inf)
    leads = table == table.max(axis=0)
    shares = (leads / leads.sum(axis=0)).mean(axis=1)
    return dict(zip(curves, shares.tolist(), strict=True))
