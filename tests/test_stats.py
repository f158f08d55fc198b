"""Intervals, tests and corrections against SciPy and the published figures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from mutirao.stats import Interval, bootstrap, cliffs_delta, holm, interval, paired


def test_the_published_effect_size_and_p_of_five_wins() -> None:
    result = paired([2, 3, 4, 5, 6], [1, 1, 1, 1, 1])
    assert result.p == pytest.approx(0.03125)
    assert result.r == pytest.approx(0.9045, abs=1e-4)
    assert result.verdict == "better"


def test_the_published_effect_size_of_one_small_loss() -> None:
    result = paired([-2, 1, 3, 4, 5], [0, 0, 0, 0, 0])  # the loss has the second smallest size
    assert result.p == pytest.approx(0.09375)
    assert result.r == pytest.approx(0.6633, abs=1e-4)


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
