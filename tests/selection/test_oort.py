"""Oort: utility, newcomers, pace and blacklist."""

import math

import numpy as np
import pytest

from choosing import known_to, rng, roster_of, selections
from mutirao.errors import ConfigError
from mutirao.selection import Oort


def test_oort_divides_the_places_between_new_and_known_clients() -> None:
    roster = known_to([1.0] * 20, new=20)
    new = [sum(c.startswith("n") for c in Oort(10)(roster, t, rng(t))) for t in (1, 11, 1000)]
    assert new == [9, 7, 2]  # 0.9, 0.9 * 0.98^10 = 0.735 and at least 0.2 of ten, rounded down
    assert len(Oort(10)(known_to([1.0] * 3, new=20), 1000, rng())) == 10
    assert len(Oort(10)(known_to([1.0] * 30), 1, rng())) == 10


def test_oorts_utility_is_that_of_the_paper() -> None:
    roster = known_to([1.0, 2.0, 3.0, 4.0], at=3)
    roster.n[:] = [40, 10, 10, 10]
    found = Oort(2, clip=1.0).utility(roster, 9, np.arange(4))
    np.testing.assert_allclose(found, np.array([1, 0, 1 / 2, 1]) + np.sqrt(0.1 * np.log(9) / 3))
    roster.figures |= {"ready_seconds": np.array([5.0, 10, 40, np.nan]), "upload_seconds": np.array([1.0, 10, 0, 0])}
    slow = Oort(2, clip=1.0, duration=20.0, penalty=2.0).utility(roster, 9, np.arange(4))
    np.testing.assert_allclose(slow, found * [1, 1, 0.25, 1])


def test_oort_exploits_high_losses_and_an_outlier_is_clipped() -> None:
    roster = known_to([*np.linspace(1, 2, 19), 1e6])
    times = np.zeros(20)
    for seed in range(300):
        for c in Oort(3, explore=0.0, explore_least=0.0)(roster, 50, rng(seed)):
            times[roster.row(c)] += 1
    assert times.sum() == 900
    utility = Oort(3).utility(roster, 50, np.arange(20))
    assert utility.max() - np.sort(utility)[-2] < 0.99  # without clipping the others were all at nought
    order = [int(c[1:]) for c in roster.ids]
    assert times[[order.index(i) for i in range(10)]].sum() == 0


def test_oort_tries_quick_newcomers_first_if_speed_matters() -> None:
    roster = roster_of([f"n{i}" for i in range(10)])
    roster.figures |= {"ready_seconds": np.array([1.0] * 5 + [1e6] * 5), "upload_seconds": np.zeros(10)}
    for seed in range(20):
        assert Oort(5, duration=10.0)(roster, 1, rng(seed)) == [f"n{i}" for i in range(5)]


@pytest.mark.parametrize("lie", [1e6, 1e99])
def test_a_lying_loss_is_selected_by_oort_at_most_twice_as_often_as_the_others(lie: float) -> None:
    before, _ = selections(Oort(5, most=0.0), lie)
    assert before >= 33  # of 40 rounds: nearly always
    times, others = selections(Oort(5), lie)
    assert times <= 20  # twice the mean of 10
    assert others > 9


class SlowPacer:
    """FedScale's pacer written out with a list of all gains: percentiles of round durations, rounds counted from 1."""

    def __init__(self, threshold: float, step: int, delta: float) -> None:
        self.threshold, self.step, self.delta = threshold, step, delta
        self.gains: list[float] = []

    def select(self, rewards: list[float], durations: list[float]) -> float:
        """The preferred duration when the rewards of those exploited last are known."""
        self.gains.append(sum(rewards) / (1e-4 + len(rewards)))
        times = len(self.gains)
        if times >= 2 * self.step and times % self.step == 0:
            before = sum(self.gains[times - 2 * self.step : times - self.step])
            now = sum(self.gains[times - self.step :])
            if abs(now - before) <= before * 0.1:
                self.threshold = min(100.0, self.threshold + self.delta)
            elif abs(now - before) >= before * 5:
                self.threshold = max(self.delta, self.threshold - self.delta)
        if self.threshold >= 100:
            return math.inf
        return sorted(durations)[min(int(len(durations) * self.threshold / 100), len(durations) - 1)]


@pytest.mark.parametrize("course", ["flat", "leaps", "wanders"])
def test_the_pacer_is_that_of_the_authors_code(course: str) -> None:
    """Forty rounds of rewards that stay, leap or wander, against a slow pacer that keeps everything."""
    draw, names = rng(7), [f"c{i}" for i in range(12)]
    roster, memory = roster_of(names), dict[str, np.ndarray]()
    roster.mark(0, names, dict.fromkeys(names, 10))
    durations = draw.uniform(1, 100, 12)
    roster.figures |= {"ready_seconds": durations, "upload_seconds": np.zeros(12), "rms_loss": np.ones(12)}
    select, slow = Oort(3, clip=1.0, pace=90.0, pace_step=3, pace_delta=4.0), SlowPacer(90.0, 3, 4.0)
    seen, exploited = [], list[str]()
    for number in range(1, 41):
        rewards = [float(roster.n[roster.row(c)] * roster.figure_of(c, "rms_loss")) for c in exploited]
        found = select.preferred(roster, number, memory)
        assert found == slow.select(rewards, durations.tolist())
        assert found == select.preferred(roster, number, memory)  # a round that failed is selected for again
        seen.append(found)
        exploited = [names[i] for i in draw.choice(12, 3, replace=False)]
        roster.mark(number, exploited, dict.fromkeys(exploited, 10))
        scale = {"flat": 1.0, "leaps": 100.0 ** (number // 3), "wanders": float(draw.uniform(0.1, 10))}[course]
        for c in exploited:
            roster.hear(number, c, {"rms_loss": scale})
    if course == "flat":
        assert seen[-1] == math.inf  # all may take part in the end
    if course == "leaps":
        assert seen[-1] < seen[0]


def test_the_pacer_goes_on_where_it_was_and_needs_to_know_durations() -> None:
    assert "memory" in Oort(3, pace=30.0).needs.server
    assert "memory" not in Oort(3).needs.server
    with pytest.raises(ConfigError, match=r"^select\.pace: the clients' durations are unknown; set devices"):
        Oort(3, pace=30.0)(roster_of(["ana", "bia"]), 1, rng(), {})


def test_slow_clients_are_drawn_when_the_pacer_lets_them() -> None:
    roster = known_to([1.0] * 10)
    roster.figures |= {"ready_seconds": np.array([1.0] * 5 + [1e3] * 5), "upload_seconds": np.zeros(10)}
    times = {pace: np.zeros(10) for pace in (30.0, 100.0)}
    for pace, seen in times.items():
        for seed in range(50):
            for c in Oort(3, explore=0.0, explore_least=0.0, cut=0.0, pace=pace)(roster, 2, rng(seed), {}):
                seen[roster.row(c)] += 1
    assert times[30.0][5:].sum() == 0
    assert times[100.0][5:].sum() > 50


def test_who_took_part_too_often_is_on_the_blacklist_up_to_a_share_of_all() -> None:
    roster = known_to([1.0] * 10)
    roster.replied[:] = [9, 1, 8, 1, 7, 1, 6, 1, 1, 1]
    times = np.zeros(10)
    for seed in range(100):
        for c in Oort(3, explore=0.0, explore_least=0.0, blacklist=5)(roster, 20, rng(seed)):
            times[roster.row(c)] += 1
    assert times[[0, 2, 4]].sum() == 0  # three of ten; the fourth comes back
    assert (times[[1, 3, 5, 6, 7, 8, 9]] > 0).all()
    everybody = Oort(9, explore=0.0, explore_least=0.0, blacklist=5)(roster, 20, rng())
    assert len(everybody) == 9  # there are not enough others


def test_a_lying_loss_does_not_drive_the_pacer() -> None:
    """One client tells an enormous loss in every other window: cut at the quantile, the gains stay flat."""
    names = [f"c{i:02d}" for i in range(30)]
    roster, memory = roster_of(names), dict[str, np.ndarray]()
    roster.mark(0, names, dict.fromkeys(names, 10))
    roster.figures |= {"ready_seconds": np.arange(30.0), "upload_seconds": np.zeros(30), "rms_loss": np.ones(30)}
    select, seen = Oort(30, pace=50.0, pace_step=2, pace_delta=10.0), []
    for number in range(1, 11):
        seen.append(select.preferred(roster, number, memory))
        roster.mark(number, names, dict.fromkeys(names, 10))
        roster.hear(number, "c00", {"rms_loss": 1e99 if number % 4 < 2 else 1.0})
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
