"""Any selection goes with any aggregation and any recipe: each combination makes two rounds."""

import pytest

from mutirao import aggregation, selection
from mutirao.arrays import is_finite
from mutirao.config import resolve
from mutirao.fleets.local import LocalFleet
from mutirao.recipes import NAMES, Task, find
from mutirao.rounds import Run

SMALL = {
    "quickstart": {"clients": 8, "per_round": 4, "epochs": 1},
    "ranking": {"clients": 8, "per_round": 4, "queries": 50},
    "cifar10": {"clients": 4, "per_round": 3, "epochs": 1, "samples": 10, "model": "small"},
}
TASKS: dict[str, Task] = {}


def task_of(recipe: str) -> Task:
    """The task of a recipe, made once: the parts under test do not change it."""
    if recipe not in TASKS:
        TASKS[recipe] = find(recipe).task(resolve(find(recipe).config, SMALL[recipe]))
    return TASKS[recipe]


@pytest.mark.parametrize("aggregate", aggregation.NAMES)
@pytest.mark.parametrize("select", selection.NAMES)
@pytest.mark.parametrize("recipe", NAMES)
def test_two_rounds(recipe: str, select: str, aggregate: str) -> None:
    found, task = find(recipe), task_of(recipe)
    settings = {**SMALL[recipe], "rounds": 2, "select": select, "aggregate": aggregate}
    config = resolve(found.config, settings)
    run = Run(task.initial(), seed=1)
    rounds = list(found.flow(LocalFleet(task.handler, task.population), config, task, run))
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["failed"] == 0 for r in rounds)
    assert is_finite(run.arrays)
    total = sum(r["weight"] for r in rounds[-1].clients)
    assert total > 0 if aggregate == "fedrisk" else total == pytest.approx(1.0)  # 1 - risk need not sum to one
