"""Rows that travel alone stand for the whole, and whatever else a client sends under their name is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Group, Run, step
from mutirao.core.sparse_rows import ROWS, concatenate_rows, to_dense
from mutirao.core.validation import fault, faults
from mutirao.robustness.filters import NormFilter
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet

CURRENT: Arrays = {"items": np.arange(12, dtype=np.float32).reshape(4, 3), "scale": np.ones(2)}


def sent(rows: Any, values: Any = None) -> Reply:
    if values is None:
        values = np.zeros((len(rows), 3), np.float32)
    return Reply({"items": values, "items" + ROWS: rows, "scale": np.ones(2)}, n=3)


def ints(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.mark.parametrize("rows", [ints(0), ints(1, 3), ints(0, 1, 2, 3)])
def test_rows_in_rising_order_are_taken(rows: np.ndarray) -> None:
    assert fault(CURRENT, sent(rows)) is None


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (sent(ints(), np.zeros((0, 3), np.float32)), "shape"),
        (sent(ints(1, 1)), "shape"),
        (sent(ints(2, 1)), "shape"),
        (sent(ints(-1, 2)), "shape"),
        (sent(ints(0, 4)), "shape"),
        (sent(np.array([0.0, 1.0])), "dtype"),
        (sent([0, 1]), "dtype"),
        (sent(None, CURRENT["items"]), "dtype"),
        (sent(np.array([[0, 1]], np.int32)), "dtype"),
        (sent(ints(0, 1), np.zeros((3, 3), np.float32)), "shape"),
        (sent(ints(0, 1), np.zeros((2, 2), np.float32)), "shape"),
        (sent(ints(0), np.zeros((1, 3))), "dtype"),
        (sent(ints(0), np.full((1, 3), np.nan, np.float32)), "not_finite"),
        (sent(np.arange(5, dtype=np.int32)), "shape"),
        (Reply({"items": CURRENT["items"], "strange" + ROWS: ints(0), "scale": np.ones(2)}, n=1), "unknown_key"),
        (Reply({"items" + ROWS: ints(0), "scale": np.ones(2)}, n=1), "missing_key"),
    ],
)
def test_other_rows_are_refused(reply: Reply, kind: str) -> None:
    found = fault(CURRENT, reply)
    assert found is not None
    assert found.kind == kind


@given(st.lists(st.lists(st.integers(-2, 5), min_size=1, max_size=4), max_size=6))
def test_of_many_clients_those_whose_rows_are_out_of_order_are_named(lists: list[list[int]]) -> None:
    replies = {f"client {i}": sent(ints(*rows)) for i, rows in enumerate(lists)}
    wrong = {f"client {i}" for i, rows in enumerate(lists) if rows != sorted(set(rows) & set(range(4)))}
    found = faults(CURRENT, replies)
    assert found.keys() == wrong
    assert {f.kind for f in found.values()} <= {"shape"}


@given(st.sets(st.integers(0, 3), min_size=1))
def test_the_whole_has_the_rows_sent_and_the_others_as_they_were(rows: set[int]) -> None:
    numbers = ints(*sorted(rows))
    values = np.full((len(rows), 3), -1, np.float32)
    made = to_dense(CURRENT, sent(numbers, values).arrays)
    assert made.keys() == CURRENT.keys()
    expected = CURRENT["items"].copy()
    for row in rows:
        expected[row] = -1
    np.testing.assert_array_equal(made["items"], expected)
    assert CURRENT["items"][0, 1] == 1, "the current model is not touched"


def moves_one_row(request: Request, site: Site) -> Reply:
    row = ints(site.data)
    return Reply({"items": request.arrays["items"][row] + 1, "items" + ROWS: row, "scale": np.ones(2)}, n=1)


@pytest.mark.parametrize("filters", [(), (NormFilter(10.0),)])
def test_an_aggregator_that_knows_nothing_of_rows_gets_whole_models(filters: Any) -> None:
    run = Run(CURRENT)
    done = step(run, LocalFleet(moves_one_row, {"a": 0, "b": 0, "c": 3}), [Group(everyone, FedAvg(), filters=filters)])
    np.testing.assert_allclose(
        run.arrays["items"] - CURRENT["items"], np.outer([2 / 3, 0, 0, 1 / 3], [1, 1, 1]), atol=1e-6
    )
    assert done.row["bytes_up"] == 3 * (3 * 4 + 4 + 2 * 8 + 8), "what travelled is counted, not what it stands for"


def test_slices_that_lie_below_each_other_are_not_copied() -> None:
    table = np.arange(24, dtype=np.float32).reshape(8, 3)
    parts = [table[:3], table[3:7], table[7:]]
    assert np.shares_memory(concatenate_rows(parts), table)
    np.testing.assert_array_equal(concatenate_rows(parts), table)
    fixed = table.view()
    fixed.flags.writeable = False
    for others in (
        parts[::-1],
        parts[:2],
        parts[1:],
        [*parts, table[:1]],
        [*parts, table[:0]],
        [table[:3].copy(), table[3:]],
        [table[::2], table[1::2]],
        [table[:, :2], table[:, :2]],
        [fixed[:4], fixed[4:]],
    ):
        joined = concatenate_rows(others)
        assert not np.shares_memory(joined, table)
        np.testing.assert_array_equal(joined, np.concatenate(others))
