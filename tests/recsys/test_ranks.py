"""Ranks and what is made of them, beside the same counted out by sorting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.metrics import direction_of, mrr, ndcg
from mutirao.recsys.ranks import coverage, rank_among, sample_negatives, summarise_ranks, top_rows


@given(st.sets(st.integers(0, 29)), st.integers(0, 2**32), st.data())
def test_negatives_are_different_and_none_is_taken(taken: set[int], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 30 - len(taken)))
    rows = sample_negatives(sorted(taken), 30, count, np.random.default_rng(seed)).tolist()
    assert len(rows) == len(set(rows)) == count
    assert set(rows) <= set(range(30)) - taken


def test_every_item_not_taken_is_drawn_as_often() -> None:
    draws = [sample_negatives([1, 2, 7], 10, 3, np.random.default_rng(seed)) for seed in range(3000)]
    counts = np.bincount(np.concatenate(draws), minlength=10)
    assert counts[[1, 2, 7]].tolist() == [0, 0, 0]
    free = counts[[0, 3, 4, 5, 6, 8, 9]]
    assert ((free - 9000 / 7) ** 2 / (9000 / 7)).sum() < 30, "chi squared with 6 degrees of freedom: 22.5 is 0.001"


def test_more_negatives_than_there_are_is_said() -> None:
    with pytest.raises(ValueError, match="5 items cannot be drawn: of 6, only 4 are not taken"):
        sample_negatives([1, 1, 2], 6, 5, np.random.default_rng(0))


def test_ties_and_nan_count_against_the_target() -> None:
    assert rank_among([1.0, 2.0, np.nan], [[1, 0, 1], [1, np.nan, 0], [0, 0, 0]]).tolist() == [3, 2, 4]


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=8))
def test_summaries_are_those_of_ranked_lists(scores: list[list[int]]) -> None:
    """The first of each row is the target; the judges of the ranking recipe say the same of sorted lists."""
    table = np.array(scores, float)
    found = summarise_ranks(rank_among(table[:, 0], table[:, 1:]), cuts=(2, 3))
    labels = np.tile([1, 0, 0, 0], len(table))
    queries = np.repeat(np.arange(len(table)), 4)
    for k in (2, 3):
        assert found[f"ndcg@{k}"] == pytest.approx(ndcg(table.ravel(), labels, queries, k, ties="worst"))
        assert found[f"mrr@{k}"] == pytest.approx(mrr(table.ravel(), labels, queries, k, ties="worst"))
        hits = [sum(other >= row[0] for other in row[1:]) < k for row in scores]
        assert found[f"hr@{k}"] == found[f"recall@{k}"] == pytest.approx(np.mean(hits))


def test_a_hit_at_the_second_place_by_hand() -> None:
    found = summarise_ranks([2, 6], cuts=(5, 10))
    assert found["ndcg@5"] == pytest.approx(math.log(2) / math.log(3) / 2)
    assert (found["mrr@10"], found["hr@5"], found["hr@10"]) == (pytest.approx((1 / 2 + 1 / 6) / 2), 0.5, 1.0)


@given(st.integers(1, 6), st.integers(0, 1000))
def test_the_top_are_the_first_after_sorting_and_coverage_counts_them(count: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 50, (3, 9)).astype(float) + np.arange(9) / 100
    top = top_rows(scores.copy(), count)
    assert top.tolist() == [sorted(range(9), key=lambda i, row=row: -row[i])[:count] for row in scores.tolist()]
    shown = {int(i) for row in top for i in row[:2]}
    assert coverage(top, 9, cuts=[2])["coverage@2"] == len(shown) / 9


@pytest.mark.parametrize("metric", ["hr@5", "sampled_hr@10", "sampled_ndcg@20", "mrr@5", "recall@10", "coverage@20"])
def test_all_are_known_to_be_better_when_higher(metric: str) -> None:
    assert direction_of(metric) == "higher"
