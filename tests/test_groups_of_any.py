"""Groups go with every recipe: two rounds each with `cluster=auto`, and what cannot be right is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_every_pair import SMALL

from mutirao.config import resolve
from mutirao.core.arrays import is_finite, part_of
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.fleets.local import LocalFleet
from mutirao.groups.state import Grouping
from mutirao.recipes.agreeing import play
from mutirao.recipes.task import NAMES, Task, find

# Two groups are asked for, so that there are two models whatever the data look like.
TWO = {"cluster": "kmeans", "cluster.groups": 2}


def rounds_of(recipe: str, **settings: Any) -> tuple[Task, Run, list[dict[str, Any]]]:
    found = find(recipe)
    config = resolve(found.config, {**SMALL[recipe], "rounds": 2, **settings})
    task = found.prepare(config)
    run = Run(task.initial(), seed=1)
    fleet = LocalFleet(task.worker, task.population)
    rows = [done.row for done in play(found, fleet, config, task, run)]
    return task, run, rows


@pytest.mark.parametrize("cluster", [{"cluster": "auto"}, TWO], ids=["auto", "two"])
@pytest.mark.parametrize("recipe", list(NAMES))
def test_two_rounds_of_every_recipe(recipe: str, cluster: dict[str, Any]) -> None:
    warm = {} if recipe == "recsys" else {"warm_epochs": 1}
    task, run, rows = rounds_of(recipe, **cluster, **warm)
    assert [row["round"] for row in rows] == [1, 2]
    assert all(row["failed"] == 0 for row in rows)
    state = Grouping.from_memory(run.memory)
    assert state is not None
    assert state.groups.count == rows[-1]["groups"] >= (2 if cluster is TWO else 1)
    assert sorted(c for who in state.groups.members().values() for c in who) == sorted(task.population)
    assert is_finite(run.arrays)
    models = [part_of(run.arrays, group) for group in state.groups.names]
    assert all(models) and sum(map(len, models)) == len(run.arrays)
    assert np.isfinite(rows[-1][task.judge])
    assert set(state.scores) <= set(state.groups.names)
    found = task.exhibits.findings(run) if task.exhibits.findings else {}
    assert found["groups"] == state.groups.members()
