import doctest

import numpy as np
import pytest

from mutirao.core.moments import combine_moments, measure_moments, standardise
from mutirao.errors import ConfigError
from mutirao.metrics import ndcg
from mutirao.systems.ranking import synthetic_queries
from mutirao.systems.ranking.letor import read_letor, write_letor
from mutirao.systems.ranking.synthetic_queries import SHARES, mslr_like


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def data():
    return mslr_like(400, rng())


def quality(data, seed=0):
    """nDCG@10 of ridge regression on tamed features, and of a random order, on queries it has not seen."""
    z = standardise(data.x, *combine_moments([measure_moments(data.x, "log")]), "log").astype(np.float64)
    test = data.queries % 4 == 0
    a, b = z[~test], data.grades[~test]
    weights = np.linalg.solve(a.T @ a + 100 * np.eye(a.shape[1]), a.T @ (b - b.mean()))
    labels = data.grades[test], data.queries[test]
    return ndcg(z[test] @ weights, *labels, k=10), ndcg(rng(seed).random(test.sum()), *labels, k=10)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(synthetic_queries).failed == 0


def test_it_looks_like_mslr(data):
    assert data.x.shape == (len(data), 136)
    assert (data.x.dtype, data.grades.dtype, data.queries.dtype) == ("f4", "i8", "i8")
    assert np.isfinite(data.x).all()
    assert np.allclose(np.bincount(data.grades) / len(data), SHARES, atol=1e-4)
    assert np.allclose(SHARES, [0.520, 0.322, 0.133, 0.018, 0.007], atol=5e-4)
    sizes = np.bincount(data.queries)
    assert len(sizes) == 400
    assert 105 < sizes.mean() < 135
    assert sizes.min() >= 1
    assert sizes.max() > 2.5 * sizes.mean()
    assert np.all(np.diff(data.queries) >= 0)
    assert data.query_ids.tolist() == list(range(1, 401))


def test_features_come_in_groups_with_heavy_tails(data):
    x = data.x.astype(np.float64)
    assert x.std(0).min() > 0
    tail = np.abs(x).max(0) / x.std(0)
    assert (tail > 20).sum() > 30  # 20 deviations out
    streams = x[:, :125].reshape(len(x), 25, 5)
    absent = streams[:, 2] == 0  # a stream without words has no figures of words either
    assert np.all(streams[:, 4:22].transpose(0, 2, 1)[absent] == 0)
    assert absent[:, 1].mean() > 0.5 > absent[:, 2].mean()
    within = x[:, 15] - (np.bincount(data.queries, x[:, 15]) / np.bincount(data.queries))[data.queries]
    assert np.abs(within).max() < 1e-3  # the rarity of its words belongs to the query
    assert set(np.unique(x[:, 95:100])) == {0.0, 1.0}


def test_the_generator_decides_all(data):
    again = mslr_like(400, rng())
    assert np.array_equal(again.x, data.x)
    assert np.array_equal(again.grades, data.grades)
    other = mslr_like(400, rng(1))
    assert len(other) != len(data) or not np.array_equal(other.x, data.x)


def test_difficulty_can_be_tuned(data):
    easy, usual, hard = (
        quality(d) for d in (mslr_like(400, rng(), difficulty=0), data, mslr_like(400, rng(), difficulty=1))
    )
    assert easy[0] > 0.85
    assert 0.4 < usual[0] < 0.55
    assert abs(hard[0] - hard[1]) < 0.05
    assert all(0.15 < chance < 0.3 for _, chance in (easy, usual, hard))


def test_queries_differ_in_how_good_their_documents_are(data):
    mean = np.bincount(data.queries, data.grades) / np.bincount(data.queries)
    assert 0.2 < mean.std() < 0.4


def test_it_can_be_written_and_read(tmp_path):
    data = mslr_like(5, rng(), documents=20)
    write_letor(tmp_path / "made.txt", data)
    back = read_letor(tmp_path / "made.txt", cache=False)
    assert np.array_equal(back.x, data.x)
    assert np.array_equal(back.grades, data.grades)
    assert np.array_equal(back.query_ids[back.queries], data.query_ids[data.queries])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"queries": 0}, "queries: 0 is too small"),
        ({"documents": 0}, "documents: 0 a query is not between"),
        ({"difficulty": 1.5}, "difficulty: 1.5 is not between 0 and 1"),
        ({"difficulty": float("nan")}, "difficulty: nan is not between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, what):
    with pytest.raises(ConfigError, match=what):
        mslr_like(**{"queries": 3, "rng": rng()} | settings)


def test_one_query_of_one_document_can_be_made():
    data = mslr_like(1, rng(), documents=1)
    assert data.x.shape[1] == 136
    assert len(data) >= 1
