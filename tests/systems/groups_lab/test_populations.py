"""Hidden populations: who is in which, what they are dealt, and how they see it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.partitioning import sample_like
from mutirao.systems.groups_lab.populations import (
    draw_populations,
    make_clients,
    partition_populations,
    true_groups,
    turn,
    view,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 8))
def test_skewed_populations_get_all_samples_once_and_mostly_their_own_classes(
    seed: int, populations: int, each: int
) -> None:
    draw = np.random.default_rng(seed)
    labels = draw.permutation(np.repeat(np.arange(10), 200))
    who = draw_populations(each * populations, populations, draw)
    assert np.bincount(who).tolist() == [each] * populations
    parts = partition_populations("skewed", labels, who, draw)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(2000))
    if populations > 1:
        shares = np.array([[np.mean(np.isin(labels[p], c)) for c in range(10)] for p in parts])
        by_population = np.array([shares[who == g].mean(0) for g in range(populations)])
        assert ((by_population / by_population.sum(0)).max(0) > 0.7).all(), "each class has a home"


def test_a_population_sees_its_own_world() -> None:
    x, y = np.arange(2 * 9, dtype=np.float32).reshape(2, 9), np.array([0, 2])
    renaming = np.array([1, 2, 0])
    assert view("permuted", x, y, 1, 3, renaming)[1].tolist() == [1, 0]
    assert view("permuted", x, y, 0, 3, renaming)[1].tolist() == [0, 2]  # the first sees things as they are
    quarter = view("rotated", x, y, 1, 4, renaming)[0].reshape(2, 3, 3)
    assert quarter == pytest.approx(np.rot90(x.reshape(2, 3, 3), 1, (1, 2)), abs=1e-4)
    assert view("none", x, y, 2, 3, renaming)[0] is x
    with pytest.raises(ConfigError, match="not square"):
        turn(np.zeros((2, 7), np.float32), 90)


def test_test_samples_have_the_clients_own_mix_and_its_own_names() -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    kept = sample_like(labels, np.array([1, 1, 1, 3]), 40, draw)
    assert np.bincount(labels[kept], minlength=4).tolist() == [0, 30, 0, 10]
    x, y = draw.normal(size=(400, 4)).astype(np.float32), labels
    parts = [np.arange(0, 400, 2), np.arange(1, 400, 2)]
    clients = make_clients("permuted", (x, y), (x, y), parts, [0, 1], seed=0, most=50, most_tests=40)
    assert [len(c.train) for c in clients.values()] == [50, 50]
    second = clients["c1"]
    renaming = {int(a): int(b) for a, b in zip(y[second.train.index], second.train.y[second.train.index], strict=True)}
    for row, label in zip(second.test.x.numpy(), second.test.y.tolist(), strict=True):
        source = int(np.flatnonzero((x == row).all(1))[0])
        assert renaming[int(y[source])] == label, "trained and judged by the same names"


def test_clients_with_the_same_classes_belong_together() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    parts = [np.array([0, 2]), np.array([4]), np.array([1, 3]), np.array([5])]
    assert true_groups(parts, labels) == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="3 clients cannot form 4 populations"):
        draw_populations(3, 4, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="3 classes cannot be assigned to 4"):
        partition_populations("skewed", labels, np.arange(4), np.random.default_rng(0))
