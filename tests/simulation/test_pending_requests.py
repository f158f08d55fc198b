"""Pending requests on the simulated clock: in order of time, never too many, and restored from the run's memory."""

import math

import numpy as np
import pytest

from mutirao.core.fleet import Failure, Reply, Request
from mutirao.core.rounds import Run
from mutirao.simulation.clock import PendingRequest, PendingRequests, read_pending

REQUEST = Request("train", {"w": np.zeros(2)})


def reply(value: float) -> Reply:
    return Reply({"w": np.full(2, value)}, {"errors": np.arange(3)}, {"loss": value}, n=4)


def pending_after(run: Run, seconds: dict[str, float], buffer: int, at_once: int, lost: str = "") -> PendingRequests:
    pending = PendingRequests(run, buffer, at_once)
    made = (PendingRequest(c, Failure("gone", "lost") if c in lost else reply(s), s, 2 * s) for c, s in seconds.items())
    pending.add(dict.fromkeys(seconds, REQUEST), made)
    return pending


def test_they_arrive_in_order_of_time_and_who_is_done_makes_room_for_the_next() -> None:
    """Two at once: b until 1, a until 3; c follows b at 1 until 3 (after a by name), d follows a at 3 until 3.5."""
    pending = pending_after(Run({}), {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.5}, buffer=1, at_once=2)
    finished = []
    for _ in range(4):
        (request,) = pending.take_finished()
        finished.append((request.client, request.arrives, pending.clock))
    assert finished == [("b", 1.0, 1.0), ("a", 3.0, 3.0), ("c", 3.0, 3.0), ("d", 3.5, 3.5)]
    assert pending.take_finished() == []
    assert pending.clock == 3.5


def test_who_is_lost_fills_no_buffer_but_makes_room() -> None:
    pending = pending_after(Run({}), {"a": 3.0, "b": 1.0, "c": 5.0}, buffer=2, at_once=1, lost="b")
    assert [request.client for request in pending.take_finished()] == ["a", "b", "c"]
    assert pending.clock == 9.0


def test_they_come_back_from_the_memory_of_a_run() -> None:
    run = Run({}, memory={"fedavgm.v": np.ones(1)})
    pending = pending_after(run, {"a": 3.0, "b": 1.0, "c": 2.5, "d": 0.1}, buffer=1, at_once=3, lost="a")
    pending.take_finished()
    clock, found = read_pending(run.memory)
    assert clock == 1.0
    assert list(found) == ["a", "c", "d"]
    assert found["a"] == PendingRequest("a", Failure("gone", "lost"), 3.0, 6.0, 3.0)
    assert math.isinf(found["d"].arrives)  # it waits for its turn, and the next to look lets it begin
    there = found["c"].outcome
    assert isinstance(there, Reply)
    assert (there.n, there.metrics) == (4, {"loss": 2.5})
    np.testing.assert_array_equal(there.arrays["w"], [2.5, 2.5])
    np.testing.assert_array_equal(there.extras["errors"], np.arange(3))
    assert [f.client for f in PendingRequests(run, 3, 3).take_finished()] == ["d", "c", "a"]
    assert run.memory.keys() == {"fedavgm.v", "flights.table"}  # what has finished is not kept


@pytest.mark.parametrize("broken", [{"w": np.zeros(3)}, {"v": np.zeros(2)}, {"w": np.array([1.0, np.nan])}])
def test_a_broken_reply_is_a_failure_from_the_start(broken: dict[str, object]) -> None:
    run = Run({})
    pending = PendingRequests(run, 1, 1)
    pending.add({"a": REQUEST}, [PendingRequest("a", Reply(broken, n=1), 1.0, 1.0)])  # type: ignore[arg-type]
    (request,) = pending.take_finished()
    assert isinstance(request.outcome, Failure)
