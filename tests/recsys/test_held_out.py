"""Leave one out: what is held out, hidden and drawn, and judged as by scores sorted user by user."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mutirao.errors import ConfigError
from mutirao.recsys import held_out
from mutirao.recsys.fedrecon import FedRecon
from mutirao.recsys.generate import plant
from mutirao.recsys.held_out import HeldOutJudge, hold_out
from mutirao.recsys.split import leave_one_out

RATINGS = plant(25, 80, np.random.default_rng(0)).implicit()
PARTS = leave_one_out(RATINGS)
COUNT = 15


def taken(part: Any, user: int) -> list[int]:
    return part.items[part.offsets[user] : part.offsets[user + 1]].tolist()


def test_the_latest_is_the_test_and_the_one_before_the_validation() -> None:
    for user in range(25):
        train, vali, test = (taken(part, user) for part in PARTS)
        assert [*train, *vali, *test] == taken(RATINGS, user)
        assert (len(vali), len(test)) == (1, 1)


def test_of_one_second_the_latest_is_drawn_not_the_item_with_the_highest_number() -> None:
    at_once = dataclasses.replace(RATINGS, times=np.zeros_like(RATINGS.times))
    tests = [leave_one_out(at_once, seed)[2].items for seed in range(40)]
    assert not np.array_equal(tests[0], tests[1])
    np.testing.assert_array_equal(tests[0], leave_one_out(at_once, 0)[2].items)
    mean = np.array([np.mean(taken(RATINGS, user)) for user in range(25)])
    assert np.abs(np.mean(tests, axis=0) - mean).max() < 20, "of 80 items; the highest would be 25 to 40 above"


def test_users_with_too_few_are_told_of() -> None:
    with pytest.raises(ConfigError, match="25 users have fewer than 3 ratings"):
        leave_one_out(PARTS[1])


@pytest.mark.parametrize("judge_by", ["vali", "test"])
@pytest.mark.parametrize("at_once", [10**9, 200])
def test_metrics_are_those_of_scores_sorted_user_by_user(
    judge_by: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "SCORES_AT_ONCE", at_once)
    scores = np.random.default_rng(1).integers(0, 40, (25, len(RATINGS.catalogue))).astype(float)
    held = hold_out(PARTS, judge_by, COUNT, 3)
    found = held(lambda part: scores[part].copy())
    sums = dict.fromkeys(found, 0.0)
    shown: dict[int, set[int]] = {5: set(), 10: set(), 20: set()}
    for user in range(25):
        train, vali, test = (taken(part, user) for part in PARTS)
        target, hidden = (vali[0], train) if judge_by == "vali" else (test[0], train + vali)
        drawn = held.drawn[user].tolist()
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
                held_out.top_rows(np.where(np.isin(np.arange(len(scores[0])), hidden), -1, scores[user])[None], k)[0]
            )
    for name, value in found.items():
        if name.startswith("coverage"):
            assert value == len(shown[int(name[9:])]) / scores.shape[1]
        else:
            assert value == pytest.approx(sums[name] / 25), name
    assert set(found) == set(held.metrics)


def test_validation_and_test_draw_on_their_own_and_the_same_again() -> None:
    one, two, other = (hold_out(PARTS, by, COUNT, 3) for by in ("vali", "vali", "test"))
    np.testing.assert_array_equal(one.drawn, two.drawn)
    assert (one.drawn != other.drawn).any()


def test_without_candidates_all_items_alone_are_ranked_among() -> None:
    held = hold_out(PARTS, "test", 0, 0)
    assert not any(name.startswith("sampled") for name in held.metrics)
    assert set(held(lambda part: np.zeros((part.stop - part.start, held.items)))) == set(held.metrics)


def test_more_candidates_than_items_left_is_said() -> None:
    with pytest.raises(ConfigError, match=r"candidates: user '\d+': 79 items cannot be drawn"):
        hold_out(PARTS, "test", 79, 0)


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
def test_a_model_is_judged_by_vectors_from_all_that_is_known(loss: Any) -> None:
    """Vectors of zeros: biases alone rank, for every user alike."""
    items = np.zeros((len(RATINGS.catalogue), 5), np.float32)
    items[:, 0] = np.random.default_rng(2).permutation(len(items))
    held = hold_out(PARTS, "test", COUNT, 0)
    judge = HeldOutJudge(FedRecon(len(items), 5, ridge=1.0, loss=loss), PARTS[0], held, 0)
    everybody = np.tile(items[:, 0], (25, 1))
    assert judge({"items": items}) == pytest.approx(held(lambda part: everybody[part].copy()))
