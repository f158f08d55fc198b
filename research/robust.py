"""What liars cost, by attack and defence: `python -m research.robust --out FOLDER --herlev PICTURES`.

Every cell (recipe, partition, attack, defence, seed) is one federation in process and one line of `cells.jsonl`;
cells that are there are not made again, so that the study can be stopped and continued. Costs are in points (percent
of the recipe's metric) against the same federation in which nobody lies and nothing is screened.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.rounds import Run
from mutirao.errors import Diverged
from mutirao.experiments.task import Task, federate, find
from mutirao.robustness import attacks
from mutirao.robustness.attacks import Attacked, Backdoor, malicious_among
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples, poison
from research.settled import settled_task

CLIENTS, LIARS = 20, 0.3
COMMON = {"clients": CLIENTS, "per_round": CLIENTS, "min_replies": 1, "aggregate": "fedavg"}
LAST = 3  # rounds over whose models a figure is the mean
PARTITIONS: dict[str, Any] = {"iid": "iid", "dirichlet": {"name": "dirichlet", "alpha": 0.3}}
RECIPES: dict[str, dict[str, Any]] = {
    "quickstart": {"rounds": 20},
    "ranking": {"rounds": 15, "lr": 0.1, "queries": 300},
    "cytology": {"rounds": 20, "lr": 0.01, "validation": 0},
}
TARGETS = {"quickstart": Backdoor(target=0), "ranking": Backdoor(target=4, value=4.0), "cytology": Backdoor(value=3.0)}
ATTACKS: dict[str, Any] = {
    "none": None,
    "sign flip": attacks.SignFlip(),
    "noise": attacks.Noise(),
    "constant": attacks.Constant(),
    "label flip": attacks.LabelFlip(),
    "inner product": attacks.InnerProduct(),
    "colluding": attacks.Colluding(),
    "min-max": attacks.MinMax(),
    "min-max, disguised": attacks.MinMax(own=0.5),
    "n inflated": attacks.Inflated(),
    "n inflated, sign flip": attacks.Inflated(scale=-1.0),
    "backdoor": TARGETS,
}
DEFENCES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "screen=robust": {"screen": "robust"},
    "krum": {"aggregate": {"name": "krum", "malicious": 6}},
    "multikrum": {"aggregate": {"name": "multikrum", "malicious": 6, "keep": 12}},
    "fedmedian": {"aggregate": "fedmedian"},
    "fedtrimmedavg": {"aggregate": {"name": "fedtrimmedavg", "beta": 0.3}},
    "rfa": {"aggregate": "rfa"},
    "centeredclipping": {"aggregate": "centeredclipping"},
}
ALONE = "honest alone"  # FedAvg without the liars: what a screen would reach that makes no mistake


class Cell(NamedTuple):
    """One federation of the study."""

    recipe: str
    partition: str
    attack: str
    defence: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of it: the metric, the backdoor's success, and the shares of replies rejected."""

    metric: float
    backdoor: float
    false_rejections: float
    caught: float
    seconds: float


def settings_of(recipe: str, partition: str, seed: int, data: str) -> dict[str, Any]:
    """The settings of a recipe in this study; `data` are the pictures of the cytology recipe."""
    own = {"partition": PARTITIONS[partition], "seed": seed} | ({"data": data} if recipe == "cytology" else {})
    return COMMON | RECIPES[recipe] | own


@lru_cache(maxsize=1)
def task_of(recipe: str, partition: str, seed: int, data: str) -> Task:
    """The task, which all attacks and defences share."""
    config = resolve(find(recipe).config, settings_of(recipe, partition, seed, data))
    return settled_task(config) if recipe == "ranking" else find(recipe).task(config)


def make(cell: Cell, data: str) -> Outcome:
    """Make one federation; a model that diverges is worth nothing."""
    place = cell.recipe, cell.partition, cell.seed, data
    task = task_of(*place)
    config = resolve(find(cell.recipe).config, settings_of(*place) | DEFENCES.get(cell.defence, {}))
    attack = ATTACKS[cell.attack]
    attack = attack[cell.recipe] if isinstance(attack, dict) else attack
    liars = malicious_among(dict.fromkeys(task.population, 0), LIARS, cell.seed)
    if cell.defence == ALONE:
        task, liars = replace(task, population=PopulationWithout(task.population, tuple(liars))), frozenset()
    elif not attack:
        liars = frozenset()
    handler = Attacked(task.handler, liars, attack, poison) if liars else task.handler
    run, began = Run(task.initial(), cell.seed), time.perf_counter()
    figures: list[float] = []
    honest, lied = list[bool](), list[bool]()
    try:
        for done in federate(LocalFleet(handler, task.population), config, task, run):
            figures.append(done.row[task.judge])
            for row in done.clients:
                if row["replied"]:
                    (lied if row["client"] in liars else honest).append(bool(row["rejected"]))
    except Diverged:
        figures = [0.0]
    return Outcome(
        float(np.mean(figures[-LAST:])),
        success(TARGETS[cell.recipe], task, run.arrays, set(task.population) - liars),
        float(np.mean(honest)),
        float(np.mean(lied)) if lied else 0.0,
        round(time.perf_counter() - began, 2),
    )


def success(door: Backdoor, task: Task, model: Arrays, honest: Iterable[str]) -> float:
    """How often the trigger brings the target about, on samples of honest clients that are something else."""
    held = [Samples.of(task.population[c]) for c in sorted(honest)]
    x, y = (np.concatenate([s.batch(slice(0, len(s)))[i].numpy() for s in held]) for i in (0, 1))
    x = door.mark(x[y != door.target])
    return float(task.handler.evaluate(model, Samples(x, np.full(len(x), door.target)))["accuracy"])


def cells(seeds: int, recipes: Iterable[str], defences: Iterable[str]) -> Iterator[Cell]:
    """All cells, seed by seed, so that a study that is stopped has as much of everything; first what losses are to."""
    for seed, recipe, partition in product(range(seeds), recipes, PARTITIONS):
        wanted = product(defences, ATTACKS)
        for defence, attack in dict.fromkeys([(ALONE, "none"), ("fedavg", "none"), *wanted]):
            yield Cell(recipe, partition, attack, defence, seed)


def load(path: Path) -> dict[Cell, Outcome]:
    """The cells made so far; a line that was cut off is left out, and made again."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            read = json.loads(line)
        except ValueError:
            continue
        found[Cell(*read["cell"])] = Outcome(**read["outcome"])
    return found


def main() -> None:
    """Make the cells that are missing, one line each."""
    parser = argparse.ArgumentParser(prog="python -m research.robust", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of cells.jsonl")
    parser.add_argument("--herlev", required=True, help="the folder of the Herlev pictures, for cytology")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--defences", default=",".join(DEFENCES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("mutirao").setLevel(logging.ERROR)  # every rejection is a warning
    path = given.out / "cells.jsonl"
    known = load(path)
    with path.open("a", encoding="utf-8") as lines:
        for cell in cells(given.seeds, given.recipes.split(","), given.defences.split(",")):
            if cell not in known:
                known[cell] = outcome = make(cell, given.herlev)
                print(json.dumps({"cell": cell, "outcome": asdict(outcome)}), file=lines, flush=True)


if __name__ == "__main__":
    main()
