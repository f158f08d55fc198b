"""DivFL: the greedy cover against slow loops and the best there is, and what an enormous update is worth."""

from itertools import combinations

import numpy as np
import pytest

from choosing import rng, roster_of
from mutirao.core.roster import Roster
from mutirao.selection import DivFL


def updated(vectors: np.ndarray) -> Roster:
    roster = roster_of([f"c{i:02d}" for i in range(len(vectors))])
    roster.mark(1, roster.ids, dict.fromkeys(roster.ids, 10))
    roster.keep("sketch", dict(zip(roster.ids, vectors, strict=True)))
    return roster


def cost(vectors: list[list[float]], chosen: list[int]) -> float:
    """The sum over all of the distance to the nearest chosen, in plain loops."""
    total = 0.0
    for a in vectors:
        total += min(sum((x - y) ** 2 for x, y in zip(a, vectors[j], strict=True)) ** 0.5 for j in chosen)
    return total


def slow_greedy(vectors: list[list[float]], count: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(count):
        others = [j for j in range(len(vectors)) if j not in chosen]
        chosen.append(min(others, key=lambda j: cost(vectors, [*chosen, j])))
    return sorted(chosen)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_the_clients_are_those_of_the_greedy_algorithm(count: int, seed: int) -> None:
    vectors = rng(seed).normal(size=(9, 5)) * rng(seed).uniform(0.2, 3, (9, 1))
    chosen = DivFL(count, clip=1.0, most=0.0)(updated(vectors), 5, rng())
    found = [int(c[1:]) for c in chosen]
    assert found == slow_greedy(vectors.tolist(), count)
    if count < 4:  # the greedy cover is near the best of all subsets
        best = min(cost(vectors.tolist(), list(some)) for some in combinations(range(9), count))
        assert cost(vectors.tolist(), found) <= 1.3 * best


def test_one_of_each_kind_is_taken_by_all_candidates_or_by_some() -> None:
    kinds = np.repeat(np.eye(4), 6, axis=0) + rng(1).normal(0, 0.01, (24, 4))
    for select in (DivFL(4, most=0.0), DivFL(4, candidates=20, most=0.0)):
        chosen = [int(c[1:]) // 6 for c in select(updated(kinds), 5, rng(2))]
        assert sorted(chosen) == [0, 1, 2, 3]
    few = {tuple(DivFL(2, candidates=3)(updated(kinds), 5, rng(seed))) for seed in range(20)}
    assert len(few) > 10  # who is looked at is drawn by lot


def test_strangers_come_first_and_the_rest_is_chosen_for_those_present() -> None:
    roster = updated(np.eye(4))
    roster.meet([*roster.ids, "new"])
    for seed in range(5):
        assert "new" in DivFL(2)(roster, 3, rng(seed))
    roster.meet(["c00", "c02"])
    assert DivFL(2)(roster, 4, rng()) == ["c00", "c02"]
    assert DivFL(3)(roster_of(["ana", "bia"]), 1, rng()) == ["ana", "bia"]


@pytest.mark.parametrize("lie", [1e3, 1e100])
def test_an_enormous_update_is_no_more_than_twice_its_share_of_the_selection(lie: float) -> None:
    draw, times = rng(0), {}
    for clip, most in ((1.0, 0.0), (0.95, 2.0)):
        roster = roster_of([f"c{i:02d}" for i in range(20)])
        for number in range(1, 61):
            chosen = DivFL(4, clip=clip, most=most)(roster, number, draw)
            roster.mark(number, chosen, dict.fromkeys(chosen, 10))
            found = {c: draw.normal(size=6) * (lie if c == "c00" else 1.0) for c in chosen}
            roster.keep("sketch", {c: np.clip(v, -1e100, 1e100) for c, v in found.items()})
        times[most] = int(roster.selected[0])
    assert times[0.0] > 50  # as published it is always in
    assert times[2.0] <= 2 * 60 * 4 / 20
