"""No faulty reply gets past the checks, and none of them raises, whatever a client sends."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, Failure, Reply, Request, Site, collect, traffic
from mutirao.core.rounds import Group, Patience, Run, step
from mutirao.core.validation import fault, fault_of_extras, sift
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet

CURRENT: Arrays = {"w": np.zeros((2, 3), np.float32), "steps": np.zeros((), np.int64)}


def good(**changes: Any) -> Reply:
    arrays = {"w": np.ones((2, 3), np.float32), "steps": np.ones((), np.int64)}
    return Reply(**{"arrays": arrays, "metrics": {"loss": 0.5}, "n": 10} | changes)


def with_w(w: Any) -> Reply:
    return good(arrays={**good().arrays, "w": w})


FAULTY: dict[str, tuple[Reply, str]] = {
    "no arrays": (good(arrays={}), "empty"),
    "unknown key": (good(arrays={**good().arrays, "extra": np.zeros(1)}), "unknown_key"),
    "missing key": (good(arrays={"w": good().arrays["w"]}), "missing_key"),
    "fewer numbers": (with_w(np.ones((2, 2), np.float32)), "shape"),
    "other axes": (with_w(np.ones((3, 2), np.float32)), "shape"),
    "other rank": (with_w(np.ones(6, np.float32)), "shape"),
    "more numbers": (with_w(np.ones((2, 4), np.float32)), "too_large"),
    "huge array": (with_w(np.broadcast_to(np.float32(1), (2**20, 2**20))), "too_large"),
    "wider type": (with_w(np.ones((2, 3), np.float64)), "dtype"),
    "narrower type": (with_w(np.ones((2, 3), np.float16)), "dtype"),
    "integers": (with_w(np.ones((2, 3), np.int32)), "dtype"),
    "objects": (with_w(np.full((2, 3), None)), "dtype"),
    "a list": (with_w([[1.0, 1.0, 1.0]] * 2), "dtype"),
    "NaN": (with_w(np.array([[0, 0, 0], [0, 0, np.nan]], np.float32)), "not_finite"),
    "inf": (with_w(np.array([[0, 0, 0], [0, 0, -np.inf]], np.float32)), "not_finite"),
    "NaN in extras": (good(extras={"errors": np.array([np.nan])}), "not_finite"),
    "extras that are no arrays": (good(extras={"errors": [1, 2]}), "dtype"),
    "extras of objects": (good(extras={"errors": np.array([None])}), "dtype"),
    "huge extras": (good(extras={"errors": np.broadcast_to(np.uint8(1), 2**40)}), "too_large"),
    "NaN metric": (good(metrics={"loss": float("nan")}), "not_finite"),
    "infinite metric": (good(metrics={"loss": float("inf")}), "not_finite"),
    "metric beyond floats": (good(metrics={"loss": 10**400}), "not_finite"),
    "metric beyond all sums": (good(metrics={"loss": 1e308}), "not_finite"),
    "metric that is text": (good(metrics={"loss": "low"}), "dtype"),
    "metric that is None": (good(metrics={"loss": None}), "dtype"),
    "metric that is an array": (good(metrics={"loss": np.ones(1)}), "dtype"),
    "bad metric name": (good(metrics={"loss\n": 1.0}), "unknown_key"),
    "formula as metric name": (good(metrics={"=cmd()": 1.0}), "unknown_key"),
    "empty metric name": (good(metrics={"": 1.0}), "unknown_key"),
    "too many metrics": (good(metrics={f"m{i}": 1.0 for i in range(65)}), "too_large"),
    "no samples": (good(n=0), "count"),
    "negative samples": (good(n=-5), "count"),
    "absurdly many samples": (good(n=10**13), "count"),
    "a fraction of a sample": (good(n=2.5), "count"),
    "NaN samples": (good(n=float("nan")), "count"),
    "samples as text": (good(n="many"), "count"),
    "samples as None": (good(n=None), "count"),
    "samples of 5,000 digits": (good(n=10**5000), "count"),
    "metrics that are None": (good(metrics=None), "malformed"),
    "metrics that are a list": (good(metrics=[("loss", 1.0)]), "malformed"),
    "metrics by number": (good(metrics={1: 1.0}), "malformed"),
    "extras that are None": (good(extras=None), "malformed"),
    "extras by number": (good(extras={1: np.ones(1)}), "malformed"),
    "extras of records": (good(extras={"errors": np.zeros(3, "i4,f4")}), "dtype"),
    "arrays that are None": (good(arrays=None), "malformed"),
    "arrays that are an array": (good(arrays=np.ones(3)), "malformed"),
}


@pytest.mark.parametrize(("reply", "kind"), FAULTY.values(), ids=FAULTY)
def test_each_fault_has_its_kind_and_a_reason_on_one_line(reply: Reply, kind: str) -> None:
    found = fault(CURRENT, reply)
    assert found is not None
    assert found.kind == kind
    assert found.reason
    assert "\n" not in found.reason
    assert len(found.reason) < 200


@pytest.mark.parametrize(
    "reply",
    [
        good(),
        good(metrics={}),
        good(metrics={"ndcg@5": 0.5, "val-acc.top_1": 1, "loss": np.float32(0.1), "hits": np.int64(3)}),
        good(n=np.int64(7)),
        good(extras={"errors": np.arange(5, dtype=np.uint8), "bias": np.ones(3)}),
        good(arrays={**good().arrays, "steps": np.int64(3)}),
        with_w(np.asfortranarray(np.ones((2, 3), np.float32))),
    ],
)
def test_good_replies_pass(reply: Reply) -> None:
    assert fault(CURRENT, reply) is None


def test_replies_without_a_model_are_checked_for_everything_else() -> None:
    assert fault_of_extras(Reply({}, metrics={"entropy": 0.3}, n=4)) is None
    found = fault_of_extras(Reply({}, metrics={"entropy": float("nan")}, n=4))
    assert found is not None
    assert found.kind == "not_finite"


def test_sifting_moves_faulty_replies_to_the_failures_and_sorts_them() -> None:
    late = Failure("late", "no answer in time")
    replies = {"ana": good(), "bia": FAULTY["NaN"][0], "dora": FAULTY["no samples"][0]}
    out = sift(Answers(replies, {"caio": late}), partial(fault, CURRENT))
    assert list(out.replies) == ["ana"]
    assert {c: f.kind for c, f in out.failures.items()} == {"bia": "not_finite", "caio": "late", "dora": "count"}
    assert list(out.failures) == ["bia", "caio", "dora"]


junk = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from([np.float32(1), np.array("x"), np.ones(3), np.ones((2, 3), np.float32), [1], np.array([None])]),
)


def anything(names: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Junk in place of a field, or a dict that has some in it."""
    deep = st.recursive(junk, lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner), max_leaves=4)
    return deep | st.dictionaries(names | st.integers() | st.none(), deep)


@given(
    arrays=anything(st.sampled_from(["w", "steps", "x", "w@rows"])),
    extras=anything(st.text(max_size=2)),
    metrics=anything(st.text(max_size=2)),
    n=anything(st.text(max_size=2)),
)
def test_no_junk_raises(arrays: Any, extras: Any, metrics: Any, n: Any) -> None:
    reply = Reply(arrays, extras, metrics, n)
    assert isinstance(fault(CURRENT, reply), Failure)  # none of this can be a whole good reply
    assert fault_of_extras(reply) is None or isinstance(fault_of_extras(reply), Failure)
    answers = collect(["ana"], [("ana", reply)])
    assert traffic({}, answers)[1] >= 0  # what is left can be measured


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("field", ["arrays", "extras", "metrics", "n"])
@pytest.mark.parametrize("value", [None, [1, 2], {1: 2}, 7.5, "text", {"w": None}])
def test_a_handler_that_puts_junk_into_a_field_fails_alone_in_its_round(field: str, value: Any, together: bool) -> None:
    def handler(request: Request, site: Site) -> Reply:
        return replace(good(), **{field: value}) if site.id == "bia" else good()

    if together:
        handler.many = lambda requests, sites: {c: handler(r, sites[c]) for c, r in requests.items()}  # type: ignore[attr-defined]
    run = Run({k: v.copy() for k, v in CURRENT.items()})
    fleet = LocalFleet(handler, dict.fromkeys(["ana", "bia", "caio"]))
    done = step(run, fleet, [Group(everyone, FedAvg())], patience=Patience(wait=0.0))
    failures = {row["client"]: row["failure"] for row in done.clients}
    assert failures.pop("bia")
    assert set(failures.values()) == {""}
    np.testing.assert_array_equal(run.arrays["w"], good().arrays["w"])
