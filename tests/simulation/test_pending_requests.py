"""Flights on the simulated clock: in order of time, never too many, and back from the run's memory as they were."""

import math

import numpy as np
import pytest

from mutirao.core.fleet import Failure, Reply, Request
from mutirao.core.rounds import Run
from mutirao.simulation.pending_requests import PendingRequest, PendingRequests, read_pending

REQUEST = Request("train", {"w": np.zeros(2)})


def reply(value: float) -> Reply:
    return Reply({"w": np.full(2, value)}, {"errors": np.arange(3)}, {"loss": value}, n=4)


def flying(run: Run, seconds: dict[str, float], buffer: int, at_once: int, lost: str = "") -> PendingRequests:
    flights = PendingRequests(run, buffer, at_once)
    made = (PendingRequest(c, Failure("gone", "lost") if c in lost else reply(s), s, 2 * s) for c, s in seconds.items())
    flights.add(dict.fromkeys(seconds, REQUEST), made)
    return flights


def test_they_land_in_order_of_time_and_who_is_done_makes_room_for_the_next() -> None:
    """Two at once: b until 1, a until 3; c follows b at 1 until 3 (after a by name), d follows a at 3 until 3.5."""
    flights = flying(Run({}), {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.5}, buffer=1, at_once=2)
    landed = []
    for _ in range(4):
        (flight,) = flights.land()
        landed.append((flight.client, flight.arrives, flights.clock))
    assert landed == [("b", 1.0, 1.0), ("a", 3.0, 3.0), ("c", 3.0, 3.0), ("d", 3.5, 3.5)]
    assert flights.land() == []
    assert flights.clock == 3.5


def test_who_is_lost_fills_no_buffer_but_makes_room() -> None:
    flights = flying(Run({}), {"a": 3.0, "b": 1.0, "c": 5.0}, buffer=2, at_once=1, lost="b")
    assert [flight.client for flight in flights.land()] == ["a", "b", "c"]
    assert flights.clock == 9.0


def test_they_come_back_from_the_memory_of_a_run() -> None:
    run = Run({}, memory={"fedavgm.v": np.ones(1)})
    flights = flying(run, {"a": 3.0, "b": 1.0, "c": 2.5, "d": 0.1}, buffer=1, at_once=3, lost="a")
    flights.land()
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
    assert [f.client for f in PendingRequests(run, 3, 3).land()] == ["d", "c", "a"]
    assert run.memory.keys() == {"fedavgm.v", "flights.table"}  # what has landed is not kept


@pytest.mark.parametrize("broken", [{"w": np.zeros(3)}, {"v": np.zeros(2)}, {"w": np.array([1.0, np.nan])}])
def test_a_broken_reply_is_a_failure_from_the_start(broken: dict[str, object]) -> None:
    run = Run({})
    flights = PendingRequests(run, 1, 1)
    flights.add({"a": REQUEST}, [PendingRequest("a", Reply(broken, n=1), 1.0, 1.0)])  # type: ignore[arg-type]
    (flight,) = flights.land()
    assert isinstance(flight.outcome, Failure)
