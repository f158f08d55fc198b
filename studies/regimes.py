"""Where age or entropy helps: policies against random selection in eleven regimes, as tables and one picture.

    python studies/regimes.py runs/regimes --seeds 20           # makes what is not there yet, then page and picture
    python studies/regimes.py runs/regimes --only rare,sizes

A regime is a study file and settings more, all chosen before any result was looked at. Each policy is held against
random selection seed by seed, by three figures of a run:

- `final`, the mean accuracy of the last ten rounds, of those that ended within half of random's simulated seconds
  where devices are slow;
- `worst`, the mean over the same rounds of the accuracy of the tenth of the clients that fare worst;
- `sooner`, how much of random's rounds (of its simulated seconds, where devices are slow) is saved on the way to 95% of
  random's final accuracy, as the mean of five rounds; a run that never gets there counts as one round more than it had.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import parse_assignment
from mutirao.core.files import write_whole

from mutirao.runs.reader import Record
from mutirao.stats import Comparison, holm, paired
from mutirao.studies.participation import values
from mutirao.studies.policies import markdown
from mutirao.studies.study import carry_out, read_study, results

HERE = Path(__file__).parent
PAGE, PICTURE = HERE.parent / "docs/reproductions/selection-regimes.md", HERE.parent / "docs/images/selection-regimes.png"
ROUNDS, LAST, SMOOTH, NEAR = 10, 20, 5, 0.95
BASE, SLOW = "selection-regimes.toml", "selection-slow.toml"


@dataclass(frozen=True)
class Regime:
    """A study file, the settings that make it this case, and what to call it."""

    title: str
    sets: tuple[str, ...] = ()
    file: str = BASE


REGIMES = {
    "ordinary": Regime("ordinary: Dirichlet 0.5"),
    "labels": Regime("labels: Dirichlet 0.1", ("partition.alpha=0.1",)),
    "sizes": Regime("sizes: 1 to 300", ("partition=quantity", "partition.beta=0.5", "clients=40", "per_round=4")),
    "rare": Regime("rare classes", ("partition=rare", "partition.classes=2", "partition.holders=3")),
    "late": Regime(
        "classes that come late",
        (
            "partition=by_class",
            "partition.classes=1",
            "partition.order=sorted",
            "available=schedule",
            "available.file=studies/late-classes.csv",
        ),
    ),
    "churn": Regime("churn: a fifth is there", ("available=markov", "available.leave=0.2", "available.come=0.05")),
    "daily": Regime("day and night", ("available=daily", "available.share=0.3", "available.spread=0.5")),
    "drift": Regime("drift: data change hands", ("drift=swap", "drift.at=30", "drift.share=1.0", "drift.over=50")),
    "few": Regime("2 of 100 a round", ("per_round=2",)),
    "many": Regime("30 of 100 a round", ("per_round=30",)),
    "slow": Regime("slow devices, by time", (), SLOW),
}
FIGURES = {"final": "accuracy", "worst": "worst decile", "sooner": "sooner"}
Runs = dict[str, dict[int, Record]]  # by policy and seed


def make(regime: Regime, out: Path, seeds: int, sets: Sequence[str]) -> Runs:
    """Make the runs that are missing, and read all that are finished."""
    told = [parse_assignment(text) for text in (*regime.sets, *sets, f"seeds={seeds}")]
    study = read_study(HERE / regime.file, told)
    for problem in carry_out(study, out, start="here"):
        print(f"not finished: {problem}")
    runs: Runs = {method: {} for method in study.methods}
    for cell, record in results(study, out):
        runs[cell.method][dict(cell.place)["seed"]] = record
    return {method: found for method, found in runs.items() if found}


def clock(record: Record) -> np.ndarray[Any, Any]:
    """What has been spent after each round: simulated seconds if devices have speeds, else rounds."""
    return np.cumsum([row.get("sim_seconds", 1.0) for row in record.rows])


def end_of(record: Record, metric: str, budget: float) -> float:
    """The mean of the last rounds that are over when the budget is."""
    known = np.array(values(record, metric))[clock(record) <= budget]
    return float(np.nanmean(known[-ROUNDS:])) if len(known) else math.nan


def spent_to(record: Record, target: float) -> float:
    """What it took until the mean of some rounds is at the target; one round more than all if it never is."""
    curve, spent = np.array(values(record, "accuracy")), clock(record)
    smooth = np.convolve(curve, np.full(SMOOTH, 1 / SMOOTH), "valid")
    there = np.flatnonzero(smooth >= target)
    return float(spent[there[0] + SMOOTH - 1]) if len(there) else float(spent[-1] + spent[-1] / len(spent))


def figures_of(runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Each figure by policy and seed."""
    timed = any("sim_seconds" in record.rows[0] for record in runs["random"].values())
    budgets = {seed: clock(record)[-1] * (0.5 if timed else 1.0) for seed, record in runs["random"].items()}
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, metric in (("final", "accuracy"), ("worst", "accuracy_worst_decile")):
        found[name] = {
            m: {s: end_of(r, metric, budgets[s]) for s, r in of.items() if s in budgets} for m, of in runs.items()
        }
    target = NEAR * float(np.mean(list(found["final"]["random"].values())))
    spent = {m: {s: spent_to(r, target) for s, r in of.items()} for m, of in runs.items()}
    usual = float(np.mean(list(spent["random"].values())))
    found["sooner"] = {m: {s: -value / usual for s, value in of.items()} for m, of in spent.items()}
    return found


def gains(found: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Each policy against random selection, seed by seed."""
    base = found["random"]
    pairs = {m: sorted({*of} & {*base}) for m, of in found.items() if m != "random"}
    return {m: paired([found[m][s] for s in seeds], [base[s] for s in seeds]) for m, seeds in pairs.items() if seeds}
