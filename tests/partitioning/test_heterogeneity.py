"""The figures people quote of a partition, beside SciPy's and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cityblock
from scipy.stats import entropy

from mutirao.partitioning import describe, dirichlet

LABELS = [0, 0, 0, 0, 1, 1, 2, 2]
PARTS = [[0, 1, 4, 6], [2, 3], [5, 7]]


def test_by_hand() -> None:
    found = describe(LABELS, PARTS)
    assert found.entropies.tolist() == pytest.approx([1.5, 0.0, 1.0])
    assert found.movers.tolist() == pytest.approx([0.0, 1.0, 1.0])  # of shares 1/2, 1/4, 1/4
    assert found.size_ratio == 2.0
    f = found.figures()
    assert (f["smallest"], f["median"], f["largest"]) == (2, 2.0, 4)
    assert (f["classes_fewest"], f["classes_most"], f["classes_mean"]) == (1, 3, 2.0)
    assert f["label_entropy"] == pytest.approx(2.5 / 3)
    assert f["label_entropy_most"] == pytest.approx(math.log2(3))
    assert (f["emd"], f["emd_largest"], f["total_variation"]) == pytest.approx((2 / 3, 1.0, 1 / 3))
    assert f["gini"] == pytest.approx(8 / (2 * 9 * 8 / 3))  # sum of |x_i - x_j| over all pairs is 8


def test_a_client_without_samples_makes_the_ratio_infinite_and_counts_in_no_mean() -> None:
    f = describe(LABELS, [*PARTS, []]).figures()
    assert f["size_ratio"] is None
    assert f["label_entropy"] == pytest.approx(2.5 / 3)
    assert f["smallest"] == 0
    nobody = describe(LABELS, [[], []]).figures()
    assert (nobody["emd"], nobody["emd_largest"], nobody["label_entropy"]) == (0.0, 0.0, 0.0)


@given(st.integers(2, 8), st.integers(1, 9), st.floats(0.05, 50), st.integers(0, 2**32))
def test_as_scipy_has_them(classes: int, clients: int, alpha: float, seed: int) -> None:
    labels = np.repeat(np.arange(classes), 30)
    parts = dirichlet(labels, clients, alpha, np.random.default_rng(seed), min_size=0)
    found = describe(labels, parts)
    whole = np.full(classes, 1 / classes)
    for k, part in enumerate(parts):
        if not len(part):
            assert np.isnan(found.entropies[k])
            continue
        shares = np.bincount(labels[part], minlength=classes) / len(part)
        assert found.entropies[k] == pytest.approx(entropy(shares, base=2), abs=1e-12)
        assert found.movers[k] == pytest.approx(cityblock(shares, whole), abs=1e-12)
        assert 0 <= found.distances[k] <= 1
