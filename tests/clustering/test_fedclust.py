"""FedClust: distances between last layers, and newcomers with the nearest."""

import numpy as np
import pytest

from mutirao.clustering.fedclust import Fedclust
from mutirao.clustering.group_state import Grouping
from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.experiments.task import find
from mutirao.simulation.local_fleet import LocalFleet


def test_distances_are_those_between_the_weights_of_the_last_layers() -> None:
    draw = np.random.default_rng(0)
    before = {"2.weight": draw.normal(size=(3, 4)), "2.bias": draw.normal(size=3)}
    after = [{k: draw.normal(size=v.shape) for k, v in before.items()} for _ in range(5)]
    part = Fedclust(threshold=2.0)
    points = np.stack([part.signature(before, a, "2") for a in after])
    by_hand = [[np.linalg.norm(a["2.weight"] - b["2.weight"]) for b in after] for a in after]
    assert part.measure(points) == pytest.approx(np.array(by_hand))


@pytest.mark.parametrize("cluster", ["fedclust", "pacfl"])
def test_groups_of_a_run_are_found_and_a_newcomer_joins_the_nearest(cluster: str) -> None:
    recipe = find("groups")
    small = {"clients": 10, "rounds": 2, "epochs": 1, "warm_epochs": 4, "judge_samples": 20, "per_round": 1.0}
    part = {"name": cluster, "groups": 2}
    partition = {"name": "by_class", "classes": 5}
    config = resolve(recipe.config, {**small, "partition": partition, "cluster": part, "founders": 9, "wait": 0.0})
    task = recipe.prepare(config)
    fleet = LocalFleet(task.handler, task.population)
    late, run = max(task.population), Run(task.initial(), 0)
    everybody, fleet.clients = fleet.clients, lambda: [c for c in everybody() if run.round or c != late]  # type: ignore[method-assign]
    rounds = list(recipe.flow(fleet, config, task, run))
    assert [done.row["rand"] for done in rounds] == [1.0, 1.0]
    state = Grouping.from_memory(run.memory)
    assert state is not None
    assert late in state.groups.admitted
    assert "holdings" in recipe.disclosure(config, task).extras
