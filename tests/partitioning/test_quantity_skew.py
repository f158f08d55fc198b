"""Quantity skew: sizes as the authors' formula has them, labels alike."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, ks_2samp

import mutirao.partitioning.quantity_skew
from mutirao.errors import ConfigError
from mutirao.partitioning import describe
from mutirao.partitioning.quantity_skew import DRAWS, quantity

TEN = np.repeat(np.arange(10), 100)


def published_sizes(samples: int, parties: int, beta: float, least: int, draw: np.random.RandomState) -> list[int]:
    """The sizes as NIID-Bench's paper and code say them, one draw after the other."""
    while True:
        shares = draw.dirichlet([beta] * parties)
        if (shares * samples).min() >= least:
            ends = [int(e) for e in np.cumsum(shares) * samples]
            return np.diff([0, *ends[:-1], samples]).tolist()


def test_the_example_in_the_docs_is_true() -> None:
    result = doctest.testmod(mutirao.partitioning.quantity_skew)
    assert result.attempted
    assert not result.failed


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.1, 0.5, 3.0])
def test_sizes_are_distributed_as_published(beta: float) -> None:
    rng, draw = np.random.default_rng(1), np.random.RandomState(2)
    ours = np.array([[len(p) for p in quantity(TEN, 4, rng, beta, min_size=10)] for _ in range(500)])
    theirs = np.array([published_sizes(1000, 4, beta, 10, draw) for _ in range(500)])
    for k in range(4):
        assert ks_2samp(ours[:, k], theirs[:, k]).pvalue > 1e-3
    assert ks_2samp(ours.max(1), theirs.max(1)).pvalue > 1e-3
    other = np.array([published_sizes(1000, 4, 4 * beta, 10, draw) for _ in range(500)])
    assert ks_2samp(ours.max(1), other.max(1)).pvalue < 1e-3  # the test can tell


def test_labels_stay_alike() -> None:
    counts = describe(TEN, quantity(TEN, 5, np.random.default_rng(0))).counts
    for row in counts[counts.sum(1) > 50]:
        assert chisquare(row).pvalue > 1e-3


@given(st.integers(1, 300), st.integers(1, 40), st.floats(1e-3, 1e308), st.integers(0, 9), st.integers(0, 2**32))
def test_every_sample_once_and_nobody_too_few(samples: int, clients: int, beta: float, least: int, seed: int) -> None:
    try:
        parts = quantity(np.zeros(samples), clients, np.random.default_rng(seed), beta, least)
    except ConfigError:
        parts = []
    if not parts:
        assert least > 0  # else there is nothing to refuse
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert len(parts) == clients
    assert min(map(len, parts)) >= least
    assert all((np.diff(p) > 0).all() for p in parts)


def test_a_large_beta_makes_all_alike_and_a_small_one_leaves_most_to_one() -> None:
    sizes = [sorted(len(p) for p in quantity(TEN, 5, np.random.default_rng(0), b, 0)) for b in (1e300, 1e-2)]
    assert sizes[0] == [200] * 5
    assert sizes[1][-1] > 900


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beta": 0.0}, "partition.beta: 0.0 is not a number above 0"),
        ({"beta": float("nan")}, "partition.beta: nan"),
        ({"min_size": -1}, "partition.min_size: -1 is too small"),
        ({"min_size": 101}, "partition=quantity: 10 clients of 101 samples need 1010 samples, there are 1000"),
        ({"beta": 1e-3}, f"partition=quantity: in {DRAWS:,} draws with beta=0.001"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantity(TEN, 10, np.random.default_rng(0), **settings)  # type: ignore[arg-type]


def test_fifty_clients_of_few_samples_are_found_among_many_draws() -> None:
    sizes = [len(p) for p in quantity(np.zeros(1437), 50, np.random.default_rng(0))]  # the quickstart's
    assert min(sizes) >= 1
