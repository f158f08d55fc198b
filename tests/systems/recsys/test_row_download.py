"""A sliced fleet sends a client the rows it asks for and no others, counts them, and survives any wish."""

from typing import Any

import numpy as np
import pytest

from mutirao.core.fleet import Answers, Reply, Request, Site
from mutirao.core.sparse_rows import ROWS
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.item_privacy import SlicedFleet

MODEL = {"items": np.arange(20, dtype=np.float32).reshape(10, 2), "bias": np.zeros(3, np.float32)}


def handler(request: Request, site: Site) -> Reply:
    """A client whose data are the rows it wants; it sends back what it saw."""
    if request.do == "rows":
        assert request.arrays == {}, "to name its rows a client needs nothing of the model"
        return Reply({}, {"items": site.data}, n=1)
    return Reply({}, {f"saw {k}": v for k, v in request.arrays.items()}, n=1)


def ask(population: dict[str, Any], model: Any = MODEL) -> Answers:
    fleet = SlicedFleet(LocalFleet(handler, population), "items")
    assert fleet.clients() == sorted(population)
    return fleet.ask({c: Request("train", model, {"seed": 0, "round": 1}) for c in population})


def test_each_client_sees_its_own_rows_and_the_rest_of_the_model() -> None:
    answers = ask({"a": np.array([1, 4], np.int32), "b": np.array([9], np.int32)})
    saw = answers.replies["a"].extras
    np.testing.assert_array_equal(saw["saw items"], MODEL["items"][[1, 4]])
    np.testing.assert_array_equal(saw["saw items" + ROWS], [1, 4])
    np.testing.assert_array_equal(saw["saw bias"], MODEL["bias"])
    np.testing.assert_array_equal(answers.replies["b"].extras["saw items"], MODEL["items"][[9]])


def test_bytes_of_both_ways_are_counted_with_the_question() -> None:
    answers = ask({"a": np.array([1, 4], np.int32), "b": np.array([9], np.int32)})
    down = 3 * (2 * 4 + 4) + 2 * 12  # rows and their numbers, and twice the bias
    assert answers.carried == (down, 3 * 4 + 2 * 8 + down + 2 * 8)


@pytest.mark.parametrize(
    ("wish", "kind"),
    [
        (np.array([10], np.int32), "shape"),
        (np.array([-1], np.int32), "shape"),
        (np.array([3, 3], np.int32), "shape"),
        (np.array([], np.int32), "shape"),
        (np.array([0.5]), "dtype"),
        (np.arange(1000, dtype=np.int32), "shape"),
        ("all", "dtype"),
    ],
)
def test_an_absurd_wish_is_that_clients_failure_alone(wish: Any, kind: str) -> None:
    answers = ask({"odd": wish, "good": np.array([0], np.int32)})
    assert answers.failures["odd"].kind == kind
    assert list(answers.replies) == ["good"]


def test_a_client_that_names_no_rows_fails() -> None:
    fleet = SlicedFleet(LocalFleet(lambda request, site: Reply({}, n=1), {"a": None}), "items")
    answers = fleet.ask({"a": Request("train", MODEL, {})})
    assert answers.failures["a"].kind == "missing_key"


def test_clients_may_be_sent_different_models() -> None:
    other = {**MODEL, "items": -MODEL["items"]}
    fleet = SlicedFleet(LocalFleet(handler, {"a": np.array([1], np.int32), "b": np.array([1], np.int32)}), "items")
    answers = fleet.ask({"a": Request("train", MODEL, {}), "b": Request("train", other, {})})
    np.testing.assert_array_equal(answers.replies["a"].extras["saw items"], [[2, 3]])
    np.testing.assert_array_equal(answers.replies["b"].extras["saw items"], [[-2, -3]])
