"""The Flower client: what leaves it, what it remembers, and how it fails."""

from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from loopgrid import connected, failure_of_bia, honest, identity, softmax_handler, softmax_task
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.flower import client
from mutirao.experiments.task import Task
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too


def test_a_sites_state_never_leaves() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana"])
    seen: list[RecordDict] = []
    grid.meddlers[grid.node_of("ana")] = lambda message, reply: seen.append(reply.content) or [reply]
    fleet.clients()
    fleet.ask({"ana": Request("train", task.initial())})
    (content,) = seen
    assert set(content) == {"arrays", "extras", "metrics", "count"}
    assert client.STATE in grid.nodes[grid.node_of("ana")].state
    assert "speed" not in {name for record in content.values() for name in record}


def test_a_client_that_raises_sends_one_line_and_no_traceback() -> None:
    def handler(request: Request, site: Site) -> Reply:
        if site.id == "bia":
            raise ValueError("the disk\nof bia is\x1b[31m full " + "x" * 500)
        return softmax_handler(request, site)

    failure = failure_of_bia(honest, handler)
    assert failure.kind == "raised"
    assert failure.reason.startswith("ValueError: the disk of bia is")
    assert len(failure.reason) <= 220
    assert failure.reason.isprintable()


@pytest.mark.parametrize("nonsense", [None, "text", Reply({"w": np.array([{}])}), Reply({}, metrics={"x": "y"})])  # type: ignore[dict-item]
def test_a_handler_that_returns_nonsense_fails_alone(nonsense: Any) -> None:
    def handler(request: Request, site: Site) -> Any:
        return nonsense if site.id == "bia" else softmax_handler(request, site)

    assert failure_of_bia(honest, handler).kind == "raised"


def test_a_request_that_fails_leaves_no_trace_in_the_sites_state() -> None:
    def handler(request: Request, site: Site) -> Reply:
        visits = np.asarray(site.state.get("visits", 0) + 1)
        site.state["visits"] = visits
        if request.do == "fail":
            raise RuntimeError("not today")
        if request.do == "forget":
            site.state.clear()
        return Reply({"visits": visits}, n=1)

    task = Task(handler, {"ana": None}, dict)
    _, fleet = connected(task, ["ana"])
    fleet.clients()
    for each in (fleet, LocalFleet(task.handler, task.population)):
        seen = []
        for do in ("train", "fail", "train", "forget", "train"):
            replies = each.ask({"ana": Request(do, {})}).replies
            seen += [int(r.arrays["visits"]) for r in replies.values()]
        assert seen == [1, 2, 3, 1]


def test_probes_and_evaluations_travel_too() -> None:
    task = softmax_task()
    _, fleet = connected(task, ["ana"])
    fleet.clients()
    reply = fleet.ask({"ana": Request("probe", task.initial())}).replies["ana"]
    assert (reply.arrays, reply.metrics) == ({}, {"size": 120.0})
    answers = fleet.ask({"ana": Request("evaluate", task.initial())})
    assert "ana" in answers.replies
