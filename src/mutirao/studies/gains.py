"""What a policy gains over random selection: three figures of a run, compared seed by seed.

- `final`, the mean accuracy of the last ten rounds; where devices have speeds, of the last ten that ended within half
  of the simulated seconds that random selection took for all of its rounds;
- `worst`, over the same rounds, the mean accuracy of the tenth of the clients that fare worst;
- `sooner`, the share of random's rounds (or simulated seconds) that is saved on the way to 95% of its final accuracy,
  by the mean of five rounds; a run that never gets there counts as one round more than all of random's.

A single crossing rewards curves that swing, hence the means.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mutirao.runs.reader import Record
from mutirao.stats import Comparison, holm, paired
from mutirao.studies.participation import values

BASELINE = "random"
LAST, SMOOTH, NEAR = 10, 5, 0.95
FIGURES = ("final", "worst", "sooner")

Runs = Mapping[str, Mapping[int, Record]]  # by policy and seed
Gains = dict[str, dict[tuple[str, str], Comparison]]  # by figure, then by case and policy


def clock(record: Record) -> npt.NDArray[np.float64]:
    """What has been spent after each round: simulated seconds if devices have speeds, else rounds."""
    return np.cumsum([row.get("sim_seconds", 1.0) for row in record.rows])


def end_of(record: Record, metric: str, budget: float) -> float:
    """The mean of the last rounds that are over when the budget is."""
    known = np.array(values(record, metric))[clock(record) <= budget]
    return float(np.nanmean(known[-LAST:])) if len(known) else math.nan


def spent_to(record: Record, target: float, never: float) -> float:
    """What it took until the mean of some rounds is at the target; `never` if it never is."""
    smooth = np.convolve(values(record, "accuracy"), np.full(SMOOTH, 1 / SMOOTH), "valid")
    there = np.flatnonzero(smooth >= target)
    return float(clock(record)[there[0] + SMOOTH - 1]) if len(there) else never


def figures_of(runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Each figure by policy and seed, of the seeds that random selection has."""
    base = runs[BASELINE]
    timed = any("sim_seconds" in record.rows[0] for record in base.values())
    whole = {seed: float(clock(record)[-1]) for seed, record in base.items()}
    budgets = {seed: total / 2 if timed else total for seed, total in whole.items()}
    both = {m: {s: record for s, record in of.items() if s in base} for m, of in runs.items()}
    found = {
        name: {m: {s: end_of(r, metric, budgets[s]) for s, r in of.items()} for m, of in both.items()}
        for name, metric in (("final", "accuracy"), ("worst", "accuracy_worst_decile"))
    }
    target = NEAR * float(np.mean(list(found["final"][BASELINE].values())))
    more = {s: total * (1 + 1 / base[s].rounds) for s, total in whole.items()}
    spent = {m: {s: spent_to(r, target, more[s]) for s, r in of.items()} for m, of in both.items()}
    usual = float(np.mean(list(spent[BASELINE].values())))
    return found | {"sooner": {m: {s: -value / usual for s, value in of.items()} for m, of in spent.items()}}


def gains(found: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Each policy against random selection, seed by seed."""
    base = found[BASELINE]
    return {m: paired([*of.values()], [base[s] for s in of]) for m, of in found.items() if m != BASELINE and of}


def compare_all(made: Mapping[str, Runs]) -> Gains:
    """All gains of all cases."""
    tables = {name: figures_of(runs) for name, runs in made.items()}
    return {
        figure: {(name, m): found for name in tables for m, found in gains(tables[name][figure]).items()}
        for figure in FIGURES
    }


def shown_of(found: Mapping[tuple[str, str], Comparison]) -> frozenset[tuple[str, str]]:
    """The gains that are beyond chance: Student's p below 0.05 after Holm's correction over all of one figure."""
    at = {f"{i}": key for i, key in enumerate(found)}
    corrected = holm({i: found[key].p_t for i, key in at.items() if not math.isnan(found[key].p_t)})
    return frozenset(at[i] for i, p in corrected.items() if p < 0.05)
