"""Items are joined by those who touched them: as the formula says, whatever the order, and as FedAvg if asked."""

from typing import Any

import numpy as np
import pytest

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply
from mutirao.core.sparse_rows import ROWS, dense_replies
from mutirao.systems.recsys import item_aggregation as module
from mutirao.systems.recsys.item_aggregation import ByItem

CURRENT: Arrays = {"items": np.random.default_rng(9).normal(size=(8, 3)).astype(np.float32)}


def replies(count: int = 6) -> dict[str, Reply]:
    draw = np.random.default_rng(0)
    out = {}
    for k in range(count):
        rows = np.sort(draw.choice(7, draw.integers(1, 7), replace=False)).astype(np.int32)  # nobody touches item 7
        values = draw.normal(size=(len(rows), 3)).astype(np.float32)
        out[f"u{k}"] = Reply({"items": values, "items" + ROWS: rows}, n=int(draw.integers(1, 20)))
    return out


@pytest.mark.parametrize("shrinkage", [0.0, 2.5])
def test_an_item_moves_by_the_mean_of_those_who_touched_it(shrinkage: float) -> None:
    merged = ByItem(shrinkage=shrinkage, lr=0.7)(CURRENT, replies(), {})
    for item in range(8):
        moves = [
            reply.arrays["items"][at] - CURRENT["items"][item]
            for reply in replies().values()
            for at in np.flatnonzero(reply.arrays["items" + ROWS] == item)
        ]
        expected = (
            CURRENT["items"][item] + 0.7 * np.sum(moves, axis=0) / (len(moves) + shrinkage)
            if moves
            else CURRENT["items"][item]
        )
        np.testing.assert_allclose(merged.arrays["items"][item], expected, rtol=1e-5, atol=1e-6)
    assert merged.arrays["items"].dtype == np.float32
    assert sum(merged.weights.values()) == pytest.approx(1)


def test_over_all_it_is_federated_averaging() -> None:
    ours = ByItem(over="all")(CURRENT, replies(), {})
    theirs = FedAvg()(CURRENT, dense_replies(CURRENT, replies()), {})
    np.testing.assert_allclose(ours.arrays["items"], theirs.arrays["items"], atol=1e-6)
    assert ours.weights == theirs.weights


def test_whole_replies_count_by_the_rows_that_differ() -> None:
    ours, whole = (ByItem()(CURRENT, r, {}).arrays["items"] for r in (replies(), dense_replies(CURRENT, replies())))
    np.testing.assert_array_equal(ours, whole)


def test_without_numba_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [ByItem(over=over)(CURRENT, replies(), {}).arrays["items"] for over in ("touched", "all")]
    monkeypatch.setattr(module, "find_kernel", lambda name: None)
    plain = [ByItem(over=over)(CURRENT, replies(), {}).arrays["items"] for over in ("touched", "all")]
    np.testing.assert_allclose(fast, plain, rtol=1e-6, atol=1e-6)


def test_tables_of_any_shape_are_joined() -> None:
    current = {"bias": np.zeros(5), "cube": np.zeros((3, 2, 2))}
    reply = Reply(
        {"bias": np.array([1.0, 2.0]), "bias" + ROWS: np.array([1, 4], np.int32), "cube": np.ones((3, 2, 2))}, n=1
    )
    merged = ByItem(shrinkage=1.0)(current, {"a": reply}, {}).arrays
    assert merged["bias"].tolist() == [0, 0.5, 0, 0, 1.0]
    np.testing.assert_array_equal(merged["cube"], 0.5)


def test_the_order_of_replies_changes_no_bit() -> None:
    turned = dict(reversed(replies().items()))
    np.testing.assert_array_equal(
        ByItem()(CURRENT, replies(), {}).arrays["items"], ByItem()(CURRENT, turned, {}).arrays["items"]
    )


def test_the_current_model_is_not_touched() -> None:
    before = CURRENT["items"].copy()
    ByItem()(CURRENT, replies(), {})
    np.testing.assert_array_equal(CURRENT["items"], before)


@pytest.mark.parametrize("settings", [{"shrinkage": -1.0}, {"lr": 0.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        ByItem(**settings)
