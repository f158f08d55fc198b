"""Intervals, tests and corrections against SciPy and the published figures."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from mutirao.stats import (
    Effect,
    Interval,
    bootstrap,
    cliffs_delta,
    effect_size_rows,
    holm,
    interval,
    paired,
    standard_error,
)

pairs = st.lists(  # of few: SciPy goes through all 2^n signs where sizes are tied
    st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=8
)


def test_the_published_effect_size_and_p_of_five_wins() -> None:
    result = paired([2, 3, 4, 5, 6], [1, 1, 1, 1, 1])
    assert result.p == pytest.approx(0.03125)
    assert result.r.value == pytest.approx(0.9045, abs=1e-4)
    assert result.p_two_sided == pytest.approx(0.0625)
    assert result.verdict == "better"


def test_the_published_effect_size_of_one_small_loss() -> None:
    result = paired([-2, 1, 3, 4, 5], [0, 0, 0, 0, 0])  # the loss has the second smallest size
    assert result.p == pytest.approx(0.09375)
    assert result.r.value == pytest.approx(0.6633, abs=1e-4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30).filter(lambda v: np.std(v) > 1e-9))
def test_the_interval_is_students(values: list[float]) -> None:
    low, high = scipy_stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy_stats.sem(values))
    found = interval(values)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high), rel=1e-6, abs=1e-9)


def test_nothing_is_claimed_when_the_interval_holds_zero() -> None:
    assert paired([1, 2, 3], [1.1, 1.9, 3.05]).verdict == "not shown"
    assert paired([1, 1], [1, 1]).verdict == "not shown"
    assert paired([1.0], [0.0]).verdict == "not shown"  # one pair has no interval
    assert paired([1, 2, 3], [2, 3.1, 4]).verdict == "worse"


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({}) == {}


def test_cliffs_delta_and_bootstrap() -> None:
    assert cliffs_delta([3, 4], [1, 2]) == 1.0
    assert cliffs_delta([1, 2], [1, 2]) == 0.0
    values = np.random.default_rng(0).normal(size=200).tolist()
    assert bootstrap(values, np.random.default_rng(1)).half == pytest.approx(interval(values).half, rel=0.05)
    assert math.isnan(bootstrap([1.0], np.random.default_rng(1)).half)
    assert str(Interval(0.5, 0.1)) == "0.5000 ± 0.1000"


@settings(max_examples=25)  # each draws two thousand samples of its pairs
@given(pairs.filter(lambda v: len({a - b for a, b in v}) > 1))
def test_every_p_is_scipys(values: list[tuple[int, int]]) -> None:
    ours, theirs = np.array(values, float).T
    found = paired(ours, theirs)
    for side, p in (("greater", found.p), ("two-sided", found.p_two_sided)):
        assert p == pytest.approx(scipy_stats.wilcoxon(ours - theirs, alternative=side, zero_method="zsplit").pvalue)
    assert found.p_t == pytest.approx(scipy_stats.ttest_rel(ours, theirs).pvalue)
    assert (found.verdict != "not shown") == (found.p_t < 0.05)


@settings(max_examples=25)  # each draws two thousand samples of its pairs
@given(pairs.filter(lambda v: len({a - b for a, b in v}) > 1), st.floats(0.0, 1.0))
def test_shared_data_widen_the_interval_as_nadeau_and_bengio_have_it(
    values: list[tuple[int, int]], shared: float
) -> None:
    ours, theirs = np.array(values, float).T
    differences = [a - b for a, b in values]
    count, mean = len(values), sum(differences) / len(values)
    variance = sum((x - mean) ** 2 for x in differences) / (count - 1) * (1 / count + shared)  # their equation
    found = paired(ours, theirs, shared)
    statistic = mean / math.sqrt(variance)
    low, high = scipy_stats.t.interval(0.95, count - 1, mean, math.sqrt(variance))
    assert found.p_t == pytest.approx(2 * scipy_stats.t.cdf(-abs(statistic), count - 1))
    assert found.difference.mean - found.difference.half == pytest.approx(low, abs=1e-9)
    assert found.difference.mean + found.difference.half == pytest.approx(high, abs=1e-9)
    assert found.p == paired(ours, theirs).p  # Wilcoxon's test has no such correction


def test_a_difference_that_independent_runs_would_show_is_not_shown_by_folds_of_one_set() -> None:
    ours, theirs = [0.44, 0.45, 0.46, 0.47, 0.48], [0.43, 0.42, 0.45, 0.44, 0.47]
    assert paired(ours, theirs).verdict == "better"
    assert paired(ours, theirs, shared=1 / 3).verdict == "not shown"
    assert standard_error([1.0, 2.0], 0.5) == pytest.approx(math.sqrt(0.5))
    assert interval([1.0, 2.0, 3.0], shared=1.0).half == pytest.approx(2 * interval([1.0, 2.0, 3.0]).half)


def test_corrected_tests_cry_wolf_less_often_than_plain_ones() -> None:
    """Two models that are alike, judged on overlapping splits: the plain t claims far more than it may."""
    draw = np.random.default_rng(0)
    claims = np.zeros(2)
    for _ in range(200):
        noise = draw.normal(size=100)  # by how much one is better than the other on each sample: nothing, on average
        means = np.array([noise[draw.permutation(100)[:20]].mean() for _ in range(15)])
        claims += [not interval(means, shared=shared).contains(0.0) for shared in (0.0, 20 / 80)]
    assert claims[0] > 60
    assert claims[1] < 20


@given(pairs)
def test_effect_sizes_by_their_definitions(values: list[tuple[int, int]]) -> None:
    ours, theirs = np.array(values, float).T
    r, delta, d = effect_size_rows(ours[None], theirs[None])[:, 0]
    difference = ours - theirs
    n = len(values)
    ranks = scipy_stats.rankdata(np.abs(difference))
    positive = ranks[difference > 0].sum() + ranks[difference == 0].sum() / 2
    z = (positive - n * (n + 1) / 4) / math.sqrt(np.sum(ranks**2) / 4)
    assert r == pytest.approx(abs(z) / math.sqrt(n))
    assert delta == pytest.approx(cliffs_delta(ours, theirs))
    if difference.std() > 0:
        assert d == pytest.approx(difference.mean() / difference.std(ddof=1))


def test_intervals_of_effects_are_those_of_scipys_bootstrap_and_always_the_same() -> None:
    draw = np.random.default_rng(3)
    ours = draw.normal(0.3, 1.0, 40)
    theirs = ours - draw.normal(0.2, 0.5, 40)
    found = paired(ours, theirs)
    assert found == paired(ours, theirs)

    def by_definition(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.mean(a - b) / np.std(a - b, ddof=1))

    theirs_way = scipy_stats.bootstrap(
        (ours, theirs), by_definition, paired=True, vectorized=False, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert (found.d.low, found.d.high) == pytest.approx((theirs_way.low, theirs_way.high), abs=0.05)
    for effect in (found.r, found.delta, found.d):
        assert effect.low < effect.value < effect.high
    assert found.delta.value == pytest.approx(cliffs_delta(ours, theirs))


def test_effects_of_nothing_and_of_a_single_pair_are_not_made_up() -> None:
    alone, nothing, same = paired([1.0], [0.0]), paired([], []), paired([2, 2], [1, 1])
    assert math.isnan(alone.d.value)
    assert math.isnan(alone.r.low)
    assert math.isnan(alone.p_t)
    assert nothing.n == 0
    assert nothing.p_two_sided == 1.0
    assert math.isnan(same.d.value)  # no spread to measure by
    assert same.p_t == 0.0
    assert str(Effect(0.5, -0.25, 1.0)) == "+0.50 [-0.25, +1.00]"
