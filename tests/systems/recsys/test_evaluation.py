"""Evaluation: RMSE as computed by hand, ranks as computed by sorting, and what is held out, hidden and drawn."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.metrics import direction_of, mrr, ndcg
from mutirao.systems.recsys import evaluation
from mutirao.systems.recsys.evaluation import (
    Evaluator,
    HeldOutEvaluator,
    coverage,
    hold_out,
    rank_among,
    sample_negatives,
    summarise_ranks,
    top_rows,
)
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.ratings import all_but_last, leave_one_out, plant, sample_known

RATINGS = plant(25, 80, np.random.default_rng(0))
ITEMS = np.random.default_rng(1).normal(0, 0.3, (len(RATINGS.catalogue), 5)).astype(np.float32)
IMPLICIT = RATINGS.implicit()
PARTS = leave_one_out(IMPLICIT)
COUNT = 15


def method(**settings: Any) -> FedRecon:
    return FedRecon(len(RATINGS.catalogue), 5, ridge=1.0, ridge_bias=0.1, **settings)


@pytest.mark.parametrize("at_once", [10**9, 200])
def test_rmse_is_that_of_predictions_from_what_is_known(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RATINGS_AT_ONCE", at_once)
    known = sample_known(RATINGS, 0.5, "random", 0)
    found = Evaluator(method(), RATINGS, known, 0)({"items": ITEMS})
    gaps = []
    for user in range(25):
        mine = slice(RATINGS.offsets[user], RATINGS.offsets[user + 1])
        x, y, k = ITEMS[RATINGS.items[mine]].astype(float), RATINGS.values[mine], known[mine]
        features = np.column_stack([np.ones(len(x)), x[:, 1:]])
        penalty = np.diag([0.1, 1, 1, 1, 1])
        target = y - 3 - x[:, 0]
        v = np.linalg.solve(features[k].T @ features[k] + penalty, features[k].T @ target[k])
        gaps.append(np.clip(3 + x[:, 0] + features @ v, 1, 5)[~k] - y[~k])
    gap = np.concatenate(gaps)
    assert found["rmse"] == pytest.approx(np.sqrt((gap**2).mean()), rel=1e-5)
    assert found["mae"] == pytest.approx(np.abs(gap).mean(), rel=1e-5)


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
@pytest.mark.parametrize("at_once", [10**9, 200])
def test_ranks_are_among_all_items_not_taken(loss: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored by biases alone (vectors of zeros), the ranking is known beforehand."""
    monkeypatch.setattr(evaluation, "RATINGS_AT_ONCE", at_once)
    ratings = RATINGS.implicit()
    items = np.zeros_like(ITEMS)
    items[:, 0] = np.random.default_rng(2).permutation(len(items))
    known = all_but_last(ratings)
    known[ratings.offsets[1:3] - 2] = False  # two users with two items to find
    evaluator = Evaluator(method(loss=loss), ratings, known, 0)
    found = evaluator({"items": items})
    hits, scores, labels, queries = [], [], [], []
    for user in range(25):
        mine = slice(ratings.offsets[user], ratings.offsets[user + 1])
        taken, wanted = ratings.items[mine][known[mine]], ratings.items[mine][~known[mine]]
        rest = np.setdiff1d(np.arange(len(items)), taken)
        top = rest[np.argsort(-items[rest, 0])][:10]
        hits.append(bool(set(top) & set(wanted)))
        scores += items[rest, 0].tolist()
        labels += np.isin(rest, wanted).astype(int).tolist()
        queries += [user] * len(rest)
    assert found["hr@10"] == pytest.approx(np.mean(hits))
    assert found["ndcg@10"] == pytest.approx(ndcg(scores, labels, queries, 10))


@pytest.mark.parametrize("bad", [slice(None), slice(0, 1)], ids=["all items", "one item"])
def test_a_diverged_model_finds_nothing(bad: slice) -> None:
    ratings = RATINGS.implicit()
    items = ITEMS.copy()
    items[bad] = np.nan
    found = Evaluator(method(loss="bpr"), ratings, all_but_last(ratings), 0)({"items": items})
    assert np.isfinite([*found.values()]).all()
    if bad == slice(None):
        assert found == {"hr@10": 0.0, "ndcg@10": 0.0}


def test_the_same_model_is_evaluated_the_same_again_and_again() -> None:
    evaluator = Evaluator(method(), RATINGS, sample_known(RATINGS, 0.5, "random", 0), 0)
    before = ITEMS.copy()
    assert evaluator({"items": ITEMS}) == evaluator({"items": ITEMS})
    np.testing.assert_array_equal(ITEMS, before)


def test_nothing_to_evaluate_on_is_said() -> None:
    with pytest.raises(ConfigError, match="nothing is left to predict"):
        Evaluator(method(), RATINGS, np.ones(len(RATINGS), np.bool_), 0)


def taken(part: Any, user: int) -> list[int]:
    return part.items[part.offsets[user] : part.offsets[user + 1]].tolist()


def test_the_latest_is_the_test_and_the_one_before_the_validation() -> None:
    for user in range(25):
        train, vali, test = (taken(part, user) for part in PARTS)
        assert [*train, *vali, *test] == taken(IMPLICIT, user)
        assert (len(vali), len(test)) == (1, 1)


def test_of_one_second_the_latest_is_drawn_not_the_item_with_the_highest_number() -> None:
    at_once = dataclasses.replace(IMPLICIT, times=np.zeros_like(IMPLICIT.times))
    tests = [leave_one_out(at_once, seed)[2].items for seed in range(40)]
    assert not np.array_equal(tests[0], tests[1])
    np.testing.assert_array_equal(tests[0], leave_one_out(at_once, 0)[2].items)
    mean = np.array([np.mean(taken(IMPLICIT, user)) for user in range(25)])
    assert np.abs(np.mean(tests, axis=0) - mean).max() < 20, "of 80 items; the highest would be 25 to 40 above"


def test_users_with_too_few_are_told_of() -> None:
    with pytest.raises(ConfigError, match="25 users have fewer than 3 ratings"):
        leave_one_out(PARTS[1])


@pytest.mark.parametrize("part", ["vali", "test"])
@pytest.mark.parametrize("at_once", [10**9, 200])
def test_metrics_are_those_of_scores_sorted_user_by_user(
    part: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "SCORES_AT_ONCE", at_once)
    scores = np.random.default_rng(1).integers(0, 40, (25, len(IMPLICIT.catalogue))).astype(float)
    held = hold_out(PARTS, part, COUNT, 3)
    found = held(lambda users: scores[users].copy())
    sums = dict.fromkeys(found, 0.0)
    shown: dict[int, set[int]] = {5: set(), 10: set(), 20: set()}
    for user in range(25):
        train, vali, test = (taken(part, user) for part in PARTS)
        target, hidden = (vali[0], train) if part == "vali" else (test[0], train + vali)
        drawn = held.candidates[user].tolist()
        assert len(set(drawn)) == COUNT
        assert not set(drawn) & {*train, *vali, *test}
        rest = [i for i in range(scores.shape[1]) if i not in hidden]
        for prefix, others in (("", [i for i in rest if i != target]), ("sampled_", drawn)):
            place = sorted(others, key=lambda i, u=user: -scores[u, i])
            rank = 1 + sum(scores[user, i] >= scores[user, target] for i in place)
            for k in (5, 10, 20):
                sums[f"{prefix}hr@{k}"] += rank <= k
                sums[f"{prefix}recall@{k}"] += rank <= k
                sums[f"{prefix}mrr@{k}"] += (rank <= k) / rank
                sums[f"{prefix}ndcg@{k}"] += (rank <= k) / np.log2(rank + 1)
        for k in shown:
            shown[k] |= set(
                top_rows(np.where(np.isin(np.arange(len(scores[0])), hidden), -1, scores[user])[None], k)[0]
            )
    for name, value in found.items():
        if name.startswith("coverage"):
            assert value == len(shown[int(name[9:])]) / scores.shape[1]
        else:
            assert value == pytest.approx(sums[name] / 25), name
    assert set(found) == set(held.metrics)


def test_validation_and_test_draw_on_their_own_and_the_same_again() -> None:
    one, two, other = (hold_out(PARTS, by, COUNT, 3) for by in ("vali", "vali", "test"))
    np.testing.assert_array_equal(one.candidates, two.candidates)
    assert (one.candidates != other.candidates).any()


def test_without_candidates_all_items_alone_are_ranked_among() -> None:
    held = hold_out(PARTS, "test", 0, 0)
    assert not any(name.startswith("sampled") for name in held.metrics)
    assert set(held(lambda users: np.zeros((users.stop - users.start, held.items)))) == set(held.metrics)


def test_more_candidates_than_items_left_is_said() -> None:
    with pytest.raises(ConfigError, match=r"candidates: user '\d+': 79 items cannot be sampled"):
        hold_out(PARTS, "test", 79, 0)


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
def test_a_model_is_evaluated_by_vectors_from_all_that_is_known(loss: Any) -> None:
    """Vectors of zeros: biases alone rank, for every user alike."""
    items = np.zeros((len(IMPLICIT.catalogue), 5), np.float32)
    items[:, 0] = np.random.default_rng(2).permutation(len(items))
    held = hold_out(PARTS, "test", COUNT, 0)
    evaluator = HeldOutEvaluator(FedRecon(len(items), 5, ridge=1.0, loss=loss), PARTS[0], held, 0)
    everybody = np.tile(items[:, 0], (25, 1))
    assert evaluator({"items": items}) == pytest.approx(held(lambda users: everybody[users].copy()))


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
    with pytest.raises(ValueError, match="5 items cannot be sampled: of 6, only 4 are not taken"):
        sample_negatives([1, 1, 2], 6, 5, np.random.default_rng(0))


def test_ties_and_nan_count_against_the_target() -> None:
    assert rank_among([1.0, 2.0, np.nan], [[1, 0, 1], [1, np.nan, 0], [0, 0, 0]]).tolist() == [3, 2, 4]


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=8))
def test_summaries_are_those_of_ranked_lists(scores: list[list[int]]) -> None:
    """The first of each row is the target; the metrics of the ranking recipe say the same of sorted lists."""
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
