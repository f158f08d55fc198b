"""CFL: when a group is parted and how, against all ways there are to part it."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.clustering.cfl import Cfl, bipartition, cosines_of, stillness
from mutirao.clustering.group_state import Grouping
from mutirao.config import resolve
from mutirao.core.arrays import flat, part_of
from mutirao.core.rounds import Run
from mutirao.experiments.task import find
from mutirao.simulation.local_fleet import LocalFleet

RECIPE = find("groups")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.integers(2, 8))
def test_of_all_ways_to_part_a_group_the_largest_cosine_across_is_least(seed: int, n: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(n, 5))
    cosines = cosines_of(updates)
    by_hand = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in updates] for a in updates]
    assert cosines == pytest.approx(np.array(by_hand))
    one = bipartition(cosines)
    ways = [set(some) for size in range(1, n) for some in combinations(range(n), size)]
    across = [max(cosines[i, j] for i in way for j in range(n) if j not in way) for way in ways]
    assert cosines[np.ix_(one, ~one)].max() == pytest.approx(min(across))


def test_a_group_is_parted_where_its_mean_stands_still_and_its_clients_do_not() -> None:
    updates, sizes = np.array([[3.0, 0.1], [3.0, -0.1], [-2.0, 0.0]]), np.array([1.0, 1.0, 3.0])
    mean, longest = stillness(updates, sizes)
    assert (mean, longest) == pytest.approx((0.0, np.hypot(3, 0.1)))
    assert stillness(updates, np.ones(3))[0] == pytest.approx(4 / 3)
    parted = Cfl(eps1=0.4, eps2=1.6).part(updates, sizes)
    assert parted is not None
    assert parted[0] == parted[1] != parted[2]
    assert Cfl(eps1=0.4, eps2=1.6).part(updates, np.ones(3)) is None  # all together they still move
    assert Cfl(eps1=0.4, eps2=4.0).part(updates, sizes) is None  # nobody wants to go anywhere
    assert Cfl(gamma=0.99).part(updates, sizes) is not None  # sqrt((1 + 1) / 2), nearly
    assert Cfl(gamma=0.9999).part(updates, sizes) is None
    with pytest.raises(ValueError, match=r"^eps2 is -1"):
        Cfl(eps2=-1)


def make(**more: Any) -> tuple[Run, list[Any]]:
    small = {"clients": 8, "epochs": 2, "judge_samples": 20, "per_round": 1.0, "seed": 1, **more}
    config = resolve(RECIPE.config, {"partition": {"name": "by_class", "classes": 5}, "head": "full", **small})
    task = RECIPE.prepare(config)
    run = Run(task.initial(), config.seed)
    return run, list(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run))


def test_clients_of_two_kinds_are_parted_and_each_part_goes_on_by_itself() -> None:
    run, rounds = make(cluster={"name": "cfl", "eps1": 99.0, "eps2": 0.0, "rounds": 1}, rounds=2)
    assert [done.row["groups"] for done in rounds] == [1, 2]
    assert rounds[-1].row["rand"] == 1.0
    state = Grouping.from_memory(run.memory)
    assert state is not None
    one, two = (flat(part_of(run.arrays, g)) for g in state.groups.names)
    whole, again = make(cluster="one", rounds=2)
    mean = flat(part_of(whole.arrays, "g0"))
    sizes = [sum(r["n"] for r in again[-1].clients if r["client"] in who) for who in state.groups.members().values()]
    assert (sizes[0] * one + sizes[1] * two) / sum(sizes) == pytest.approx(mean, abs=1e-5)  # parts of the same round
    assert np.linalg.norm(one - two) > 0.1
