import doctest
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

import mutirao.partitioning
from mutirao.config import Part, build, complete_part
from mutirao.errors import ConfigError
from mutirao.partitioning import (
    NAMES,
    by_class,
    by_key,
    describe,
    dirichlet,
    iid,
    k_classes,
    largest_similar_size,
    natural,
    rare,
    sample_like,
    shards,
    split_test_set,
)

TEN = np.repeat(np.arange(10), 100)
labels_lists = st.lists(st.integers(0, 6), min_size=1, max_size=120)
seeds = st.integers(0, 2**32)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_each_once(parts, samples):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    for part in parts:
        assert part.dtype == np.intp
        assert (np.diff(part) > 0).all()


def or_refused(deal):
    """The partition, or None if it was refused in one line."""
    try:
        return deal()
    except ConfigError as error:
        refusal = str(error)
    assert refusal.count("\n") == 0
    assert len(refusal) > 20
    return None


@given(labels_lists, st.integers(1, 40), st.integers(0, 4), st.integers(0, 4), seeds)
def test_a_rare_class_is_with_its_holders_alone_and_they_have_nothing_else(labels, clients, classes, holders, seed):
    parts = or_refused(lambda: rare(labels, clients, rng(seed), classes, holders))
    if parts is None:
        return
    y = np.array(labels)
    held = np.concatenate(parts)
    assert len(parts) == clients
    assert len(set(held.tolist())) == len(held)  # nobody shares a sample
    of = [set(y[part].tolist()) for part in parts]
    alone = [
        c for c in set(labels) if sum(c in mine for mine in of) == holders and all(len(m) == 1 for m in of if c in m)
    ]
    assert len(alone) >= classes
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) <= len(labels) // clients


def test_rare_classes_and_their_holders_are_drawn():
    firsts = [describe(TEN, rare(TEN, 50, rng(seed))).counts for seed in range(40)]
    few = [np.flatnonzero((counts > 0).sum(0) == 3).tolist() for counts in firsts]
    assert all(len(two) == 2 for two in few)
    assert {c for two in few for c in two} == set(range(10))
    holders = [np.flatnonzero(counts[:, two].sum(1)).tolist() for counts, two in zip(firsts, few, strict=True)]
    assert {len(six) for six in holders} == {6}
    assert len({i for six in holders for i in six}) > 45
    for wrong in ({"classes": 10}, {"holders": 25}, {"classes": 0}, {"holders": 0}):
        with pytest.raises(ConfigError):
            rare(TEN, 50, rng(), **wrong)


def test_the_examples_in_the_docs_are_true():
    result = doctest.testmod(mutirao.partitioning)
    assert result.attempted > 10
    assert result.failed == 0


@given(labels_lists, st.integers(1, 130), seeds)
def test_iid_deals_every_sample_once_in_equal_sizes(labels, clients, seed):
    parts = or_refused(lambda: iid(labels, clients, rng(seed)))
    assert (parts is None) == (clients > len(labels))
    if parts is not None:
        assert_each_once(parts, len(labels))
        assert len(parts) == clients
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labels_lists, st.integers(1, 30), st.floats(1e-300, 1e308), st.integers(0, 5), seeds)
def test_dirichlet_deals_every_sample_once_and_nobody_too_few(labels, clients, alpha, min_size, seed):
    parts = or_refused(lambda: dirichlet(labels, clients, alpha, rng(seed), min_size=min_size))
    if clients * min_size > len(labels):
        assert parts is None
    if min_size == 0 or (clients == 1 and min_size <= len(labels)):
        assert parts is not None
    if parts is not None:
        assert_each_once(parts, len(labels))
        assert len(parts) == clients
        assert min(map(len, parts)) >= min_size


@given(labels_lists, st.integers(1, 30), st.floats(1e-300, 1e308), st.integers(1, 40), seeds)
def test_dirichlet_of_equal_sizes_is_exact_whenever_there_are_enough_samples(labels, clients, alpha, size, seed):
    parts = or_refused(lambda: dirichlet(labels, clients, alpha, rng(seed), size=size))
    assert (parts is None) == (clients * size > len(labels))
    if parts is not None:
        assert [len(p) for p in parts] == [size] * clients
        assert len(np.unique(np.concatenate(parts))) == clients * size


@given(labels_lists, st.integers(1, 30), st.integers(1, 5), seeds)
def test_shards_deals_every_sample_once(labels, clients, per_client, seed):
    parts = or_refused(lambda: shards(labels, clients, rng(seed), per_client))
    assert (parts is None) == (clients * per_client > len(labels))
    if parts is not None:
        assert_each_once(parts, len(labels))
        assert max(map(len, parts)) - min(map(len, parts)) <= per_client


@given(labels_lists, st.integers(1, 30), st.integers(1, 7), seeds)
def test_by_class_gives_whole_disjoint_sets(labels, clients, classes, seed):
    parts = or_refused(lambda: by_class(labels, clients, rng(seed), classes))
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) % classes:
        return  # they overlap
    if clients % (len(counts) // classes):
        assert parts is None
        return
    owners = clients // (len(counts) // classes)
    assert (parts is None) == (counts.min() < owners)
    if parts is not None:
        assert_each_once(parts, len(labels))
        sets = [frozenset(np.asarray(labels)[p]) for p in parts]
        assert all(len(s) == classes for s in sets)
        assert all(a == b or not a & b for a in sets for b in sets)
        assert all(sets.count(s) == owners for s in sets)


@given(labels_lists, st.integers(1, 30), st.integers(1, 7), seeds)
def test_k_classes_gives_so_many_classes_and_leaves_none_out(labels, clients, classes, seed):
    parts = or_refused(lambda: k_classes(labels, clients, rng(seed), classes))
    counts = np.unique(labels, return_counts=True)[1]
    if classes > len(counts) or clients * classes < len(counts):
        assert parts is None
    elif counts.min() >= clients:
        assert parts is not None
    if parts is not None:
        assert_each_once(parts, len(labels))
        summary = describe(labels, parts)
        assert (summary.classes_per_client == classes).all()
        for column in summary.counts.T:  # shared evenly by the owners
            assert np.ptp(column[column > 0]) <= 1


@given(
    st.lists(st.sampled_from(["ana", "bia", "caio", "davi", "eva"]), min_size=1, max_size=60), st.integers(1, 7), seeds
)
def test_by_key_keeps_every_key_whole(keys, clients, seed):
    parts = or_refused(lambda: by_key(keys, clients, rng(seed)))
    assert (parts is None) == (clients > len(set(keys)))
    if parts is not None:
        assert_each_once(parts, len(keys))
        held = [set(np.asarray(keys)[p]) for p in parts]
        assert len(parts) == clients
        assert sum(map(len, held)) == len(set(keys))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_a_configuration_is_called_the_same_way_and_depends_on_the_generator_alone(name):
    partition = build("partition", complete_part("partition", Part(name)))
    parts, again, other = (partition(TEN, clients=10, rng=rng(seed)) for seed in (5, 5, 6))
    if name == "rare":  # which leaves most of a rare class with nobody
        assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts)) < len(TEN)
    else:
        assert_each_once(parts, len(TEN))
    assert len(parts) == 10
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    changed = not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    assert changed == (name not in ("by_key", "natural"))  # ten keys for ten clients leave nothing to chance


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("dirichlet", "alpha", 0.0),
        ("dirichlet", "alpha", -1.0),
        ("dirichlet", "alpha", float("nan")),
        ("dirichlet", "alpha", float("inf")),
        ("dirichlet", "min_size", -1),
        ("dirichlet", "size", 0),
        ("dirichlet", "size", 101),
        ("shards", "per_client", 0),
        ("by_class", "classes", 0),
        ("by_class", "classes", 3),
        ("k_classes", "classes", 0),
        ("k_classes", "classes", 11),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, setting, value):
    with pytest.raises(ConfigError, match=rf"partition(\.{setting}\b|={name}\b)"):
        build("partition", Part(name, {setting: value}))(TEN, clients=10, rng=rng())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("labels", "clients"), [(TEN, 0), ([], 1), (TEN.reshape(10, 100), 2), (3, 1)])
def test_no_clients_no_samples_and_tables_are_refused(name, labels, clients):
    with pytest.raises(ConfigError):
        NAMES[name](labels, clients=clients, rng=rng())


def test_refusals_say_what_would_be_right():
    cases = {
        "take at most 500 clients or 1 samples a client": lambda: dirichlet(TEN, 600, 1.0, rng(), min_size=2),
        "right would be 4 to 10": lambda: by_class(TEN, 12, rng(), classes=3, sets=3),
        "a multiple of 3 clients, such as 9": lambda: by_class(TEN, 10, rng(), classes=4),
        "a multiple of 5 clients, such as 10": lambda: by_class(TEN, 12, rng(), classes=2),
        "at least 5 clients or classes=3": lambda: k_classes(TEN, 4, rng(), classes=2),
        "take at most 10 clients": lambda: by_key(TEN, 11),
    }
    for right, deal in cases.items():
        with pytest.raises(ConfigError, match=re.escape(right)):
            deal()


def test_what_a_hopeless_alpha_is_told_to_do_instead_works():
    with pytest.raises(ConfigError, match=r"larger alpha.*size=10$"):
        dirichlet(TEN, 100, 1e-4, rng())
    assert_each_once(dirichlet(TEN, 100, 1e-4, rng(), size=10), 1000)
    assert_each_once(dirichlet(TEN, 100, 1e-4, rng(), min_size=0), 1000)
    assert_each_once(dirichlet(TEN, 100, 1.0, rng()), 1000)


@pytest.mark.parametrize("size", [None, 80, 100])
def test_skew_falls_as_alpha_grows_from_one_class_each_to_all_alike(size):
    skew = [describe(TEN, dirichlet(TEN, 10, a, rng(1), size=size)).heterogeneity for a in (0.01, 0.3, 10.0, 1e6)]
    assert skew == sorted(skew, reverse=True)
    assert skew[0] > 0.75
    assert skew[-1] < 0.15


def test_equal_sizes_with_a_large_alpha_follow_the_shares_of_unequal_classes():
    labels = np.repeat([0, 1, 2], [8000, 1500, 500])
    summary = describe(labels, dirichlet(labels, 20, 1e6, rng(), size=200))
    assert summary.counts.sum(0) / 4000 == pytest.approx([0.8, 0.15, 0.05], abs=0.02)
    assert summary.left_out == 6000


def test_a_small_class_is_not_rounded_away_from_the_same_clients_each_time():
    labels = np.repeat(np.arange(40), 5)  # five samples a class for ten clients: rounding alone would favour some
    assert min(map(len, dirichlet(labels, 10, 1e6, rng()))) >= 8


def published_balance(labels, clients, alpha, draw):
    """Sizes as the code of NIID-Bench deals classes: who has an even share is left out of the next one."""
    held = np.zeros(clients, int)
    for c in np.unique(labels):
        many = int((labels == c).sum())
        shares = draw.dirichlet([alpha] * clients) * (held < len(labels) / clients)
        ends = [int(e) for e in np.cumsum(shares / shares.sum()) * many]
        held += np.diff([0, *ends[:-1], many])
    return held


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_balance_deals_sizes_as_published(alpha):
    draw, ours, theirs, plain = np.random.RandomState(0), [], [], []
    for seed in range(300):
        ours.append(sorted(map(len, dirichlet(TEN, 5, alpha, rng(seed), min_size=0, balance=True))))
        plain.append(sorted(map(len, dirichlet(TEN, 5, alpha, rng(seed), min_size=0))))
        theirs.append(sorted(published_balance(TEN, 5, alpha, draw)))
    for k in range(5):
        assert ks_2samp(np.array(ours)[:, k], np.array(theirs)[:, k]).pvalue > 1e-3
    assert ks_2samp(np.array(plain)[:, -1], np.array(theirs)[:, -1]).pvalue < 1e-3  # the test can tell
    assert np.max(ours) < 1000 / 5 + 100  # nobody with an even share gets of another class


@given(labels_lists, st.integers(1, 30), st.floats(1e-300, 1e308), seeds)
def test_balance_deals_every_sample_once(labels, clients, alpha, seed):
    assert_each_once(dirichlet(labels, clients, alpha, rng(seed), min_size=0, balance=True), len(labels))


def test_shards_gives_most_clients_two_classes():
    summary = describe(TEN, shards(TEN, 50, rng()))
    assert summary.classes_per_client.max() <= 2
    assert (summary.sizes == 20).all()


def test_by_class_makes_five_pairs_of_two_clients_that_differ_by_seed():
    pairs = set()
    for seed in range(5):
        counts = describe(TEN, by_class(TEN, 10, rng(seed))).counts
        assert (counts[counts > 0] == 50).all()
        pairs.add(tuple(map(tuple, counts > 0)))
    assert len(pairs) == 5


def test_odd_samples_go_to_different_clients():
    labels = np.repeat(np.arange(4), 5)  # four classes of five for two clients that own all of them
    assert [len(p) for p in by_class(labels, 2, rng(), classes=4)] == [10, 10]


def test_k_classes_draws_sets_that_overlap():
    summary = describe(TEN, k_classes(TEN, 50, rng(), classes=3))
    assert len({tuple(row > 0) for row in summary.counts}) > 20
    assert summary.counts.any(0).all()


def test_by_key_balances_whole_keys_by_size():
    keys = np.repeat(np.arange(100), rng().integers(1, 50, 100))
    sizes = [len(p) for p in by_key(keys, 7, rng())]
    assert max(sizes) - min(sizes) <= 3
    assert [len(p) for p in by_key(keys)] == np.bincount(keys).tolist()


def test_labels_may_be_words():
    words = np.array(["cat", "dog", "frog", "bird"])[rng().integers(0, 4, 200)]
    codes = np.unique(words, return_inverse=True)[1]
    for deal in (iid, shards, by_class, k_classes):
        for a, b in zip(deal(words, 4, rng()), deal(codes, 4, rng()), strict=True):
            assert np.array_equal(a, b)
    assert describe(words, iid(words, 4, rng())).classes == ("bird", "cat", "dog", "frog")


def test_describe_counts_and_measures():
    summary = describe([0, 0, 0, 1, 1, 2], [[0, 1], [2, 3, 4], []])
    assert summary.counts.tolist() == [[2, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert summary.sizes.tolist() == [2, 3, 0]
    assert summary.classes_per_client.tolist() == [1, 2, 0]
    assert summary.distances == pytest.approx([1 / 2, 1 / 3, np.nan], nan_ok=True)
    assert summary.heterogeneity == pytest.approx(5 / 12)
    text = str(summary)
    assert "3 clients, 5 samples of 3 classes, 1 left out" in text
    assert "0 to 3, median 2, 1 client with none" in text
    with pytest.raises(ConfigError):
        describe([0, 1], [])


@given(st.integers(2, 10), seeds)
def test_the_distance_is_between_alike_and_one_class_each(classes, seed):
    labels = np.repeat(np.arange(classes), 20)
    assert describe(labels, by_key(labels)).heterogeneity == pytest.approx(1 - 1 / classes)
    assert describe(labels, [np.arange(len(labels))]).heterogeneity == pytest.approx(0)
    assert 0 <= describe(labels, dirichlet(labels, 4, 0.3, rng(seed))).heterogeneity <= 1 - 1 / classes


@settings(max_examples=5)
@given(seeds)
def test_a_thousand_clients(seed):
    labels = np.repeat(np.arange(10), 5000)
    assert_each_once(dirichlet(labels, 1000, 0.5, rng(seed)), 50_000)
    assert_each_once(dirichlet(labels, 1000, 0.01, rng(seed), size=50), 50_000)


def test_own_test_samples_have_the_shares_of_the_clients_own_classes():
    y = np.repeat([0, 1, 2], [60, 30, 10])
    y_test = np.repeat([0, 1, 2], 200)
    rows = split_test_set(y, [np.arange(100), np.arange(60), np.arange(59, 91), np.arange(0)], y_test, seed=0, most=50)
    assert [np.bincount(y_test[r], minlength=3).tolist() for r in rows[:2]] == [[30, 15, 5], [50, 0, 0]]
    assert np.bincount(y_test[rows[2]], minlength=3).tolist() == [2, 47, 2]  # 1/32, 30/32, 1/32 of fifty, each rounded
    assert all(len(set(r.tolist())) == len(r) for r in rows)
    assert not len(rows[3])  # who trains on nothing is judged by nothing
    assert [len(r) for r in split_test_set(y, [np.arange(100)], y_test, seed=0, most=1)] == [1]


def test_each_user_is_a_client_and_of_many_users_some_are_drawn() -> None:
    users = np.array(["rio", "sul", "rio", "ana", "sul", "bia"])
    of = [{users[i] for i in part} for part in natural(users, 50, np.random.default_rng(0))]
    assert of == [{"ana"}, {"bia"}, {"rio"}, {"sul"}]
    drawn = [natural(users, 2, np.random.default_rng(seed)) for seed in range(20)]
    assert {len(parts) for parts in drawn} == {2}
    assert all(len(set(users[part])) == 1 for parts in drawn for part in parts)
    assert {users[part[0]] for parts in drawn for part in parts} == set(users)


@given(labels_lists, st.integers(1, 30), st.integers(1, 7), st.integers(0, 8), seeds)
def test_sets_of_classes_that_overlap_are_shared_by_equally_many(labels, clients, classes, sets, seed):
    parts, total = or_refused(lambda: by_class(labels, clients, rng(seed), classes, sets=sets)), len(set(labels))
    many = sets or -(-total // classes)
    if not 1 <= classes <= total or not -(-total // classes) <= many <= total or clients % many:
        assert parts is None
    if parts is None:
        return
    assert_each_once(parts, len(labels))
    held = [frozenset(np.asarray(labels)[p]) for p in parts]
    assert all(len(s) == classes for s in held)
    assert frozenset().union(*held) == set(labels)
    kinds = len(set(held))
    assert kinds == (many if classes < total else 1)
    assert all(held.count(s) == clients // kinds for s in held)


def test_three_classes_of_ten_a_client_make_a_ring() -> None:
    y = np.repeat(np.arange(10), 60)
    parts = by_class(y, 10, rng(), classes=3, sets=5, order="sorted")
    ring = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [0, 8, 9]]
    assert [np.unique(y[p]).tolist() for p in parts] == [s for s in ring for _ in range(2)]
    assert np.bincount(y[parts[0]], minlength=10)[:3].tolist() == [15, 30, 15]  # classes 0 and 2 are of four clients


def test_classes_in_order_go_to_clients_in_order() -> None:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    for seed in (0, 1):
        parts = by_class(y, 10, np.random.default_rng(seed), order="sorted")
        assert [np.unique(y[p]).tolist() for p in parts] == [[2 * (c // 2), 2 * (c // 2) + 1] for c in range(10)]
    halves = by_class(y, 10, np.random.default_rng(0), classes=5, order="sorted")
    assert [np.unique(y[p]).tolist() for p in halves] == [[*range(5)]] * 5 + [[*range(5, 10)]] * 5


def test_as_many_test_samples_as_keep_the_mix_of_a_client_whose_class_is_scarce():
    labels, mine = np.repeat(np.arange(10), 36), np.repeat([3, 5], [95, 5])
    drawn = labels[sample_like(labels, mine, largest_similar_size(labels, mine, 500), np.random.default_rng(0))]
    assert np.bincount(drawn, minlength=10).tolist() == [0, 0, 0, 35, 0, 2, 0, 0, 0, 0]
