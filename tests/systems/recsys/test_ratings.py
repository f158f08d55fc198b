"""Ratings are grouped by user and time, duplicates resolved, and parts of them stay consistent."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.ratings import (
    Ratings,
    Users,
    all_but_last,
    by_time,
    by_users,
    gather,
    join,
    plant,
    sample_known,
    split_ratings,
)

ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5), st.integers(0, 9)), min_size=1)


def made(rows: list[tuple[int, int, int, int]], known: Catalogue | None = None) -> Ratings:
    users, items, values, times = (np.array(column) for column in zip(*rows, strict=True))
    return gather(users, items, values.astype(float), times.astype(np.int64), known)


@given(ROWS)
def test_a_user_is_in_order_of_time_and_rates_an_item_once_the_latest_counting(rows: list) -> None:
    ratings = made(rows)
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for u, i, v, t in rows:
        if (u, i) not in latest or t >= latest[u, i][1]:
            latest[u, i] = (v, t)
    expected = sorted((u, t, i, v) for (u, i), (v, t) in latest.items())
    owners = [int(ratings.users[u]) for u in ratings.owners()]
    ids = [int(ratings.catalogue.ids[i]) for i in ratings.items]
    assert list(zip(owners, ratings.times.tolist(), ids, ratings.values.tolist(), strict=True)) == expected
    assert ratings.catalogue.counts.sum() == len(ratings)


def test_text_and_numbers_may_be_ids() -> None:
    ratings = gather(np.array(["bia", "ana"]), np.array(["y", "x"]), np.ones(2), np.zeros(2, np.int64))
    assert ratings.users == ("ana", "bia")
    assert ratings.catalogue.ids == ("x", "y")


def test_ratings_given_again_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        made([(1, 1, 3, 0), (1, 1, 4, 5)])
    assert "1 ratings were replaced by later ones" in caplog.text


def test_an_item_the_catalogue_does_not_know_is_kept_without_title(caplog: pytest.LogCaptureFixture) -> None:
    known = Catalogue(("1",), ("One (1999)",), np.array([1999], np.int32), np.zeros(1, np.int64))
    with caplog.at_level(logging.WARNING, "mutirao"):
        ratings = made([(1, 1, 3, 0), (1, 2, 4, 5)], known)
    assert ratings.catalogue.titles == ("One (1999)", "")
    assert "1 rated items are not in the catalogue, the first of them '2'" in caplog.text


def test_users_with_too_few_ratings_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        ratings = made([(1, 1, 3, 0), (2, 1, 4, 5), (2, 2, 4, 5)]).with_at_least(2)
    assert ratings.users == ("2",)
    assert "1 users with fewer than 2 ratings are left out, the first of them '1'" in caplog.text
    with pytest.raises(ConfigError, match="no user has 3 ratings"):
        ratings.with_at_least(3)


def test_no_ratings_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are no ratings"):
        gather(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


def test_implicit_feedback_keeps_what_was_liked() -> None:
    ratings = made([(1, 1, 3, 0), (1, 2, 5, 1), (2, 2, 4, 5)]).implicit(4)
    assert ratings.values.tolist() == [1, 1]
    assert ratings.counts().tolist() == [1, 1]
    assert ratings.catalogue.counts.tolist() == [0, 2]


@given(ROWS, st.data())
def test_users_taken_out_keep_their_ratings(rows: list, data: st.DataObject) -> None:
    ratings = made(rows)
    chosen = data.draw(st.lists(st.integers(0, len(ratings.users) - 1), unique=True))
    part = ratings.of_users(np.array(chosen, np.intp))
    population, all_of_them = Users(part), Users(ratings)
    for name in population:
        np.testing.assert_array_equal(population[name].items, all_of_them[name].items)
        np.testing.assert_array_equal(population[name].values, all_of_them[name].values)
        assert (np.diff(population[name].items) > 0).all()


def test_a_population_knows_its_users_only() -> None:
    population = Users(made([(1, 1, 3, 0), (1, 2, 4, 5)]))
    assert list(population) == ["1"]
    with pytest.raises(KeyError):
        population["2"]


def test_users_are_split_eighty_ten_ten_and_nobody_twice() -> None:
    ratings = plant(100, 60, np.random.default_rng(0))
    parts = by_users(ratings, np.random.default_rng(1))
    assert [len(p.users) for p in parts] == [80, 10, 10]
    assert sorted(u for p in parts for u in p.users) == sorted(ratings.users)
    with pytest.raises(ConfigError, match="9 users cannot be split"):
        by_users(ratings.of_users(np.arange(9)), np.random.default_rng(1))


def test_users_by_time_judges_those_who_came_last() -> None:
    ratings = plant(50, 30, np.random.default_rng(0))
    train, vali, test = split_ratings(ratings, "users_by_time", 0, seed=0)
    assert [len(part.users) for part in (train, vali, test)] == [40, 5, 5]
    firsts = [np.minimum.reduceat(part.times, part.offsets[:-1]) for part in (train, vali, test)]
    assert firsts[0].max() <= firsts[1].min()
    assert firsts[1].max() <= firsts[2].min()
    assert len({*train.users, *vali.users, *test.users}) == 50
    timeless = replace(ratings, times=np.zeros_like(ratings.times))
    with pytest.raises(ConfigError, match="have no times"):
        split_ratings(timeless, "users_by_time", 0, seed=0)


def test_over_five_folds_every_user_is_evaluated_once() -> None:
    ratings = plant(43, 30, np.random.default_rng(0))
    folds = [split_ratings(ratings, "users", fold, seed=7) for fold in range(1, 6)]
    assert sorted(name for _, _, test in folds for name in test.users) == sorted(ratings.users)
    for train, vali, test in folds:
        assert not {*train.users} & {*test.users}
        assert (len(train.users) + len(test.users), len(vali.users)) == (43, 0)
        assert len(test.users) in (8, 9)
    with pytest.raises(ConfigError, match="4 users cannot be split into 5 folds"):
        split_ratings(ratings.of_users(np.arange(4)), "users", 1, seed=0)
    with pytest.raises(ConfigError, match="use split=users"):
        split_ratings(ratings, "time", 1, seed=0)


def test_time_splits_every_user_early_ratings_first() -> None:
    ratings = plant(30, 60, np.random.default_rng(0))
    parts = by_time(ratings)
    assert sum(map(len, parts)) == len(ratings)
    for user in range(30):
        spans = [p.times[p.offsets[user] : p.offsets[user + 1]] for p in parts]
        assert spans[0].max() <= spans[1].min() <= spans[1].max() <= spans[2].min()
        assert abs(len(spans[0]) - 0.8 * ratings.counts()[user]) <= 1
    whole, first = join(parts[0], parts[2])
    assert len(whole) == len(parts[0]) + len(parts[2])
    np.testing.assert_array_equal(whole.where(first).items, parts[0].items)
    np.testing.assert_array_equal(whole.where(~first).times, parts[2].times)


@pytest.mark.parametrize("order", ["random", "time"])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_judged_users_have_something_known_and_something_to_judge(order: str, share: float) -> None:
    ratings = plant(30, 60, np.random.default_rng(0))
    known = sample_known(ratings, share, order, seed=3)
    counts = np.add.reduceat(known, ratings.offsets[:-1])
    assert counts.min() >= 1
    assert (counts < ratings.counts()).all()
    if share == 0.5:
        assert np.abs(counts - ratings.counts() / 2).max() <= 0.5
    if order == "time":
        for a, b in zip(ratings.offsets[:-1], ratings.offsets[1:], strict=True):
            assert (np.diff(known[a:b].astype(int)) <= 0).all()
    np.testing.assert_array_equal(known, sample_known(ratings, share, order, seed=3))


def test_leave_one_out_leaves_the_latest_out() -> None:
    ratings = plant(30, 60, np.random.default_rng(0))
    assert np.flatnonzero(~all_but_last(ratings)).tolist() == (ratings.offsets[1:] - 1).tolist()


def test_planted_ratings_look_like_ratings() -> None:
    ratings = plant(200, 100, np.random.default_rng(0))
    assert set(ratings.values.tolist()) == {1, 2, 3, 4, 5}
    assert ratings.counts().min() >= 20
    popular = np.sort(ratings.catalogue.counts)[::-1]
    assert popular[:20].sum() > 2 * popular[-20:].sum()
    again = plant(200, 100, np.random.default_rng(0))
    np.testing.assert_array_equal(ratings.values, again.values)


def test_cached_ratings_do_not_grow_with_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutirao.systems.recsys.ratings.CACHE_SIZE", 10)
    users = Users(plant(30, 40, np.random.default_rng(0)))
    first = {name: users[name] for name in users}
    assert len(users._tastes) <= 10
    assert all(np.array_equal(users[name].items, first[name].items) for name in users)
