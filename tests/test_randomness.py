"""What is drawn in secret has the distribution it should, in any shape, and is never the same twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mutirao.randomness import Secret

LEAST = 1e-9  # so unlikely a sample would be a fault


@given(st.one_of(st.integers(0, 9), st.tuples(), st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_secret_numbers_come_in_any_shape(size: int | tuple[int, ...]) -> None:
    for drawn in (Secret().random(size), Secret().normal(2.0, 3.0, size)):
        assert drawn.shape == np.zeros(size).shape
        assert drawn.dtype == np.float64
        assert np.isfinite(drawn).all()


def test_secret_noise_is_gaussian() -> None:
    drawn = Secret().normal(1.0, 4.0, (3, 40_001)).ravel()
    assert stats.kstest(drawn, stats.norm(1.0, 4.0).cdf).pvalue > LEAST
    assert drawn.std() == pytest.approx(4.0, rel=0.02)
    tails = np.abs(drawn - 1.0) > 3 * 4.0
    assert stats.binomtest(int(tails.sum()), len(drawn), 2 * stats.norm.sf(3)).pvalue > LEAST


def test_secret_noise_has_no_echo() -> None:
    """Neighbours, and the two numbers that are made of one pair, do not tell of each other."""
    drawn = Secret().normal(0.0, 1.0, 100_000)
    for gap in (1, 50_000):
        assert stats.pearsonr(drawn[gap:], drawn[: len(drawn) - gap]).pvalue > LEAST
        assert stats.pearsonr(drawn[gap:] ** 2, drawn[: len(drawn) - gap] ** 2).pvalue > LEAST


def test_secret_draws_are_uniform_and_never_the_same() -> None:
    drawn = Secret().random(100_000)
    assert stats.kstest(drawn, stats.uniform.cdf).pvalue > LEAST
    assert 0 <= drawn.min() <= drawn.max() < 1
    assert len(np.unique(np.concatenate([drawn, Secret().random(100_000)]))) > 199_990
