"""Judged is what is not known: RMSE as computed by hand, ranks as computed by sorting."""

from typing import Any

import numpy as np
import pytest

from mutirao.errors import ConfigError
from mutirao.metrics import ndcg
from mutirao.recsys import judging
from mutirao.recsys.fedrecon import FedRecon
from mutirao.recsys.generate import plant
from mutirao.recsys.judging import Judge
from mutirao.recsys.split import all_but_last, supports

RATINGS = plant(25, 80, np.random.default_rng(0))
ITEMS = np.random.default_rng(1).normal(0, 0.3, (len(RATINGS.catalogue), 5)).astype(np.float32)


def method(**settings: Any) -> FedRecon:
    return FedRecon(len(RATINGS.catalogue), 5, ridge=1.0, ridge_bias=0.1, **settings)


@pytest.mark.parametrize("at_once", [10**9, 200])
def test_rmse_is_that_of_predictions_from_what_is_known(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "RATINGS_AT_ONCE", at_once)
    known = supports(RATINGS, 0.5, "random", 0)
    found = Judge(method(), RATINGS, known, 0)({"items": ITEMS})
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
    monkeypatch.setattr(judging, "RATINGS_AT_ONCE", at_once)
    ratings = RATINGS.implicit()
    items = np.zeros_like(ITEMS)
    items[:, 0] = np.random.default_rng(2).permutation(len(items))
    known = all_but_last(ratings)
    known[ratings.offsets[1:3] - 2] = False  # two users with two items to find
    judge = Judge(method(loss=loss), ratings, known, 0)
    found = judge({"items": items})
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


def test_the_same_model_is_judged_the_same_again_and_again() -> None:
    judge = Judge(method(), RATINGS, supports(RATINGS, 0.5, "random", 0), 0)
    before = ITEMS.copy()
    assert judge({"items": ITEMS}) == judge({"items": ITEMS})
    np.testing.assert_array_equal(ITEMS, before)


def test_nothing_to_judge_by_is_said() -> None:
    with pytest.raises(ConfigError, match="nothing is left to judge by"):
        Judge(method(), RATINGS, np.ones(len(RATINGS), np.bool_), 0)
