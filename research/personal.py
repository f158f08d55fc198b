"""Personal models beside FedAvg and beside nobody: `python -m research.personal`.

Fifty clients with labels dealt by Dirichlet(0.1), one in ten of them new: it never trains, and adapts to be judged.
All are judged on test samples of their own classes. `alone` is every client by itself, for as many epochs as it trains
in a federation on average. Rates and epochs are the recipe's and the same for all: nothing is tuned.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import summarise
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run
from mutirao.experiments.personal_models import ClientRoles
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.stats import interval, paired
from mutirao.systems.quickstart import Config, recipe

# What is set for each method. FedRep: epochs of the head and then of the body; as 5+5, and as Ditto, it costs twice.
ARMS: dict[str, dict[str, Any]] = {
    "fedper": {"personal": "fedper"},
    "fedrep 4+1": {"personal": "fedrep", "epochs": 1, "personal.epochs": 4},
    "fedrep 5+5": {"personal": "fedrep"},
    "ditto 0.1": {"personal": "ditto", "personal.lam": 0.1},
    "ditto 1": {"personal": "ditto", "personal.lam": 1.0},
    "finetune": {"personal": "finetune"},
}
SETS = {
    "digits": {"data": "digits"},
    "fashion": {"data": "/usr/share/datasets/fashion-mnist", "samples": 100, "lr": 0.05},
}
FIGURES = ("accuracy", "accuracy_worst_decile", "new_accuracy")
SAID = {"accuracy": "mean", "accuracy_worst_decile": "worst decile", "new_accuracy": "new clients"}


def figures(told: Mapping[str, float], new: frozenset[str]) -> dict[str, float]:
    """Mean and worst decile of those who train, and the mean of new ones."""
    known = summarise("accuracy", [v for c, v in told.items() if c not in new])
    strange = summarise("accuracy", [v for c, v in told.items() if c in new])
    return dict(zip(FIGURES, (known["accuracy_mean"], known[FIGURES[1]], strange["accuracy_mean"]), strict=True))


def one(name: str, seed: int, about: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """All methods with one seed; FedAvg's model is that of finetune before anybody adapts it."""
    shared = {"partition": "dirichlet", "partition.alpha": 0.1, **SETS[name], **about, "seed": seed}
    rows: dict[str, dict[str, float]] = {}
    for arm, own in ARMS.items():
        config = resolve(Config, {**shared, "evaluate_every": 10**6, **own, "personal.new": 0.1})
        task = recipe.prepare(config)
        fleet, run = LocalFleet(task.handler, task.population), Run(task.initial(), seed=seed)
        *_, last = recipe.flow(fleet, config, task, run)
        rows[arm] = {figure: last.row[figure] for figure in FIGURES}
    new, trainer = ClientRoles.of(config, task.population).new, task.handler.trainer  # type: ignore[attr-defined]
    rows["fedavg"] = figures(judge(trainer, dict.fromkeys(task.population, run.arrays), task.population), new)
    turns = config.rounds * config.per_round / (len(task.population) - len(new))
    told = {"seed": seed, "round": 1, "epochs": round(turns * config.epochs)}
    sites = {c: Site(c, data) for c, data in task.population.items()}
    grown = trainer.many({c: Request("train", trainer.initial(seed), told) for c in sites}, sites)
    rows["alone"] = figures(judge(trainer, {c: r.arrays for c, r in grown.items()}, task.population), new)
    return rows


def judge(trainer: Any, models: Mapping[str, Any], population: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy of each client's model on its own test data."""
    return {c: judge_with(trainer, arrays, population[c], "accuracy") for c, arrays in models.items()}


def judge_with(trainer: Any, arrays: Arrays, data: Any, metric: str) -> float:
    """One metric of a model on a client's own test data."""
    return float(trainer.evaluate(arrays, data.test)[metric])


def report(rows: Mapping[str, list[dict[str, float]]], arms: Iterable[str], said: Mapping[str, str]) -> Iterator[str]:
    """The table: means with intervals over seeds, and the difference of the first figure from FedAvg's, by seed."""
    first = next(iter(said))
    yield f"| method | {' | '.join(said.values())} | {said[first]} - FedAvg's |"
    yield f"|---|{'---|' * (len(said) + 1)}"
    for arm in arms:
        found = [interval([100 * row[figure] for row in rows[arm]]) for figure in said]
        against = paired(*([100 * row[first] for row in rows[which]] for which in (arm, "fedavg"))).difference
        gap = "" if arm == "fedavg" else f"{against.mean:+.1f} ± {against.half:.1f}"
        yield f"| {arm} | {' | '.join(f'{f.mean:.1f} ± {f.half:.1f}' for f in found)} | {gap} |"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m research.personal", description=__doc__)
    parser.add_argument("--set", choices=list(SETS), default="digits", help="the data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    logging.getLogger("mutirao").setLevel(logging.ERROR)
    rows: dict[str, list[dict[str, float]]] = {}
    start = time.process_time()
    for seed in range(args.seeds):
        for arm, row in one(args.set, seed, {"rounds": args.rounds}).items():
            rows.setdefault(arm, []).append(row)
            shown = {k: round(float(np.float64(v)), 4) for k, v in row.items()}
            print(json.dumps({"seed": seed, "arm": arm, **shown}), flush=True)
    print("\n".join(report(rows, ("fedavg", "alone", *ARMS), SAID)))
    print(f"{time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()
