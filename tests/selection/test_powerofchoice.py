"""Power-of-Choice: the highest losses of some candidates."""

import numpy as np
from scipy.stats import chisquare

from choosing import rng, roster_of
from mutirao.selection import PowerOfChoice


def test_power_of_choice_takes_the_highest_losses_of_its_candidates() -> None:
    roster = roster_of([f"c{i}" for i in range(10)])
    select = PowerOfChoice(2, candidates=4)
    asked = select.probes(roster, 3, rng(1))
    assert len(asked) == 4
    for i, c in enumerate(asked):
        roster.note(c, {"loss": float(i)})
    roster.probed(3, dict.fromkeys(asked, 10))
    for c in set(roster.ids) - set(asked):
        roster.note(c, {"loss": 99.0})  # of an earlier round: they are no candidates now
    assert select(roster, 3, rng(2)) == asked[2:]
    assert len(PowerOfChoice(8, candidates=4).probes(roster, 3, rng())) == 8
    assert len(PowerOfChoice(3).probes(roster, 3, rng())) == 6


def test_candidates_are_drawn_in_proportion_to_their_samples() -> None:
    roster = roster_of(["big", "mid", "tiny"])
    roster.probed(1, {"big": 600, "mid": 300, "tiny": 100})
    source, times = rng(3), np.zeros(3)
    for _ in range(3000):
        for c in PowerOfChoice(1, candidates=1).probes(roster, 2, source):
            times[roster.row(c)] += 1
    assert chisquare(times, [1800, 900, 300]).pvalue > 1e-4


def test_power_of_choice_makes_do_with_few_answers() -> None:
    roster = roster_of([f"c{i}" for i in range(6)])
    roster.note("c3", {"loss": 0.1})
    roster.probed(2, {"c3": 10})
    for seed in range(20):
        chosen = PowerOfChoice(3)(roster, 2, rng(seed))
        assert "c3" in chosen
        assert len(chosen) == 3
