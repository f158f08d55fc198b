import doctest
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao import partitioning
from mutirao.config import Part, build
from mutirao.core import moments
from mutirao.core.moments import combine_moments, measure_moments, standardise
from mutirao.errors import ConfigError
from mutirao.partitioning import describe
from mutirao.systems.ranking import query_partition
from mutirao.systems.ranking.query_partition import (
    by_query,
    by_query_groups,
    fold_rows,
    partition_documents,
)
from mutirao.systems.ranking.synthetic_queries import mslr_like

SPLITS = ("by_query", "by_query_groups")


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def data():
    return mslr_like(200, rng(1), documents=30)


def owners(parts, rows):
    owner = np.full(rows, -1)
    for client, own in enumerate(parts):
        assert np.all(np.diff(own) > 0)
        assert np.all(owner[own] == -1)
        owner[own] = client
    assert owner.min() == 0
    return owner


def keeps_queries_whole(parts, queries):
    owner = owners(parts, len(queries))
    return all(len(np.unique(owner[queries == q])) == 1 for q in np.unique(queries))


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(query_partition).failed == 0


@pytest.mark.parametrize("name", SPLITS)
def test_every_document_has_one_owner_and_chance_comes_from_the_generator(data, name):
    def parts(seed):
        return partition_documents(query_partition.NAMES[name], data.grades, data.queries, 20, rng(seed), data.x)

    owners(parts(0), len(data))
    assert all(len(p) for p in parts(0))
    assert all(np.array_equal(a, b) for a, b in zip(parts(0), parts(0), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts(0), parts(1), strict=True))


def test_queries_stay_whole_and_are_assigned_evenly(data):
    parts = by_query(data.grades, data.queries, 30, rng())
    assert keeps_queries_whole(parts, data.queries)
    assert {len(np.unique(data.queries[p])) for p in parts} == {6, 7}
    assert describe(data.grades, parts).heterogeneity < 0.2


@pytest.mark.parametrize("similar", ["grades", "features"])
def test_groups_of_queries_are_whole_and_skewed(data, similar):
    def skew(alpha):
        parts = by_query_groups(data.grades, data.queries, data.x, 10, rng(0), alpha=alpha, similar=similar)
        assert keeps_queries_whole(parts, data.queries)
        sizes = np.array([len(np.unique(data.queries[p])) for p in parts])
        mean = np.log1p(np.abs(data.x.astype(float))).mean(0)
        means = np.stack([np.log1p(np.abs(data.x[p].astype(float))).mean(0) for p in parts])
        return sizes.std(), describe(data.grades, parts).heterogeneity, np.abs(means / mean - 1).mean()

    skewed, even = skew(0.1), skew(1000.0)
    assert skewed[0] > 5 * even[0]
    assert skewed[1 if similar == "grades" else 2] > 1.5 * even[1 if similar == "grades" else 2]


def test_every_client_of_query_groups_has_a_query():
    queries = np.repeat(np.arange(50), 4)
    parts = by_query_groups(np.arange(200) % 3, queries, None, 50, rng(), alpha=0.05)
    assert [len(p) for p in parts] == [4] * 50


def test_queries_may_be_scattered_and_have_any_ids():
    queries = np.array(["b", "a", "b", "c", "a", "d"])
    for parts in (
        by_query([0, 1, 2, 0, 1, 0], queries, 2, rng()),
        by_query_groups([0, 1, 2, 0, 1, 0], queries, None, 2, rng(), groups=2),
    ):
        assert keeps_queries_whole(parts, queries)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: by_query([0, 1], [1, 1], 2, rng()), "2 clients cannot share 1 queries; take at most 1 clients"),
        (lambda: by_query([0, 1], [1], 1, rng()), "expected one label and one query a document"),
        (lambda: by_query([], [], 1, rng()), "expected one label and one query a document"),
        (lambda: by_query([0, 1], [1, 2], 0, rng()), "clients: 0 is too small"),
        (lambda: by_query_groups([0, 1], [1, 2], None, 2, rng()), "groups: 10 is not between 1 and 2"),
        (
            lambda: by_query_groups([0, 1], [1, 2], None, 2, rng(), groups=1, similar="features"),
            "needs the features of the documents",
        ),
        (lambda: by_query_groups([0, 1], [1, 2], None, 2, rng(), groups=1, similar="x"), "'x' is not one of grades"),
        (lambda: fold_rows([1, 2, 3, 4, 5], 6), "fold: 6 is not between 1 and 5"),
        (lambda: fold_rows([1, 1, 1, 1, 1, 1], 1), "1 queries cannot be cut into five folds"),
    ],
)
def test_what_cannot_be_split_is_refused(call, what):
    with pytest.raises(ConfigError, match=what):
        call()


def test_plain_partitions_work_too_and_keys_are_queries(data):
    parts = partition_documents(
        build("partition", Part("dirichlet", {"alpha": 1.0})), data.grades, data.queries, 5, rng()
    )
    assert all(
        np.array_equal(a, b) for a, b in zip(parts, partitioning.dirichlet(data.grades, 5, 1.0, rng()), strict=True)
    )
    assert keeps_queries_whole(
        partition_documents(partitioning.by_key, data.grades, data.queries, 5, rng()), data.queries
    )
    home = (
        "mutirao.systems.ranking.query_partition"  # where the recipe's own partitions are, with which one's own must go
    )
    dotted = build("partition", Part(f"{home}:by_query_groups", {"alpha": 0.3}, home))
    assert keeps_queries_whole(partition_documents(dotted, data.grades, data.queries, 5, rng(), data.x), data.queries)


def test_folds_go_round_as_those_of_letor(data):
    tests = []
    for fold in range(1, 6):
        train, vali, test = (set(data.queries[rows].tolist()) for rows in fold_rows(data.queries, fold))
        assert len(train | vali | test) == len(train) + len(vali) + len(test) == 200
        assert (len(train), len(vali), len(test)) == (120, 40, 40)
        tests.append(test)
    assert len(set.union(*tests)) == 200
    assert fold_rows(data.queries, 2)[2].tolist() == np.flatnonzero(data.queries < 40).tolist()


# ---- standardisation


def close(a, b):
    return np.allclose(a, b, rtol=1e-9, atol=0)


def test_statistics_of_clients_equal_those_of_the_pool(data):
    wide = data.x.astype(np.float64)
    std = wide.std(0)
    for clients in (1, 7, 40):
        parts = by_query(data.grades, data.queries, clients, rng())
        mean, spread = combine_moments([measure_moments(data.x[p]) for p in parts])
        assert close(mean, wide.mean(0))
        assert close(spread, np.where(std > 0, std, 1))


def test_only_three_things_are_sent_and_they_are_enough(data):
    sent = [measure_moments(data.x[p]) for p in by_query(data.grades, data.queries, 10, rng())]
    for one in sent:
        assert {k: (v.shape, v.dtype.name) for k, v in one.items()} == {
            "count": ((), "int64"),
            "sum": ((136,), "float64"),
            "squares": ((136,), "float64"),
        }
    received = [{k: np.frombuffer(v.tobytes(), v.dtype).reshape(v.shape) for k, v in one.items()} for one in sent]
    for a, b in zip(combine_moments(received), combine_moments(sent), strict=True):
        assert np.array_equal(a, b)


def test_the_order_of_clients_and_empty_ones_do_not_matter(data):
    sent = [measure_moments(data.x[p]) for p in by_query(data.grades, data.queries, 13, rng())]
    there = combine_moments(sent)
    back = combine_moments([*reversed(sent), measure_moments(data.x[:0])])
    assert all(np.array_equal(a, b) for a, b in zip(there, back, strict=True))


def test_a_large_mean_does_not_cost_digits():
    x = 1e8 + rng().standard_normal((5000, 3))
    mean, std = combine_moments([measure_moments(x[:17]), measure_moments(x[17:2000]), measure_moments(x[2000:])])
    assert close(mean, x.mean(0))
    assert close(std, x.astype(np.longdouble).std(0).astype(np.float64))
    naive = np.sqrt(np.maximum(0, (x**2).mean(0) - x.mean(0) ** 2))
    assert not close(naive, x.std(0))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_gives_the_pooled_statistics(sizes, shift, scale, seed):
    x = shift + scale * rng(seed).standard_normal((sum(sizes), 2))
    cuts = np.cumsum([0, *sizes])
    mean, std = combine_moments([measure_moments(x[a:b]) for a, b in pairwise(cuts)])
    assert np.allclose(mean, x.mean(0), rtol=1e-9, atol=1e-9 * scale)
    if len(x) > 1:
        assert np.allclose(std, x.std(0), rtol=1e-8)  # numpy's own way loses some digits where the mean is large


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3e7, 1e-20])
def test_a_constant_feature_has_deviation_one(value):
    x = np.full((1001, 1), value, np.float32)
    mean, std = combine_moments([measure_moments(x[:3]), measure_moments(x[3:400]), measure_moments(x[400:])])
    assert std == 1.0
    assert np.abs(standardise(x, mean, std)).max() <= 1e-8 * abs(value)


def test_applied_features_have_mean_zero_and_deviation_one(data):
    for transform in ("none", "log"):
        mean, std = combine_moments([measure_moments(p, transform) for p in np.array_split(data.x, 9)])
        z = standardise(data.x, mean, std, transform)
        assert z.dtype == np.float32
        assert np.abs(z.mean(0, dtype=np.float64)).max() < 1e-5
        assert np.allclose(z.std(0, dtype=np.float64), 1, atol=1e-5)
        assert np.array_equal(
            standardise(data.x[77:78], mean, std, transform), z[77:78]
        )  # a row is itself in any company
        inplace = data.x.copy()
        assert standardise(inplace, mean, std, transform, out=inplace) is inplace
        assert np.array_equal(inplace, z)


def test_the_log_tames_tails_and_keeps_order_and_sign(data):
    values = np.array([-1e30, -5, -1e-9, 0, 1e-9, 5, 1e30])
    logged = moments.transform_features(values, "log")
    assert np.all(np.diff(logged) > 0)
    assert np.array_equal(np.sign(logged), np.sign(values))
    assert np.array_equal(logged, -logged[::-1])
    plain = standardise(data.x, *combine_moments([measure_moments(data.x)]))
    tame = standardise(data.x, *combine_moments([measure_moments(data.x, "log")]), "log")
    tails = [np.mean(z.astype(np.float64) ** 4, axis=0) for z in (plain, tame)]  # kurtosis: 3 if the feature is normal
    assert np.median(tails[1]) < np.median(tails[0]) / 3


def test_moments_that_make_no_sense_are_refused():
    good = measure_moments(np.ones((2, 3)))
    with pytest.raises(ConfigError, match="no client has samples"):
        combine_moments([measure_moments(np.ones((0, 3)))])
    with pytest.raises(ConfigError, match="different numbers of features"):
        combine_moments([good, measure_moments(np.ones((2, 4)))])
    for key, value in (("sum", np.nan), ("squares", np.inf), ("squares", -1.0)):
        with pytest.raises(ConfigError, match="not finite, or negative"):
            combine_moments([good, good | {key: np.full(3, value)}])
    with pytest.raises(ConfigError, match="one row a sample"):
        measure_moments(np.ones(3))
    with pytest.raises(ConfigError, match="'sqrt' is not one of none, log"):
        measure_moments(np.ones((2, 3)), "sqrt")
