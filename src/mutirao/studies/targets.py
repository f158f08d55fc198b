"""Rounds and costs to a target value, and which method leads: read from any run folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.metrics import rounds_to
from mutirao.runs.reader import Floats, Record, json_of
from mutirao.stats import Interval, interval

FEW = 5  # up to so many runs are listed one by one
COSTS = ("seconds", "bytes", "sim_seconds", "sim_joules")


def runs_by_method(folder: Path) -> dict[str, list[Record]]:
    """The runs of a folder by method: those of a study, in its order, or a single run.

    >>> import mutirao
    >>> _ = mutirao.execute("quickstart", {"rounds": 2, "per_round": 2}, "runs/alone", pictures=False)
    >>> {method: len(runs) for method, runs in runs_by_method(Path("runs/alone")).items()}
    {'alone': 1}
    """
    if (folder / "history.csv").is_file():
        return {folder.name or "run": [Record.begun(folder)]}
    methods: dict[str, list[Record]] = {}
    for file in sorted((folder / "cells").glob("*/*/history.csv")):
        methods.setdefault(file.parent.parent.name, []).append(Record.begun(file.parent))
    if not methods:
        raise ConfigError(f"{folder} contains neither a run nor a study with at least one round")
    order = json_of(folder / "study.json").get("methods")
    place = {str(m): i for i, m in enumerate(order)} if isinstance(order, list) else {}
    return dict(sorted(methods.items(), key=lambda item: (place.get(item[0], len(place)), item[0])))


def values(record: Record, metric: str) -> list[float]:
    """A metric by round, NaN where it was not evaluated."""
    if not any(metric in row for row in record.rows):
        raise ConfigError(f"{record.path}: no round has a metric {metric!r}")
    return [float(row.get(metric, math.nan)) for row in record.rows]


def sign_of(record: Record, metric: str) -> float:
    """1 if higher values of the metric are better, -1 if lower ones; ConfigError if neither is declared."""
    direction = record.direction(metric)
    if direction is None:
        raise ConfigError(f"{record.path}: the direction of {metric!r} is not declared, so none of its values is best")
    if direction == "higher":
        return 1.0
    return -1.0


def best_so_far(record: Record, metric: str) -> Floats:
    """The best value up to each round.

    >>> import mutirao
    >>> _ = mutirao.execute("quickstart", {"rounds": 3, "per_round": 2}, "runs/best", pictures=False)
    >>> curve = best_so_far(Record.of(Path("runs/best")), "accuracy")
    >>> len(curve), bool((np.diff(curve) >= 0).all())
    (3, True)
    """
    sign = sign_of(record, metric)
    # `fmax` ignores NaN, of rounds without an evaluation; `maximum` would keep NaN from there on.
    return np.asarray(sign * np.fmax.accumulate(sign * np.array(values(record, metric))))


def first_at(record: Record, metric: str, target: float) -> int | None:
    """The first round that reached the target, or None."""
    sign = sign_of(record, metric)
    return rounds_to([sign * value for value in values(record, metric)], sign * target)


def cost_to(record: Record, metric: str, target: float) -> dict[str, float] | None:
    """The costs up to the first round that reached the target; None if none did."""
    end = first_at(record, metric, target)
    if end is None:
        return None
    rows = [{**row, "bytes": row.get("bytes_down", 0) + row.get("bytes_up", 0)} for row in record.rows[:end]]
    costs = {"rounds": float(end)}
    for kind in COSTS:
        if all(kind in row for row in rows):
            costs[kind] = float(sum(row[kind] for row in rows))
    return costs


def by_client(record: Record, metric: str = "accuracy") -> dict[ClientId, float]:
    """The last value that each client reported, for clients that reported any."""
    names, codes = record.clients.codes("client")
    reported = record.clients.numbers(metric)
    known = ~np.isnan(reported)
    last = np.full(len(names), np.nan)
    # Where an index occurs several times, NumPy keeps the last value, which is that of the latest round.
    last[codes[known]] = reported[known]
    return {names[i]: float(last[i]) for i in np.flatnonzero(~np.isnan(last)).tolist()}


def worst_decile(record: Record, metric: str = "accuracy") -> float:
    """The final mean over the worst tenth of the clients.

    By the clients' own test samples, if all clients were evaluated; else by their last reports from training.
    """
    if any(f"{metric}_worst_decile" in row for row in record.rows):
        return next(v for v in reversed(values(record, f"{metric}_worst_decile")) if not math.isnan(v))
    sign = sign_of(record, metric)
    found = np.sort([sign * v for v in by_client(record, metric).values()])
    if len(found):
        return float(sign * found[: -(-len(found) // 10)].mean())
    return math.nan


@dataclass(frozen=True)
class Reached:
    """Rounds to a target value for each run of a method; None if it was never reached."""

    target: float
    rounds: tuple[int | None, ...]
    of: int  # rounds of the shortest run

    @property
    def interval(self) -> Interval:
        """Mean and 95% interval over runs; NaN unless all runs reached the target."""
        if any(r is None for r in self.rounds):
            return Interval(math.nan, math.nan)
        return interval([float(r) for r in self.rounds if r is not None])

    def __str__(self) -> str:
        each = ", ".join(f"> {self.of}" if r is None else str(r) for r in self.rounds)
        if len(self.rounds) > FEW:
            reached = sorted(r for r in self.rounds if r is not None)
            each = f"{reached[0]} to {reached[-1]}" if reached else "never"
            if len(reached) < len(self.rounds):
                each += f"; {len(self.rounds) - len(reached)} of {len(self.rounds)} not"
        found = self.interval
        if math.isnan(found.mean) or len(self.rounds) < 2:
            return each
        return f"{found.mean:.1f} ± {found.half:.1f} ({each})"


def count_rounds(runs: Sequence[Record], metric: str, target: float) -> Reached:
    """Rounds to a target over the runs of a method."""
    rounds = tuple(first_at(run, metric, target) for run in runs)
    return Reached(target, rounds, min(run.rounds for run in runs))


def mean_best(runs: Sequence[Record], metric: str) -> Floats:
    """The best value so far by round, averaged over runs up to the shortest."""
    shortest = min(run.rounds for run in runs)
    return np.asarray(np.mean([best_so_far(run, metric)[:shortest] for run in runs], axis=0))


def dominance(methods: Mapping[str, Sequence[Record]], metric: str) -> dict[str, float]:
    """The share of rounds in which each method has the best best-so-far value, on average over its runs.

    Methods with equal values share the round.
    """
    sign = sign_of(next(iter(methods.values()))[0], metric)
    curves = {name: sign * mean_best(runs, metric) for name, runs in methods.items()}
    shortest = min(len(curve) for curve in curves.values())
    table = np.nan_to_num(np.array([curve[:shortest] for curve in curves.values()]), nan=-np.inf)
    leads = table == table.max(axis=0)
    shares = (leads / leads.sum(axis=0)).mean(axis=1)
    return dict(zip(curves, shares.tolist(), strict=True))
