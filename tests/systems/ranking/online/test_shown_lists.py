"""Lists contain every document once, features are scaled to 0 .. 1 in each, and rankings shown have our nDCG."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.metrics import ndcg
from mutirao.systems.ranking.online.shown_lists import QueryLists, normalize_per_query, shared, shown_ndcg
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.synthetic_queries import mslr_like


def data() -> RankingData:
    return mslr_like(12, np.random.default_rng(0), documents=15)


def test_everybody_has_everything_once() -> None:
    whole = data()
    lists, owned = QueryLists.of(whole, shared(whole.grades, 5), shown=10)
    assert len(lists) == 12
    assert [own.tolist() for own in owned] == [list(range(12))] * 5
    assert np.array_equal(lists.x, whole.x)


def test_a_query_in_two_parts_is_a_list_of_each() -> None:
    whole = data()
    parts = [np.arange(0, len(whole), 2), np.arange(1, len(whole), 2)]
    lists, owned = QueryLists.of(whole, parts, shown=3)
    assert [len(own) for own in owned] == [12, 12]
    for part, own in zip(parts, owned, strict=True):
        for query, number in enumerate(own):
            rows = part[whole.queries[part] == query]
            assert np.array_equal(lists.features(number), whole.x[rows])
            grades = sorted(whole.grades[rows], reverse=True)
            assert np.array_equal(lists.grades_of(number), whole.grades[rows])
            assert lists.best[number].tolist() == (grades + [0] * 3)[:3]


def test_features_are_brought_to_0_and_1_query_by_query() -> None:
    draw = np.random.default_rng(1)
    mixed = data().take(draw.permutation(len(data())))  # queries need not lie together
    out = normalize_per_query(mixed)
    for query in range(len(mixed.query_ids)):
        rows = mixed.queries == query
        x = mixed.x[rows].astype(np.float64)
        low, high = x.min(0), x.max(0)
        expected = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)
        assert out.x[rows] == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(out.grades, mixed.grades)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=15))
def test_a_ranking_shown_has_our_ndcg(grades: list[int]) -> None:
    shown = (grades + [0] * 10)[:10]
    best = (sorted(grades, reverse=True) + [0] * 10)[:10]
    found, answerable = shown_ndcg(np.array([shown]), np.array([best]))
    order = -np.arange(len(grades), dtype=np.float64)
    assert found[0] == pytest.approx(ndcg(order, grades, np.zeros(len(grades), int), 10))
    assert answerable[0] == (max(grades) > 0)
