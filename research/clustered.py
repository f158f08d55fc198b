"""Groups beside their rivals: `python -m research.clustered --out FOLDER --data digits,fashion,cifar --seeds 3`.

Every cell (data, case, method, seed) is one federation in process and one line of `cells.jsonl`; cells that are there
are not made again. All methods have the same clients, network, local epochs, rates and rounds, everybody takes part in
every round, and all heads have all classes. What a rival has to be told, it is told right: IFCA, PACFL and FedClust how
many groups there are. CFL's eps, one for both of its conditions, is chosen by clients' validation accuracy in a
federation of another seed. `--tables` prints what is there.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mutirao.config import resolve
from mutirao.core.arrays import part_of
from mutirao.core.client_evaluation import summarise
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run
from mutirao.experiments.task import Recipe, Task, find
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.quickstart import Config as Ordinary
from mutirao.training.samples import own_test_samples

GROUPS = find("groups")
ROUNDS, AT = 10, 6  # rounds, and the one in which half of the clients get others' data where they drift
COMMON = {"rounds": ROUNDS, "per_round": 1.0, "head": "full", "evaluate_every": ROUNDS, "clients_every": ROUNDS}
COMMON |= {"references": 0, "hold": 0.0}  # as they are, and nothing kept back
DATA: dict[str, dict[str, Any]] = {
    "digits": {"clients": 30, "judge_samples": 40},  # more, and so few test samples would not have clients' own mix
    "fashion": {"data": "fashion-mnist", "clients": 20, "samples": 100, "judge_samples": 100, "epochs": 2, "lr": 0.02},
    "cifar": {"data": "cifar10", "clients": 20, "samples": 100, "judge_samples": 100, "epochs": 2, "lr": 0.02},
}
CASES: dict[str, dict[str, Any]] = {
    "two classes": {},
    "skewed": {"hidden": "skewed"},
    "permuted": {"hidden": "permuted"},
    "rotated": {"hidden": "rotated"},
    "drifting": {"drift": "swap", "drift.at": AT},
}
TOLD = 5  # groups, in all cases
METHODS: dict[str, dict[str, Any]] = {
    "ours, bias": {"cluster": "auto"},
    "ours, projection": {"cluster": "auto", "signature": "projection", "warm_epochs": 40},
    "IFCA": {"cluster": "ifca", "cluster.groups": TOLD},
    "CFL": {"cluster": "cfl"},
    "PACFL": {"cluster": "pacfl", "cluster.groups": TOLD, "cluster.angle": "sum"},
    "FedClust": {"cluster": "fedclust", "cluster.groups": TOLD},
    "one model": {"cluster": "one", "warm_epochs": 1},
    "fine-tuned": {},
    "FedPer": {},
    "alone": {"cluster": "alone"},
}
REGROUPS = {"ours, bias", "ours, projection", "PACFL", "FedClust"}  # by signatures, which are asked for anew
EPS = (0.5, 1.0, 2.0, 4.0)  # tried for CFL
OTHER = 1000  # the seed of the federations in which it is chosen


class Cell(NamedTuple):
    """One federation of the study."""

    data: str
    case: str
    method: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Adjusted Rand and groups at the end, clients' accuracy on their own test data, and bytes of all rounds."""

    rand: float
    groups: float
    mean: float
    worst: float  # of the decile that is served worst
    up: float
    down: float
    seconds: float
    note: str = ""


def settings_of(cell: Cell) -> dict[str, Any]:
    """The settings of a federation; where data drift, groups that can be formed anew are, right after the change."""
    own = {"seed": cell.seed, **COMMON, **DATA[cell.data], **CASES[cell.case], **METHODS[cell.method]}
    return own | ({"regroup": AT} if cell.case == "drifting" and cell.method in REGROUPS else {})


def federate(settings: Mapping[str, Any]) -> tuple[Task, Run]:
    """Make a federation of the groups recipe."""
    config = resolve(GROUPS.config, {}, list(settings.items()))
    task = GROUPS.prepare(config)
    run = Run(task.initial(), config.seed)
    for _ in GROUPS.flow(LocalFleet(task.handler, task.population), config, task, run):
        pass
    return task, run


def make(cell: Cell) -> Outcome:
    """Make one federation and sum it up."""
    began, note, settings = time.perf_counter(), "", settings_of(cell)
    if cell.method == "FedPer":
        run = keep_heads(settings)
    elif cell.method == "CFL":
        eps = best_eps(cell.data, cell.case)
        note = f"eps {eps:g}"
        _, run = federate(settings | {"cluster.eps1": eps, "cluster.eps2": eps})
    elif cell.method == "fine-tuned":
        task, run = federate(settings | METHODS["one model"])
        run.history[-1] |= summarise("accuracy", fine_tune(settings, task, run))
    else:
        _, run = federate(settings)
    last = run.history[-1]
    up, down = (float(sum(row[name] for row in run.history)) for name in ("bytes_up", "bytes_down"))
    if cell.method == "alone":
        up = down = 0.0  # nothing has to travel
    grouped = cell.method not in ("fine-tuned", "FedPer")
    return Outcome(
        float(last["rand"]) if grouped else float("nan"),
        float(last["groups"]) if grouped else float("nan"),
        float(last.get("accuracy_mean", last["accuracy"])),  # personal models have the one name
        float(last["accuracy_worst_decile"]),
        up,
        down,
        round(time.perf_counter() - began, 1),
        note,
    )


def fine_tune(settings: Mapping[str, Any], task: Task, run: Run) -> list[float]:
    """The accuracy of each client after as many epochs on its own data as a round has, from the model of all."""
    config, model = resolve(GROUPS.config, {}, list(settings.items())), part_of(run.arrays, "g0")
    trainer = task.knows.member.trainers(task.classes)
    told = {"seed": config.seed, "round": ROUNDS + 1}
    out = []
    for client in sorted(task.population):
        data = present(config, task, client)
        grown = trainer(Request("train", model, told), Site(client, data, {})).arrays
        out.append(float(trainer.evaluate(grown, own_test_samples(data))["accuracy"]))
    return out


def present(config: Any, task: Task, client: str) -> Any:
    """What a client holds at the end."""
    from mutirao.config import build
    from mutirao.simulation.drift import DriftContext

    around = DriftContext(task.population, config.seed, task.classes)
    return build("drift", config.drift)(client, task.population[client], ROUNDS, around)


def keep_heads(settings: Mapping[str, Any]) -> Run:
    """FedPer on the same clients: one body for all, and each client keeps its last layer."""
    config = resolve(GROUPS.config, {}, [*settings.items(), ("cluster", "one")])
    dealt = GROUPS.task(config)
    member = dealt.knows.member
    task = Task(member.trainers(dealt.classes), dealt.population, dealt.initial, classes=dealt.classes)
    names = ("seed", "rounds", "clients", "epochs", "lr", "batch_size", "clients_every", "evaluate_every")
    shared = {name: getattr(config, name) for name in names} | {k: v for k, v in settings.items() if "drift" in k}
    own = {"per_round": config.clients, "personal": "fedper"}
    ordinary = resolve(Ordinary, {}, list((shared | own).items()))
    recipe = Recipe(Ordinary, lambda _: task)
    ready = recipe.prepare(ordinary)
    run = Run(ready.initial(), config.seed)
    for _ in recipe.flow(LocalFleet(ready.handler, ready.population), ordinary, ready, run):
        pass
    return run


@lru_cache(maxsize=64)
def best_eps(data: str, case: str) -> float:
    """The eps of CFL with which clients of another seed do best, on what they keep back for it."""
    settings = settings_of(Cell(data, case, "CFL", OTHER)) | {"judge_by": "vali"}
    found = {e: federate(settings | {"cluster.eps1": e, "cluster.eps2": e})[1].history[-1]["accuracy"] for e in EPS}
    return max(found, key=lambda e: found[e])


def cells(data: list[str], cases: list[str], methods: list[str], seeds: int) -> Iterator[Cell]:
    """All cells, seed by seed, so that a study that is stopped has as much of everything."""
    for name, seed, case, method in product(data, range(seeds), cases, methods):
        yield Cell(name, case, method, seed)


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


def tables(known: Mapping[Cell, Outcome]) -> Iterator[str]:
    """One table a data set: a row a method, and for each case Rand, mean and worst decile, in percent."""
    for data in dict.fromkeys(cell.data for cell in known):
        cases = [c for c in CASES if any(cell[:2] == (data, c) for cell in known)]
        yield f"**{data}**\n"
        yield "| | " + " | ".join(cases) + " | MB up | MB down |"
        yield "| --- |" + " ---: |" * (len(cases) + 2)
        for method in METHODS:
            rows = {c: [o for cell, o in known.items() if cell[:3] == (data, c, method)] for c in cases}
            if any(rows.values()):
                every = [o for c in cases for o in rows[c]]
                bytes_ = [f"{np.mean([getattr(o, k) for o in every]) / 1e6:.1f}" for k in ("up", "down")]
                yield f"| {method} | " + " | ".join([*(entry(rows[c]) for c in cases), *bytes_]) + " |"
        counts = {c: len({cell.seed for cell in known if cell[:2] == (data, c)}) for c in cases}
        yield "| seeds | " + " | ".join(str(counts[c]) for c in cases) + " | | |\n"


def entry(rows: list[Outcome]) -> str:
    """Mean accuracy, the worst decile and adjusted Rand, means over seeds."""
    if not rows:
        return ""
    mean, worst, rand = (np.mean([getattr(o, k) for o in rows]) for k in ("mean", "worst", "rand"))
    return f"{100 * mean:.1f}, {100 * worst:.1f}" + ("" if np.isnan(rand) else f" ({round(rand, 2) + 0.0:.2f})")


def main() -> None:
    """Make the cells that are missing, one line each; or print what is there."""
    parser = argparse.ArgumentParser(prog="python -m research.clustered", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of cells.jsonl")
    for name, table in (("data", DATA), ("cases", CASES), ("methods", METHODS)):
        parser.add_argument(f"--{name}", default=",".join(table) if name != "methods" else ";".join(table))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there")
    given = parser.parse_args()
    logging.getLogger("mutirao").setLevel(logging.ERROR)
    path = given.out / "cells.jsonl"
    known = load(path)
    if given.tables:
        print("\n".join(tables(known)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = given.data.split(","), given.cases.split(","), given.methods.split(";")
    with path.open("a", encoding="utf-8") as lines:
        for cell in cells(*chosen, given.seeds):
            if cell not in known:
                known[cell] = outcome = make(cell)
                print(json.dumps({"cell": cell, "outcome": asdict(outcome)}), file=lines, flush=True)


if __name__ == "__main__":
    main()
