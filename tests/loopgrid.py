"""A Flower grid in this process, and clients to put on it: every message crosses Flower's own serialisation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_digits

from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.validation import fault, sift
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.experiments.task import Task

NAMES = ["ana", "bia", "caio", "duda", "eva"]
Meddle = Callable[[Message, Message], list[Message]]


class LoopGrid(Grid):
    """Nodes in this process; each message and each node's context crosses Flower's serialisation."""

    def __init__(self, app: ClientApp, **run_config: Any) -> None:
        self.app, self.run_config = app, run_config
        self.nodes: dict[int, Context] = {}
        self.meddlers: dict[int, Meddle] = {}  # what becomes of a node's answers to requests
        self.answers: dict[str, list[Message]] = {}
        self.ids = itertools.count(7_000_000_001, 1_000_003)
        self.greetings = 0

    def join(self, **node_config: Any) -> int:
        node = next(self.ids)
        self.nodes[node] = Context(7, node, node_config, RecordDict(), self.run_config)
        return node

    def node_of(self, name: str) -> int:
        return next(n for n, context in self.nodes.items() if context.node_config.get("name") == name)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            ids.append(message.object_id if node in self.nodes else "")
            if node in self.nodes:
                self.deliver(wired(message), node)
        return ids

    def deliver(self, message: Message, node: int) -> None:
        greeting = message.metadata.message_type == "query.name"
        self.greetings += greeting
        self.nodes[node] = context = context_from_proto(context_to_proto(self.nodes[node]))
        reply = self.app(message, context)
        answers = [reply] if greeting or node not in self.meddlers else self.meddlers[node](message, reply)
        self.answers[message.metadata.message_id] = answers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [wired(m) for i in message_ids for m in self.answers.pop(i, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages([i for i in self.push_messages(messages) if i])

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError


def wired(message: Message) -> Message:
    """The message as it comes out of the wire."""
    contents = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
    out = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(out, Message)
    out.metadata.__dict__["_message_id"] = message.object_id
    return out


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_task_id": 1, "_run_id": 7, "_node_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)


def softmax_handler(request: Request, site: Site) -> Reply:
    """Softmax regression in NumPy with momentum that stays at the site."""
    x, y = site.data
    w, b = request.arrays["w"], request.arrays["b"]
    if request.do == "probe":
        return Reply({}, metrics={"size": float(len(y))}, n=len(y))
    scores = x @ w + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True)).astype(np.float32)
    gap = p.copy()
    gap[np.arange(len(y)), y] -= 1
    speed = site.state.get("speed", np.zeros_like(w))
    site.state["speed"] = (0.9 * speed + x.T @ gap / len(y)).astype(np.float32)
    site.state["visits"] = site.state.get("visits", np.array(0)) + 1
    loss = float(-np.log(p[np.arange(len(y)), y] + 1e-9).mean())
    new = {
        "w": w - np.float32(0.5) * site.state["speed"],
        "b": b - np.float32(0.5) * gap.mean(0),
        "steps": np.asarray(request.arrays["steps"] + 1),
    }
    return Reply(new, extras={"errors": (gap**2).sum(1)}, metrics={"loss": loss}, n=len(y))


def digits() -> dict[str, tuple[Any, Any]]:
    x, y = load_digits(return_X_y=True)
    x, y = (x[:600] / 16).astype(np.float32), y[:600]
    return {name: (x[i::5], y[i::5]) for i, name in enumerate(NAMES)}


def softmax_task() -> Task:
    start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32), "steps": np.array(0, np.int64)}
    return Task(softmax_handler, digits(), lambda: start)


def connected(task: Task, names: Iterable[str] = NAMES) -> tuple[LoopGrid, FlowerFleet]:
    grid = LoopGrid(client_app(lambda _: task))
    for name in names:
        grid.join(name=name)
    return grid, FlowerFleet(grid, timeout=2, greet=2)


def failure_of_bia(meddle: Meddle, handler: Any = softmax_handler) -> Failure:
    """How bia fails when its answers are meddled with; the others are not touched by it."""
    task = dataclasses.replace(softmax_task(), handler=handler)
    grid, fleet = connected(task)
    grid.meddlers[grid.node_of("bia")] = meddle
    fleet.timeout = 5.0
    assert fleet.clients() == NAMES
    answers = sift(
        fleet.ask({name: Request("train", task.initial(), {"round": 1}) for name in NAMES}),
        lambda reply: fault(task.initial(), reply),
    )
    assert list(answers.replies) == [n for n in NAMES if n != "bia"]
    assert list(answers.failures) == ["bia"]
    return answers.failures["bia"]


def honest(message: Message, reply: Message) -> list[Message]:
    return [reply]
