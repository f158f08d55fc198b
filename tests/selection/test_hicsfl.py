"""HiCS-FL: entropies, distances and clusters against slow ones, and what a false bias is worth."""

import math

import numpy as np
import pytest

from choosing import rng, roster_of
from mutirao.core.roster import Roster
from mutirao.selection import HiCSFL
from mutirao.selection.hicsfl import estimated_entropies, heterogeneity_distances, ward


def moved(count: int, classes: int = 4, seed: int = 1) -> Roster:
    """A roster of clients that moved a bias of so many entries, half of them evenly and half of them not."""
    draw, roster = rng(seed), roster_of([f"c{i:02d}" for i in range(count)])
    roster.mark(1, roster.ids, dict.fromkeys(roster.ids, 10))
    moves = draw.normal(0, 1e-4, (count, classes))
    moves[count // 2 :, 0] += 0.02  # mostly of one class
    roster.keep("bias", dict(zip(roster.ids, moves, strict=True)))
    return roster


def slow_entropy(move: list[float], temperature: float) -> float:
    total = sum(math.exp(x / temperature) for x in move)
    return -sum(math.exp(x / temperature) / total * math.log(math.exp(x / temperature) / total) for x in move)


def slow_distance(a: list[float], b: list[float], temperature: float, balance: float) -> float:
    dot, one, two = (sum(x * y for x, y in zip(p, q, strict=True)) for p, q in ((a, b), (a, a), (b, b)))
    angle = math.acos(max(-1.0, min(1.0, dot / math.sqrt(one * two)))) if a is not b else 0.0
    return angle + balance * abs(slow_entropy(a, temperature) - slow_entropy(b, temperature))


def slow_ward(points: list[list[float]], clusters: int) -> set[frozenset[int]]:
    """Join, again and again, the two clusters whose union adds least to the squared distances from the means."""
    groups = [[i] for i in range(len(points))]

    def spread(group: list[int]) -> float:
        means = [sum(points[i][k] for i in group) / len(group) for k in range(len(points[0]))]
        return sum((points[i][k] - mean) ** 2 for i in group for k, mean in enumerate(means))

    while len(groups) > clusters:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = min(
            pairs, key=lambda p: spread(groups[p[0]] + groups[p[1]]) - spread(groups[p[0]]) - spread(groups[p[1]])
        )
        groups[b] += groups.pop(a)
    return {frozenset(group) for group in groups}


def test_entropies_distances_and_clusters_are_those_of_the_paper() -> None:
    moves = rng(3).normal(0, 0.01, (9, 5))
    found = estimated_entropies(moves, 0.005)
    np.testing.assert_allclose(found, [slow_entropy(row.tolist(), 0.005) for row in moves], rtol=1e-12)
    rows = moves.tolist()
    wanted = [[slow_distance(a, b, 0.005, 10.0) for b in rows] for a in rows]
    apart = heterogeneity_distances(moves, found, 10.0)
    np.testing.assert_allclose(apart, wanted, rtol=1e-9, atol=1e-9)
    for clusters in (1, 2, 4, 9):
        label = ward(apart, clusters)
        groups = {frozenset(np.flatnonzero(label == g).tolist()) for g in set(label.tolist())}
        assert groups == slow_ward(wanted, clusters)


@pytest.mark.slow
@pytest.mark.parametrize(("round", "rounds"), [(1, 10), (6, 10), (10, 10), (3, None)])
def test_clusters_are_drawn_by_their_mean_entropy_ever_more_evenly(round: int, rounds: int | None) -> None:
    """One place, two clusters: how often it goes to the balanced one is known."""
    roster = moved(12)
    select = HiCSFL(1, gamma=1.5, clusters=2, classes=4, rounds=rounds)
    moves = roster.vectors["bias"]
    means = [np.mean([slow_entropy(row, 0.0025) for row in half.tolist()]) for half in (moves[:6], moves[6:])]
    heat = 1.5 * (1 - (round - 1) / rounds if rounds else 1.0)
    share = math.exp(heat * means[0]) / (math.exp(heat * means[0]) + math.exp(heat * means[1]))
    draw, balanced = rng(2), 0
    for _ in range(2000):
        balanced += int(select(roster, round, draw)[0][1:]) < 6
    assert balanced / 2000 == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 2000))


def test_everybody_takes_part_once_before_clusters_are_made_and_one_that_never_replies_not_for_ever() -> None:
    roster, seen, source = roster_of([f"c{i}" for i in range(8)]), list[str](), rng(4)
    for number in range(1, 9):
        chosen = HiCSFL(2, classes=3)(roster, number, source)
        replied = [c for c in chosen if c != "c0"]
        roster.mark(number, chosen, dict.fromkeys(replied, 5))
        roster.keep("bias", {c: source.normal(0, 0.01, 3) for c in replied})
        seen += chosen
    assert set(seen[:8]) == set(roster.ids)
    assert seen.count("c0") < 4


def test_as_many_as_there_are_can_be_selected() -> None:
    for count in (1, 5, 11, 12, 1.0):
        chosen = HiCSFL(count, classes=4, most=0.0)(moved(12), 3, rng(1))
        assert len(set(chosen)) == len(chosen) == (12 if isinstance(count, float) else count)


@pytest.mark.parametrize("lie", [0.0, 1e100, -1e100])
def test_a_false_bias_does_not_own_the_selection(lie: float) -> None:
    """A client that always claims perfect balance, or something absurd, among nineteen with few classes each."""
    roster, draw = roster_of([f"c{i:02d}" for i in range(20)]), rng(0)
    for number in range(1, 61):
        chosen = HiCSFL(5, classes=4)(roster, number, draw)
        roster.mark(number, chosen, dict.fromkeys(chosen, 10))
        honest = {c: draw.normal(0, 1e-3, 4) + 0.01 * np.eye(4)[int(c[1:]) % 4] for c in chosen}
        roster.keep("bias", honest | ({"c00": np.full(4, lie)} if "c00" in chosen else {}))
    assert np.isfinite(estimated_entropies(roster.vectors["bias"], 0.0025)).all()
    assert roster.selected[0] <= 2 * 60 * 5 / 20  # twice its fair share at most
    assert roster.selected[1:].min() > 0
