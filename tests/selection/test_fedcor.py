"""FedCor: the process and the greedy choice against slow ones, and what a false loss is worth."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from choosing import rng, roster_of
from mutirao.core.arrays import Arrays
from mutirao.core.roster import Roster
from mutirao.selection import FedCor, fedcor
from mutirao.selection.fedcor import NOISE, covariance, fit_points, likelihood_gradient, most_informative


def slow_covariance(points: np.ndarray) -> np.ndarray:
    out = np.zeros((points.shape[1], points.shape[1]))
    for i, a in enumerate(points.T):
        for j, b in enumerate(points.T):
            out[i, j] = sum(x * y for x, y in zip(a, b, strict=True)) + (NOISE**2 if i == j else 0.0)
    return out


def likelihood(points: np.ndarray, changes: np.ndarray) -> float:
    return float(multivariate_normal(np.zeros(len(changes)), slow_covariance(points)).logpdf(changes))


def test_the_likelihood_moves_with_the_points_as_scipys_does() -> None:
    points, changes = rng(1).normal(size=(3, 5)) * 0.5, rng(2).normal(size=5) * 0.3
    np.testing.assert_allclose(covariance(points), slow_covariance(points), rtol=1e-12)
    found, tiny = likelihood_gradient(points, changes), 1e-5
    for i in range(3):
        for j in range(5):
            more, less = points.copy(), points.copy()
            more[i, j] += tiny
            less[i, j] -= tiny
            numeric = (likelihood(more, changes) - likelihood(less, changes)) / (2 * tiny)
            assert found[i, j] == pytest.approx(numeric, rel=1e-3, abs=1e-3)


def test_learning_makes_the_changes_likelier_and_finds_who_goes_together() -> None:
    """Six clients of two kinds whose losses change together; one is not seen every time."""
    draw = rng(3)
    common = draw.normal(size=(12, 2)) * 0.3
    changes = np.repeat(common, 3, axis=1) + draw.normal(size=(12, 6)) * 0.01
    changes[::4, 5] = np.nan
    start = draw.normal(size=(4, 6)) / 2
    points = fit_points(start, changes, np.ones(12), 3000)
    seen = [(row[~np.isnan(row)], ~np.isnan(row)) for row in changes]
    before, after = (sum(likelihood(p[:, k], row) for row, k in seen) for p in (start, points))
    assert after > before + 50
    sigma = covariance(points)
    scale = np.sqrt(np.diag(sigma))
    alike = sigma / np.outer(scale, scale)
    assert alike[:3, :3].min() > 0.9
    assert alike[3:, 3:].min() > 0.9


def slow_choice(sigma: np.ndarray, weights: np.ndarray, discount: np.ndarray, count: int) -> list[int]:
    """At each step the covariance of all given those chosen so far, worked out afresh by the textbook formula."""
    chosen: list[int] = []
    for _ in range(count):
        given = sigma
        if chosen:
            inside = sigma[np.ix_(chosen, chosen)]
            given = sigma - sigma[:, chosen] @ np.linalg.solve(inside, sigma[chosen])
        best, most = -1, -np.inf
        for k in range(len(sigma)):
            gain = discount[k] * sum(w * given[i, k] for i, w in enumerate(weights)) / max(given[k, k], 1e-300) ** 0.5
            if k not in chosen and gain > most:
                best, most = k, gain
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_clients_are_chosen_as_by_the_posterior_of_the_textbook(seed: int) -> None:
    draw = rng(seed)
    sigma = slow_covariance(draw.normal(size=(6, 8)))
    weights, discount = draw.dirichlet(np.ones(8)), 0.9 ** draw.integers(0, 4, 8)
    found = most_informative(sigma, weights, discount, np.arange(8), 4)
    assert found.tolist() == slow_choice(sigma, weights, discount, 4)
    assert set(most_informative(sigma, weights, discount, np.array([1, 5, 6]), 2).tolist()) <= {1, 5, 6}


def live(select: FedCor, rounds: int, lie: float | None = None) -> tuple[Roster, Arrays]:
    """So many rounds of clients of two kinds, whose losses fall and wander together; the first may tell lies."""
    roster, memory, draw = roster_of([f"c{i:02d}" for i in range(16)]), dict[str, np.ndarray](), rng(0)
    loss = np.full(16, 2.0)
    for number in range(1, rounds + 1):
        loss = np.abs(loss + np.repeat(draw.normal(-0.02, 0.1, 2), 8) + draw.normal(0, 0.01, 16))
        for c in select.probes(roster, number, draw):
            told = float(loss[roster.row(c)]) if c != "c00" or lie is None else lie * draw.random()
            roster.hear(number, c, {"loss": told})
            roster.probed(number, {c: 10})
        chosen = select(roster, number, draw, memory)
        roster.mark(number, chosen, dict.fromkeys(chosen, 10))
    return roster, memory


def test_everybody_is_probed_while_it_learns_and_then_in_two_rounds_of_each_interval() -> None:
    roster, select = roster_of(["ana", "bia"]), FedCor(1, warmup=4, interval=5)
    asked = [number for number in range(1, 17) if select.probes(roster, number, rng())]
    assert asked == [1, 2, 3, 4, 5, 9, 10, 14, 15]
    assert [number for number in range(1, 17) if select.learns(number)] == [5, 10, 15]


def test_both_kinds_are_chosen_and_a_newcomer_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcor, "STEPS", 60)
    select = FedCor(2, warmup=12, interval=5, most=0.0)
    roster, memory = live(select, 13)
    before = {k: v.copy() for k, v in memory.items()}
    chosen = select(roster, 14, rng(1), memory)
    assert sorted(int(c[1:]) // 8 for c in chosen) == [0, 1]  # after one of a kind the others have little to tell
    assert select(roster, 14, rng(2), before) == chosen  # by what is remembered alone
    roster.meet(["aaa", *roster.ids])
    for number in (15, 16):  # nothing is known of it until the process is learnt again: the others are chosen as before
        assert select(roster, number, rng(1), memory) == chosen


def test_a_round_that_is_selected_for_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcor, "STEPS", 5)
    select = FedCor(2, warmup=2)
    roster, memory = live(select, 2)
    roster.probed(3, dict.fromkeys(roster.ids, 10))
    select(roster, 3, rng(1), memory)
    kept = {k: v.tobytes() for k, v in memory.items()}
    select(roster, 3, rng(2), memory)
    assert kept == {k: v.tobytes() for k, v in memory.items()}


@pytest.mark.parametrize("lie", [1e3, 1e99])
def test_a_false_loss_does_not_own_the_selection(lie: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcor, "STEPS", 20)
    roster, memory = live(FedCor(4, warmup=6, interval=5), 60, lie)
    assert np.isfinite(memory["fedcor.points"]).all()
    assert roster.selected[0] <= 2 * 60 * 4 / 16  # twice its fair share at most
    assert roster.selected.min() > 0
