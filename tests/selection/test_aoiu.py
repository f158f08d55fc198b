"""Age and utility, alone and together, and sums of scores."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from choosing import rng, roster_of
from mutirao.core.needs import Needs
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.metrics import gini
from mutirao.selection import AoI, AoIU, Entropy, Mix, RoundRobin
from mutirao.selection.scores import mix_scores


def simulated(select: Any, clients: int = 100, rounds: int = 100, seed: int = 0) -> np.ndarray:
    """Who was selected when, clients x rounds, if everybody replies and entropies wander below ln 10."""
    roster = roster_of([f"c{i:03d}" for i in range(clients)])
    source, draws = rng(seed), rng(seed + 1)
    times = np.zeros((clients, rounds), np.int64)
    for t in range(1, rounds + 1):
        chosen = select(roster, t, source)
        roster.mark(t, chosen, dict.fromkeys(chosen, 50))
        for c in chosen:
            figures = {"entropy": float(draws.uniform(0.3, 2.3)), "rms_loss": float(draws.uniform(0.1, 3))}
            roster.hear(t, c, figures)
            times[roster.row(c), t - 1] += 1
    return times


@pytest.mark.parametrize("select", [AoI(10), AoIU(10, alpha=1.0), AoIU(10, alpha=1), RoundRobin(10), Mix(10, "age")])
def test_pure_age_is_perfectly_fair(select: Any) -> None:
    counts = simulated(select).sum(1)
    assert counts.tolist() == [10] * 100
    assert gini(counts) == 0.0


@pytest.mark.parametrize("classes", [None, 10])
@pytest.mark.parametrize("make", [Entropy, lambda m, classes: AoIU(m, 0.0, classes=classes)])
def test_pure_entropy_visits_everyone_once_before_anyone_twice(make: Any, classes: int | None) -> None:
    times = simulated(make(10, classes=classes))
    assert times[:, :10].sum(1).tolist() == [1] * 100
    assert times[:, 10].sum() == 10
    assert gini(times.sum(1)) > 0.05


def test_even_if_a_model_that_knows_nothing_has_the_highest_entropy_there_is() -> None:
    roster = roster_of([f"c{i}" for i in range(20)])
    seen: list[str] = []
    for t in range(1, 5):
        chosen = Entropy(5, classes=3)(roster, t, rng(t))
        roster.mark(t, chosen, {})
        for c in chosen:
            roster.note(c, {"entropy": float(np.float32(np.log(3)))})  # in single precision above ln 3
        seen += chosen
    assert sorted(seen) == sorted(roster.ids)


def test_alpha_in_between_lies_in_between() -> None:
    spread = [gini(simulated(AoIU(10, alpha, classes=10)).sum(1)) for alpha in (0.0, 0.5, 1.0)]
    assert spread[0] > spread[1] > spread[2] == 0.0


def table_of_five() -> Roster:
    """Ages 4, 1, 2, 4, 8 in round 8; entropies known of all but the last, who was never selected."""
    roster = roster_of(["ana", "bia", "caio", "dora", "eva"])
    for t, who in ((4, ["ana", "dora"]), (6, ["caio"]), (7, ["bia"])):
        roster.mark(t, who, dict.fromkeys(who, 10))
    for who, entropy in (("ana", 1.0), ("bia", 2.0), ("caio", 0.5), ("dora", 1.5)):
        roster.note(who, {"entropy": entropy})
    return roster


def test_scores_are_those_of_a_table_made_by_hand() -> None:
    roster = table_of_five()
    here = roster.here()
    age = np.array([3, 0, 1, 3, 7]) / 7  # (age - 1) / (8 - 1)
    entropy = np.array([0.5, 1.5, 0.0, 1.0, 1.802585092994046]) / 1.802585092994046  # (u - 0.5) / (ln 10 - 0.5)
    for alpha in (0.0, 0.25, 0.5, 1.0):
        found = mix_scores(AoIU(1, alpha, classes=10).mix.weights, roster, 8, here, 10)
        np.testing.assert_allclose(found, alpha * age + (1 - alpha) * entropy, rtol=1e-14)
    assert AoIU(1, 0.5, classes=10)(roster, 8, rng()) == ["eva"]
    assert AoIU(2, 0.5, classes=10)(roster, 8, rng()) == ["dora", "eva"]  # 0.4917 before bia's 0.4161
    assert AoIU(2, 0.25, classes=10)(roster, 8, rng()) == ["bia", "eva"]  # 0.6241 before dora's 0.5232
    assert AoIU(2, 1.0)(roster, 8, rng()) in (["ana", "eva"], ["dora", "eva"])


def test_scores_are_scaled_over_those_present_only() -> None:
    roster = table_of_five()
    roster.meet(["ana", "bia", "caio"])
    np.testing.assert_allclose(mix_scores({"age": 1.0}, roster, 8, roster.here()), [1.0, 0.0, 1 / 3])
    assert AoIU(1, 1.0)(roster, 8, rng()) == ["ana"]


def test_equals_at_the_margin_are_drawn_by_lot_and_the_better_are_always_in() -> None:
    roster = roster_of([f"c{i}" for i in range(8)])
    for t, who in ((1, ["c0", "c1"]), (2, ["c2", "c3", "c4", "c5"]), (3, ["c6", "c7"])):
        roster.mark(t, who, {})
    source, times = rng(6), np.zeros(8)
    for _ in range(2000):
        for c in AoI(3)(roster, 4, source):
            times[roster.row(c)] += 1
    assert times[:2].tolist() == [2000, 2000]
    assert times[6:].sum() == 0
    assert chisquare(times[2:6]).pvalue > 1e-4


def test_selecting_by_age_and_utility_from_a_million_is_quick() -> None:
    roster = Roster(ids=[f"c{i:06d}" for i in range(1_000_000)], present=np.ones(1_000_000, np.bool_))
    draw = rng(1)
    roster.last_selected[:] = draw.integers(0, 50, 1_000_000)
    roster.figures["entropy"] = np.where(draw.random(1_000_000) < 0.5, np.nan, draw.random(1_000_000))
    assert len(AoIU(100, 0.5, classes=10)(roster, 51, rng())) == 100


def test_a_client_that_sends_absurd_figures_breaks_nothing() -> None:
    roster = roster_of(["ana", "bia", "caio"])
    roster.note("ana", {"loss": 1.7e308})
    roster.note("bia", {"loss": -1.7e308})
    assert AoIU(1, 0.0, utility="loss")(roster, 1, rng()) == ["caio"]  # never heard of: first
    assert AoIU(2, 0.0, utility="loss")(roster, 1, rng()) == ["ana", "caio"]
    roster.note("caio", {"entropy": 1.0})
    roster.note("ana", {"entropy": 1e9})  # more than there can be
    roster.note("bia", {"entropy": 2.0})
    assert AoIU(2, 0.0, classes=10)(roster, 1, rng()) == ["ana", "bia"]


def test_what_a_policy_asks_of_clients_follows_from_its_scores() -> None:
    assert AoIU(3, 1.0).needs == Needs()
    hundred = {"probe_samples": 100}
    assert AoIU(3, 0.5).needs == Needs(metrics={"entropy"}, config=hundred)
    assert AoIU(3, 0.5, utility="loss").needs == Needs(metrics={"loss"}, config=hundred)
    assert AoIU(3, 0.5, utility="update_norm").needs == Needs(server={"update_norm"})
    assert AoIU(3, 0.5, refresh="all").needs == Needs(probes={"entropy"}, config=hundred)
    assert AoIU(3, 0.5, refresh="share").needs == Needs(metrics={"entropy"}, probes={"entropy"}, config=hundred)
    roster = roster_of([f"c{i}" for i in range(20)])
    assert AoIU(3, 0.5).probes(roster, 1, rng()) == []
    assert AoIU(3, 0.5, refresh="all").probes(roster, 1, rng()) == sorted(roster.ids)
    assert len(AoIU(3, 0.5, refresh="share", share=0.25).probes(roster, 1, rng())) == 5
    assert AoIU(3, 1.0, refresh="all").probes(roster, 1, rng()) == []


def half_known(roster: Roster, round: int) -> np.ndarray:
    """A user's own score: entropy of the first client, nothing known of the others."""
    return np.where(np.arange(len(roster)) == 0, roster.figure("entropy", 0.0), np.nan)


def two_values(roster: Roster, round: int) -> np.ndarray:
    return np.zeros(2)


half_known.needs = Needs(metrics={"entropy"})  # type: ignore[attr-defined]


def test_a_score_of_ones_own_goes_by_its_path_and_says_what_it_needs() -> None:
    select = Mix(2, f"0.1 age + 2 {__name__}:half_known")
    assert select.needs == Needs(metrics={"entropy"}, config={"probe_samples": 100})
    assert select(roster_of(["ana", "bia", "caio"]), 1, rng()) == ["bia", "caio"]  # never heard of: first
    with pytest.raises(ConfigError, match=f"cannot load '{__name__}:nothing'"):
        Mix(2, f"{__name__}:nothing")
    with pytest.raises(ConfigError, match=r"gave values of shape \(2,\) for 3 clients"):
        Mix(2, f"{__name__}:two_values")(roster_of(["ana", "bia", "caio"]), 1, rng())


@pytest.mark.parametrize("lie", [1e99, -1e99])
def test_one_absurd_utility_does_not_shrink_those_of_all_others_to_nothing(lie: float) -> None:
    roster = Roster()
    roster.meet([f"c{i:02d}" for i in range(21)])
    for i in range(21):
        roster.note(f"c{i:02d}", {"loss": lie if i == 0 else float(i)})
    values = mix_scores({"loss": 1.0}, roster, 5, roster.here())
    spread = values[1:].max() - values[1:].min()
    assert spread > 0.9
    honest = [c for c in Mix(6, "loss")(roster, 5, np.random.default_rng(0)) if c != "c00"]
    assert set(honest) <= {f"c{i:02d}" for i in range(15, 21)}  # still the highest losses


def test_entropies_are_held_to_their_own_bound_so_that_the_published_formula_stays_exact() -> None:
    roster = Roster()
    roster.meet([f"c{i}" for i in range(8)])
    entropies = np.linspace(0.1, 2.0, 8)
    for i, value in enumerate(entropies):
        roster.note(f"c{i}", {"entropy": float(value)})
    exact = (entropies - 0.1) / 1.9
    np.testing.assert_allclose(mix_scores({"entropy": 1.0}, roster, 3, roster.here(), classes=10), exact)
    roster.note("c0", {"entropy": 1e99})
    held = mix_scores({"entropy": 1.0}, roster, 3, roster.here(), classes=10)
    assert held[0] == 1.0
    assert held[1:].max() - held[1:].min() > 0.8
