"""Who may be selected, how many, and how fairly."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from mutirao.config import Part, build, complete
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.metrics import gini
from mutirao.scores import mix_scores
from mutirao.selection import (
    NAMES,
    AoI,
    AoIU,
    Entropy,
    FedCS,
    Mix,
    Oort,
    PowerOfChoice,
    RoundRobin,
    Uniform,
    everyone,
    how_many,
)


def roster_of(present: list[str], absent: list[str] | None = None) -> Roster:
    roster = Roster()
    roster.meet([*present, *(absent or [])])
    roster.meet(present)
    return roster


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


ids = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=20, unique=True)
counts = st.one_of(st.integers(1, 30), st.floats(0, 1, exclude_min=True))


@given(ids, st.data(), counts, st.integers(0, 99))
def test_only_present_clients_are_chosen_each_at_most_once(
    names: list[str], data: st.DataObject, count: int | float, seed: int
) -> None:
    present = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    roster = roster_of(present, [n for n in names if n not in present])
    chosen = Uniform(count)(roster, 1, rng(seed))
    assert set(chosen) <= set(present)
    assert len(set(chosen)) == len(chosen) == how_many(count, len(present))
    assert sorted(everyone(roster, 1, rng(seed))) == sorted(present)


@pytest.mark.parametrize(
    ("count", "present", "expected"),
    [
        (1, 10, 1),  # a whole number is a count
        (1.0, 10, 10),  # and a float a share: 1.0 is all
        (5, 3, 3),  # more than there are: all
        (0.2, 10, 2),
        (0.26, 10, 3),  # rounded to the nearest
        (0.24, 10, 2),
        (0.001, 10, 1),  # at least one
        (0.5, 1, 1),
        (10**9, 7, 7),
    ],
)
def test_count_or_share(count: int | float, present: int, expected: int) -> None:
    chosen = Uniform(count)(roster_of([f"c{i}" for i in range(present)]), 1, rng())
    assert len(chosen) == expected


@pytest.mark.parametrize("count", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "all", None])
def test_what_is_no_count_is_refused_in_one_line(count: Any) -> None:
    with pytest.raises(ValueError, match=r"^count is [^\n]+, but must be a whole number [^\n]+$"):
        Uniform(count)


def test_the_same_generator_gives_the_same_choice_whoever_came_first() -> None:
    names = [f"c{i:02d}" for i in range(50)]
    one, two = roster_of(names), roster_of(names[::-1])
    assert Uniform(7)(one, 1, rng(3)) == Uniform(7)(two, 1, rng(3))
    assert Uniform(7)(one, 1, rng(3)) != Uniform(7)(one, 1, rng(4))


def test_every_client_is_as_likely_as_any_other() -> None:
    """Twenty clients, five a round, 4,000 rounds: each is expected 1,000 times, with a deviation of 27."""
    roster = roster_of([f"c{i:02d}" for i in range(20)])
    source, times = rng(1), dict.fromkeys(roster.ids, 0)
    for t in range(4000):
        for c in Uniform(5)(roster, t, source):
            times[c] += 1
    assert all(abs(n - 1000) < 5 * 27.4 for n in times.values())


def test_nobody_present_gives_nobody() -> None:
    roster = roster_of([], ["ana"])
    assert Uniform(3)(roster, 1, rng()) == []
    assert everyone(roster, 1, rng()) == []


def test_choosing_among_a_million_is_quick() -> None:
    names = [f"c{i:06d}" for i in range(1_000_000)]
    roster = Roster(ids=names, present=np.ones(len(names), np.bool_))
    start = time.perf_counter()
    assert len(Uniform(100)(roster, 1, rng())) == 100
    assert len(Uniform(0.001)(roster, 1, rng())) == 1000
    assert time.perf_counter() - start < 0.5  # a hundred times what it takes


def test_parts_are_found_by_name_and_take_the_recipes_count_if_the_user_says_nothing() -> None:
    assert set(NAMES) >= {"everyone", "uniform"}
    assert build("select", Part("uniform"), count=7) == Uniform(7)
    assert build("select", Part("uniform", {"count": 0.5}), count=7) == Uniform(0.5)
    assert build("select", Part("everyone"), count=7) is everyone
    assert complete("select", Part("uniform", {"count": 3})) == Part("uniform", {"count": 3})
    with pytest.raises(ConfigError, match="select=uniform: count is 0"):
        build("select", Part("uniform", {"count": 0}))


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
    from mutirao.scores import mix_scores

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
    from mutirao.scores import mix_scores

    np.testing.assert_allclose(mix_scores({"age": 1.0}, roster, 8, roster.here()), [1.0, 0.0, 1 / 3])
    assert AoIU(1, 1.0)(roster, 8, rng()) == ["ana"]


@pytest.mark.parametrize("select", [AoI(3), Entropy(3, classes=10), AoIU(3), PowerOfChoice(3), Oort(3), FedCS(3)])
def test_equals_are_drawn_by_lot_each_as_likely(select: Any) -> None:
    """Chi-square over 12 equal clients of whom 3 are drawn 3,000 times."""
    roster = roster_of([f"c{i:02d}" for i in range(12)])
    source, times = rng(5), np.zeros(12)
    for _ in range(3000):
        for c in select(roster, 1, source):
            times[roster.row(c)] += 1
    assert times.sum() == 9000
    assert chisquare(times).pvalue > 1e-4


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
    start = time.perf_counter()
    assert len(AoIU(100, 0.5, classes=10)(roster, 51, rng())) == 100
    assert time.perf_counter() - start < 3.0  # thirty times what it takes


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


def test_round_robin_goes_by_name_and_lets_latecomers_catch_up() -> None:
    roster = roster_of(["ana", "bia", "caio", "dora"])
    order = []
    for t in range(1, 5):
        chosen = RoundRobin(2)(roster, t, rng(t))
        roster.mark(t, chosen, {})
        order.append(chosen)
    assert order == [["ana", "bia"], ["caio", "dora"]] * 2
    roster.meet([*roster.ids, "zoe"])
    assert RoundRobin(1)(roster, 5, rng()) == ["zoe"]


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


def known_to_oort(losses: list[float], new: int = 0, at: int = 1) -> Roster:
    roster = roster_of([*(f"k{i}" for i in range(len(losses))), *(f"n{i}" for i in range(new))])
    old = [f"k{i}" for i in range(len(losses))]
    roster.mark(at, old, dict.fromkeys(old, 10))
    for c, loss in zip(old, losses, strict=True):
        roster.note(c, {"rms_loss": loss})
    return roster


def test_oort_divides_the_places_between_new_and_known_clients() -> None:
    roster = known_to_oort([1.0] * 20, new=20)
    new = [sum(c.startswith("n") for c in Oort(10)(roster, t, rng(t))) for t in (1, 11, 1000)]
    assert new == [9, 7, 2]  # 0.9, 0.9 * 0.98^10 = 0.735 and at least 0.2 of ten, rounded down
    assert len(Oort(10)(known_to_oort([1.0] * 3, new=20), 1000, rng())) == 10
    assert len(Oort(10)(known_to_oort([1.0] * 30), 1, rng())) == 10


def test_oorts_utility_is_that_of_the_paper() -> None:
    roster = known_to_oort([1.0, 2.0, 3.0, 4.0], at=3)
    roster.n[:] = [40, 10, 10, 10]
    found = Oort(2, clip=1.0).utility(roster, 9, np.arange(4))
    np.testing.assert_allclose(found, np.array([1, 0, 1 / 2, 1]) + np.sqrt(0.1 * np.log(9) / 3))
    roster.figures |= {"ready_seconds": np.array([5.0, 10, 40, np.nan]), "upload_seconds": np.array([1.0, 10, 0, 0])}
    slow = Oort(2, clip=1.0, duration=20.0, penalty=2.0).utility(roster, 9, np.arange(4))
    np.testing.assert_allclose(slow, found * [1, 1, 0.25, 1])


def test_oort_exploits_high_losses_and_an_outlier_is_clipped() -> None:
    roster = known_to_oort([*np.linspace(1, 2, 19), 1e6])
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


def roster_with_times(ready: list[float], upload: list[float]) -> Roster:
    roster = roster_of([f"c{i}" for i in range(len(ready))])
    roster.figures |= {"ready_seconds": np.array(ready), "upload_seconds": np.array(upload)}
    return roster


def test_fedcs_takes_whoever_can_reply_in_time() -> None:
    roster = roster_with_times([10, 50, 200, 20, 90], [5, 5, 5, 100, 5])
    assert FedCS(5, deadline=100)(roster, 1, rng()) == ["c0", "c1", "c4"]
    assert FedCS(2, deadline=100)(roster, 1, rng()) == ["c0", "c1"]
    assert FedCS(5, deadline=1)(roster, 1, rng()) == ["c0"]  # nobody can, but a round needs someone


def test_fedcs_with_uploads_in_turn_fills_the_round_as_in_the_paper() -> None:
    """By hand: c0 ends at 15, c1 at 25 (ready at 10, waits), c2 at 55 (ready at 50); c3 would end at 105."""
    roster = roster_with_times([10, 10, 50, 5], [5, 10, 5, 50])
    assert FedCS(4, deadline=100, in_turn=True)(roster, 1, rng()) == ["c0", "c1", "c2"]
    assert FedCS(4, deadline=105, in_turn=True)(roster, 1, rng()) == ["c0", "c1", "c2", "c3"]


def test_fedcs_takes_the_unknown_for_middling_and_draws_candidates_by_lot() -> None:
    roster = roster_with_times([10, np.nan, 500], [1, np.nan, 1])
    assert FedCS(3, deadline=300)(roster, 1, rng()) == ["c0", "c1"]
    many = roster_of([f"c{i:02d}" for i in range(50)])
    assert len({tuple(FedCS(5, candidates=10)(many, 1, rng(seed))) for seed in range(20)}) > 15


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AoIU(3, 1.5), "alpha is 1.5, but must be between 0 and 1"),
        (lambda: AoIU(3, float("nan")), "alpha is nan"),
        (lambda: AoIU(3, utility="mood"), "utility is 'mood'"),  # type: ignore[arg-type]
        (lambda: AoIU(0), "count is 0"),
        (lambda: Entropy(3, refresh="never"), "refresh is 'never'"),  # type: ignore[arg-type]
        (lambda: Entropy(3, share=0.0), "share is 0.0"),
        (lambda: Mix(3, samples=0), "samples is 0"),
        (lambda: Mix(3, "0.5 agee"), "no score is called 'agee'; did you mean 'age'"),
        (lambda: Mix(3, "age entropy"), "'age entropy' is not a weight and a score"),
        (lambda: Mix(3, "inf age"), "not a finite number"),
        (lambda: PowerOfChoice(3, candidates=-1), "candidates is -1"),
        (lambda: Oort(3, explore=2.0), "explore is 2.0"),
        (lambda: Oort(3, duration=-1.0), "duration is -1.0"),
        (lambda: FedCS(3, deadline=0.0), "deadline is 0.0"),
        (lambda: FedCS(3, candidates=-2), "count is -2"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_what_a_policy_asks_of_clients_follows_from_its_scores() -> None:
    assert AoIU(3, 1.0).needs == frozenset()
    hundred = "config:probe_samples=100"
    assert AoIU(3, 0.5).needs == {"metrics:entropy", hundred}
    assert AoIU(3, 0.5, utility="loss").needs == {"metrics:loss", hundred}
    assert AoIU(3, 0.5, utility="update_norm").needs == {"replies:update_norm"}
    assert AoIU(3, 0.5, refresh="all").needs == {"probe:entropy", hundred}
    assert AoIU(3, 0.5, refresh="share").needs == {"metrics:entropy", "probe:entropy", hundred}
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


half_known.needs = {"metrics:entropy"}  # type: ignore[attr-defined]


def test_a_score_of_ones_own_goes_by_its_path_and_says_what_it_needs() -> None:
    select = Mix(2, f"0.1 age + 2 {__name__}:half_known")
    assert select.needs == {"metrics:entropy", "config:probe_samples=100"}
    assert select(roster_of(["ana", "bia", "caio"]), 1, rng()) == ["bia", "caio"]  # never heard of: first
    with pytest.raises(ConfigError, match=f"cannot load '{__name__}:nothing'"):
        Mix(2, f"{__name__}:nothing")
    with pytest.raises(ConfigError, match=r"gave values of shape \(2,\) for 3 clients"):
        Mix(2, f"{__name__}:two_values")(roster_of(["ana", "bia", "caio"]), 1, rng())


# Liars.


def selections(select: Any, lie: float, clients: int = 20, rounds: int = 40, seed: int = 0) -> tuple[int, float]:
    """How often a client whose loss is a lie is selected, and how often the others are on average."""
    roster, draw = Roster(), np.random.default_rng(seed)
    names = [f"c{i:02d}" for i in range(clients)]
    roster.meet(names)
    for number in range(1, rounds + 1):
        for c in select.probes(roster, number, draw) if hasattr(select, "probes") else []:
            roster.hear(number, c, {"loss": lie if c == "c00" else float(draw.uniform(0.5, 2))})
            roster.probed(number, {c: 14})
        chosen = select(roster, number, draw)
        roster.mark(number, chosen, dict.fromkeys(chosen, 14))
        for c in chosen:
            told = lie if c == "c00" else float(draw.uniform(0.5, 2) * 0.9 ** (number / 4))
            roster.hear(number, c, {"rms_loss": told, "loss": told, "gradient_norm": told})
    return int(roster.selected[0]), float(roster.selected[1:].mean())


@pytest.mark.parametrize("lie", [1e6, 1e99])
def test_a_lying_loss_is_selected_by_oort_at_most_twice_as_often_as_the_others(lie: float) -> None:
    before, _ = selections(Oort(5, most=0.0), lie)
    assert before >= 33  # of 40 rounds: nearly always
    times, others = selections(Oort(5), lie)
    assert times <= 20  # twice the mean of 10
    assert others > 9


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
