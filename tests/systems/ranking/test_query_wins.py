"""Risk-sensitive measures against loops written out, scipy's t, and numbers worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mutirao.errors import ConfigError
from mutirao.systems.ranking.metrics import compare_rankers, geo_risk, t_risk, u_risk, z_risk

values = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=20)
aversions = st.floats(0, 10)


def loop_u(ours: list[float], theirs: list[float], aversion: float) -> list[float]:
    """The weighed gain of each query, one at a time."""
    out = []
    for a, b in zip(ours, theirs, strict=True):
        out.append(a - b if a >= b else (1 + aversion) * (a - b))
    return out


def loop_z(scores: list[list[float]], k: int, aversion: float) -> float:
    """ZRisk of one ranker, cell by cell."""
    total = sum(map(sum, scores))
    out = 0.0
    for i in range(len(scores[0])):
        expected = sum(scores[k]) * sum(row[i] for row in scores) / total if total else 0.0
        if expected > 0:
            z = (scores[k][i] - expected) / math.sqrt(expected)
            out += z if z >= 0 else (1 + aversion) * z
    return out


@given(pairs=values, aversion=aversions)
def test_they_are_the_formulas(pairs: list[tuple[float, float]], aversion: float) -> None:
    ours, theirs = (list(column) for column in zip(*pairs, strict=True))
    weighed = loop_u(ours, theirs, aversion)
    assert u_risk(ours, theirs, aversion) == pytest.approx(sum(weighed) / len(weighed), abs=1e-12)
    found = t_risk(ours, theirs, aversion)
    if np.std(weighed) > 1e-9:
        assert found == pytest.approx(float(stats.ttest_1samp(weighed, 0.0).statistic), rel=1e-6, abs=1e-9)


@given(rows=st.lists(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), min_size=2, max_size=5), aversion=aversions)
def test_georisk_is_the_formula(rows: list[list[float]], aversion: float) -> None:
    for k, (z, geo) in enumerate(zip(z_risk(rows, aversion), geo_risk(rows, aversion), strict=True)):
        expected = loop_z(rows, k, aversion)
        assert z == pytest.approx(expected, abs=1e-9)
        mean = sum(rows[k]) / 4
        assert geo == pytest.approx(math.sqrt(mean * stats.norm.cdf(expected / 4)), abs=1e-9)


def test_worked_numbers() -> None:
    ours, theirs = [0.5, 0.2, 0.9, 0.4], [0.3, 0.4, 0.9, 0.3]  # gains 0.2, -0.2, 0, 0.1
    assert u_risk(ours, theirs, 0.0) == pytest.approx(0.025)
    assert u_risk(ours, theirs, 1.0) == pytest.approx(-0.025)  # (0.2 - 0.4 + 0 + 0.1) / 4
    # weighed gains 0.2, -0.4, 0, 0.1: variance (0.225^2 + 0.375^2 + 0.025^2 + 0.125^2) / 3 = 0.0691667
    assert t_risk(ours, theirs, 1.0) == pytest.approx(-0.025 / math.sqrt(0.0691667 / 4), rel=1e-5)
    found = compare_rankers(ours, theirs, 1.0)
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    # Two equal rankers have no residuals: GeoRisk is the root of half the mean.
    assert geo_risk([ours, ours], 5.0) == pytest.approx([math.sqrt(0.5 / 2)] * 2)


def test_who_loses_much_on_one_query_is_riskier_than_who_is_even() -> None:
    base, even, uneven = np.full(10, 0.5), np.full(10, 0.52), np.full(10, 0.6)
    uneven[0] = 0.0  # better by the mean and by most queries, and a disaster once
    assert uneven.mean() > even.mean()
    assert u_risk(uneven, base, 5.0) < 0 < u_risk(even, base, 5.0)
    geo = geo_risk([uneven, even, base], 5.0)
    assert geo[0] < geo[1]


def test_what_cannot_be_compared_is_refused() -> None:
    for ours, theirs in (([0.5], [0.5, 0.1]), ([], []), ([[0.1]], [[0.1]])):
        with pytest.raises(ConfigError, match="expected one value a query from both"):
            u_risk(ours, theirs)
    with pytest.raises(ConfigError, match="aversion: -1"):
        u_risk([0.5], [0.4], -1.0)
    assert math.isnan(t_risk([0.5], [0.4]))
    assert math.isnan(t_risk([0.5, 0.5], [0.4, 0.4]))  # no spread, no t
