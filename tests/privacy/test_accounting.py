"""Epsilon against Google's dp-accounting, the exact Gaussian, and a published value."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from mutirao.errors import ConfigError
from mutirao.privacy.accounting import (
    NOTHING,
    ORDERS,
    Accountant,
    _rdp_of_release,
    add_releases,
    epsilon,
    find_noise,
    join_releases,
)

# noise, rate, times, delta; then epsilon by dp-accounting 0.6.0: its RDP accountant, its PLD accountant (tight)
REFERENCE = [
    (1.1, 256 / 60000, 14062, 1e-5, 2.59656, 2.38169),
    (4.0, 0.01, 10000, 1e-5, 1.03549, 0.94700),
    (1.0, 0.2, 50, 1e-5, 11.34019, 10.12795),
    (2.0, 1.0, 20, 1e-6, 13.37638, 12.59525),
    (0.8, 0.05, 300, 1e-5, 10.47753, 9.31023),
    (5.0, 0.5, 1000, 1e-4, 17.97504, 16.27606),
]


@pytest.mark.parametrize(("noise", "rate", "times", "delta", "rdp", "tight"), REFERENCE)
def test_both_accountants_agree_with_dp_accounting(
    noise: float, rate: float, times: int, delta: float, rdp: float, tight: float
) -> None:
    table = add_releases(None, noise, rate, times)
    mine = epsilon(table, delta)
    assert mine == pytest.approx(rdp, rel=0.025)  # it skips orders that it cannot work out
    assert mine > tight  # never less than the truth
    assert epsilon(table, delta, "prv") == pytest.approx(tight, abs=0.015)


def test_the_published_epsilon_of_dpsgd() -> None:
    """Abadi et al., 2016, section 3.2: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5 give epsilon 1.26."""
    total = 10_000 * _rdp_of_release(4.0, 0.01)
    theirs = min(r + math.log(1e5) / (order - 1) for order, r in zip(ORDERS, total, strict=True))
    assert theirs == pytest.approx(1.26, abs=0.005)
    assert epsilon(add_releases(None, 4.0, 0.01, 10_000), 1e-5) < theirs  # today's conversion is tighter


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (3.0, 4), (0.5, 1)])
def test_without_sampling_it_is_the_exact_gaussian(noise: float, times: int) -> None:
    """Balle and Wang, 2018: delta = Phi(1/2s - eps s) - e^eps Phi(-1/2s - eps s), with s = noise / sqrt(times)."""
    s, delta = noise / math.sqrt(times), 1e-5
    exact = brentq(
        lambda e: norm.cdf(1 / (2 * s) - e * s) - math.exp(e) * norm.cdf(-1 / (2 * s) - e * s) - delta, 0, 60
    )
    table = add_releases(None, noise, 1.0, times)
    assert epsilon(table, delta, "prv") == pytest.approx(exact, abs=0.015)
    assert exact < epsilon(table, delta) < 1.15 * exact


releases = st.lists(
    st.tuples(st.sampled_from([0.7, 1.0, 2.5]), st.sampled_from([0.1, 1.0]), st.integers(1, 9)), max_size=6
)


@settings(max_examples=30, deadline=None)
@given(releases, st.randoms(use_true_random=False))
def test_the_order_of_releases_does_not_matter_and_more_cost_more(
    rows: list[tuple[float, float, int]], shuffle: object
) -> None:
    table = NOTHING
    for row in rows:
        table = add_releases(table, *row)
    mixed = rows.copy()
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]
    other = NOTHING
    for row in mixed:
        other = join_releases(other, np.array([row], np.float64))
    assert epsilon(table, 1e-5) == pytest.approx(epsilon(other, 1e-5))
    assert epsilon(add_releases(table, 1.0, 0.1, 1), 1e-5) > epsilon(table, 1e-5)
    assert table[:, 2].sum() == sum(times for _, _, times in rows)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_nothing_released_costs_nothing(accountant: Accountant) -> None:
    assert epsilon(None, 1e-5, accountant) == epsilon(NOTHING, 1e-5, accountant) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "times", "delta", "rdp", "tight"), [REFERENCE[2], REFERENCE[4]])
def test_the_noise_found_for_a_published_epsilon_is_that_noise(
    noise: float, rate: float, times: int, delta: float, rdp: float, tight: float
) -> None:
    assert find_noise(tight, delta, "prv", rate, times) == pytest.approx(noise, rel=0.01)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.floats(0.2, 40.0), st.sampled_from([1e-6, 1e-3]), st.sampled_from([0.02, 0.3, 1.0]), st.integers(1, 500))
def test_the_noise_found_costs_no_more_than_was_asked_for_and_hardly_less(
    target: float, delta: float, rate: float, times: int
) -> None:
    noise = find_noise(target, delta, "rdp", rate, times)
    assert 0.99 * target < epsilon(add_releases(None, noise, rate, times), delta) <= target


@pytest.mark.parametrize(("target", "rate", "epochs"), [(3.0, 0.05, 10), (0.7, 0.01, 3)])
def test_opacus_finds_the_same_noise(target: float, rate: float, epochs: int) -> None:
    from opacus.accountants.utils import get_noise_multiplier

    options = {"target_epsilon": target, "target_delta": 1e-5, "sample_rate": rate, "epsilon_tolerance": 0.001}
    theirs = get_noise_multiplier(**options, epochs=epochs, accountant="rdp")
    assert find_noise(target, 1e-5, "rdp", rate, int(epochs / rate)) == pytest.approx(theirs, rel=0.01)


def test_an_epsilon_that_no_noise_can_give_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no noise makes epsilon 1e-06 at delta 1e-05 in 10 releases"):
        find_noise(1e-6, 1e-5, "rdp", 1.0, 10)
