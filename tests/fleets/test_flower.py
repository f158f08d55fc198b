"""The real ClientApp over Flower's own wire format, in this process: same results as in process, and every fault."""

import dataclasses
import importlib.util
import io
import itertools
import json
import logging
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as Parcel
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_digits
from torch import nn

from conftest import iris
from mutirao.aggregation import FedAvg
from mutirao.arrays import Arrays, digest
from mutirao.config import resolve
from mutirao.errors import ConfigError, MutiraoError, TooFewClients
from mutirao.filters import check, fault
from mutirao.fleet import Failure, Reply, Request, Site
from mutirao.fleets import flower
from mutirao.fleets.flower import FlowerFleet, client_app, pack, server_app, settings_in, simulate, unpack
from mutirao.fleets.local import LocalFleet
from mutirao.recipes import Task
from mutirao.rounds import Run, train
from mutirao.running import execute
from mutirao.samples import Samples
from mutirao.selection import Uniform
from mutirao.training import Trainer

ROOT = Path(__file__).parents[2]
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
        raise NotImplementedError

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


def torch_task() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))

    trainer = Trainer(model)  # a round this small is trained plainly in process, too
    return Task(trainer, {k: Samples(*v) for k, v in digits().items()}, lambda: trainer.initial(3))


def connected(task: Task, names: Iterable[str] = NAMES) -> tuple[LoopGrid, FlowerFleet]:
    grid = LoopGrid(client_app(lambda _: task))
    for name in names:
        grid.join(name=name)
    return grid, FlowerFleet(grid, timeout=2, greet=2)


def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@pytest.mark.parametrize("task", [softmax_task(), torch_task()], ids=["numpy", "torch"])
def test_history_and_model_are_those_of_the_local_fleet_bit_for_bit(task: Task) -> None:
    local = LocalFleet(task.handler, task.population)
    grid, fleet = connected(task)
    runs = []
    for each in (local, fleet):
        run = Run(task.initial(), seed=3)
        made = list(train(run, each, rounds=4, select=Uniform(3), aggregate=FedAvg(), expect=5))
        runs.append((run, [r.clients for r in made]))
    (here, here_clients), (there, there_clients) = runs
    assert rows(here.history) == rows(there.history)
    assert here_clients == there_clients
    assert digest(here.arrays) == digest(there.arrays)
    kept = {c.node_config["name"]: c.state.get(flower.STATE) for c in grid.nodes.values()}
    states = {name: unpack(record) for name, record in kept.items() if isinstance(record, ArrayRecord)}
    assert {k: digest(v) for k, v in states.items()} == {k: digest(v) for k, v in local.states.items()}


def test_a_sites_state_never_leaves() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana"])
    seen: list[RecordDict] = []
    grid.meddlers[grid.node_of("ana")] = lambda message, reply: seen.append(reply.content) or [reply]
    fleet.clients()
    fleet.ask({"ana": Request("train", task.initial())})
    (content,) = seen
    assert set(content) == {"arrays", "extras", "metrics", "count"}
    assert flower.STATE in grid.nodes[grid.node_of("ana")].state
    assert "speed" not in {name for record in content.values() for name in record}


ARRAYS: Arrays = {
    "half": np.array([1.5, np.nan, np.inf], np.float16),
    "single": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
    "double": np.array([-0.0, 5e-324]),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "sliced": np.arange(10)[::-2],
    "big endian": np.arange(3, dtype=">i4"),
    "counter": np.array(2**62, np.int64),
    "bytes": np.arange(256, dtype=np.uint8),
    "flags": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "zero-d": np.array(3.25, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def test_arrays_settings_and_empty_records_survive_bit_for_bit() -> None:
    asked: list[Request] = []

    def echo(request: Request, site: Site) -> Reply:
        asked.append(request)
        return Reply(request.arrays, extras=request.arrays if request.arrays else {}, metrics={"x": 0.1}, n=3)

    _, fleet = connected(Task(echo, {"ana": None}, dict), ["ana"])
    fleet.clients()
    config = {"flag": True, "count": 1, "rate": 1.0, "text": "olá, mundo", "seed": 2**63 + 1, "tiny": 5e-324}
    for arrays in (ARRAYS, {}):
        reply = fleet.ask({"ana": Request("custom", arrays, config)}).replies["ana"]
        assert asked[-1].do == "custom"
        assert {k: (type(v), v) for k, v in asked[-1].config.items()} == {k: (type(v), v) for k, v in config.items()}
        for got in (asked[-1].arrays, reply.arrays, reply.extras):
            assert list(got) == list(arrays)
            for name, value in arrays.items():
                assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
                assert got[name].tobytes() == value.tobytes(), name
                assert got[name].flags.writeable
    assert (reply.metrics, reply.n) == ({"x": 0.1}, 3)


def test_the_model_of_a_round_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = softmax_task()
    _, fleet = connected(task)
    fleet.clients()
    start, packed = task.initial(), []
    monkeypatch.setattr(flower, "pack", lambda arrays: packed.append(arrays is start) or pack(arrays))
    fleet.ask({name: Request("train", start) for name in NAMES})
    assert sum(packed) == 1


def parcel(data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (2,), stype: str = "numpy.ndarray") -> Parcel:
    return Parcel(dtype, shape, stype, data)


def npy(header: str, body: bytes = b"\0" * 8) -> bytes:
    """A file in NumPy's format with any header."""
    text = (header + " " * 100 + "\n").encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def header(descr: str = "<f4", shape: str = "(2,)") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}"


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], object), allow_pickle=True)
    return stream.getvalue()


BAD_PARCELS = {
    "garbage": parcel(b"garbage"),
    "no bytes": parcel(b""),
    "pickled objects": parcel(pickled(), "object", (1,)),
    "another format": parcel(npy(header()), stype="pickle"),
    "text": parcel(npy(header("<U1")), "<U1"),
    "too few bytes": parcel(npy(header(shape="(3,)")), shape=(3,)),
    "too many bytes": parcel(npy(header(shape="(1,)")), shape=(1,)),
    "absurdly long": parcel(npy(header(shape="(4611686018427387904, 4)")), shape=(4611686018427387904, 4)),
    "negative": parcel(npy(header(shape="(-1, -2)")), shape=(-1, -2)),
    "negative and zero": parcel(npy(header(shape="(-1, 0)"), b""), shape=(-1, 0)),
    "says another shape": parcel(npy(header()), shape=(1, 2)),
    "says another type": parcel(npy(header()), "int32"),
    "says an unknown type": parcel(npy(header()), "float33"),
    "unknown version": parcel(b"\x93NUMPY\x09\x00" + npy(header())[8:]),
    "header that is code": parcel(npy("__import__('os').abort()")),
    "header without end": parcel(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{"),
    "65 dimensions": parcel(npy(header(shape=str((1,) * 64 + (2,)))), shape=(1,) * 64 + (2,)),
}


@pytest.mark.parametrize("bad", BAD_PARCELS.values(), ids=BAD_PARCELS)
@pytest.mark.parametrize("record", ["arrays", "extras"])
def test_an_absurd_array_is_that_clients_failure(bad: Parcel, record: str) -> None:
    def meddle(message: Message, reply: Message) -> list[Message]:
        reply.content[record] = ArrayRecord({"w": bad})
        return [reply]

    failure = failure_of_bia(meddle)
    assert failure.kind == "malformed"
    assert "\n" not in failure.reason


def failure_of_bia(meddle: Meddle, handler: Any = softmax_handler) -> Failure:
    """How bia fails when its answers are meddled with; the others are not touched by it."""
    task = dataclasses.replace(softmax_task(), handler=handler)
    grid, fleet = connected(task)
    grid.meddlers[grid.node_of("bia")] = meddle
    fleet.timeout = 0.3
    assert fleet.clients() == NAMES
    answers = check(
        fleet.ask({name: Request("train", task.initial(), {"round": 1}) for name in NAMES}),
        lambda reply: fault(task.initial(), reply),
    )
    assert list(answers.replies) == [n for n in NAMES if n != "bia"]
    assert list(answers.failures) == ["bia"]
    return answers.failures["bia"]


def honest(message: Message, reply: Message) -> list[Message]:
    return [reply]


def with_content(**records: Any) -> Meddle:
    """Answers with these records in place of their own; None removes one."""

    def meddle(message: Message, reply: Message) -> list[Message]:
        content = {k: v for k, v in ({**reply.content} | records).items() if v is not None}
        return [Message(RecordDict(content), reply_to=message)]

    return meddle


def with_error(code: int, reason: str, node: int | None = None) -> Meddle:
    def meddle(message: Message, reply: Message) -> list[Message]:
        error = Message(Error(code, reason), reply_to=message)
        if node is not None:
            error.metadata.__dict__["_src_node_id"] = node
        return [error]

    return meddle


def from_another_node(message: Message, reply: Message) -> list[Message]:
    reply.metadata.__dict__["_src_node_id"] = 12345
    return [reply]


def unreadable(message: Message, reply: Message) -> list[Message]:
    """An answer that Flower itself cannot decode."""
    reply.content["metrics"] = MetricRecord({"loss": 1.0})
    reply.content["metrics"].__dict__["_data"]["loss"] = "text"
    return [reply]


GOOD = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32), "steps": np.array(0, np.int64)}
FAULTS: dict[str, tuple[Meddle, str]] = {
    "late": (lambda message, reply: [], "late"),
    "twice": (lambda message, reply: [reply, Message(reply.content, reply_to=message)], "twice"),
    "nothing at all": (lambda message, reply: [Message(RecordDict(), reply_to=message)], "empty"),
    "no arrays record": (with_content(arrays=None), "malformed"),
    "no arrays in it": (with_content(arrays=ArrayRecord()), "empty"),
    "arrays are metrics": (with_content(arrays=MetricRecord({"w": 1.0})), "malformed"),
    "no count": (with_content(count=None), "malformed"),
    "count is a share": (with_content(count=MetricRecord({"n": 0.5})), "malformed"),
    "count is a list": (with_content(count=MetricRecord({"n": [1, 2]})), "malformed"),
    "count is negative": (with_content(count=MetricRecord({"n": -3})), "count"),
    "metric is a list": (with_content(metrics=MetricRecord({"loss": [1.0, 2.0]})), "malformed"),
    "metrics are texts": (with_content(metrics=ConfigRecord({"loss": "low"})), "malformed"),
    "metric is NaN": (with_content(metrics=MetricRecord({"loss": float("nan")})), "not_finite"),
    "array is NaN": (with_content(arrays=pack(GOOD | {"b": np.full(10, np.nan, np.float32)})), "not_finite"),
    "wrong shape": (with_content(arrays=pack(GOOD | {"b": np.zeros(9, np.float32)})), "shape"),
    "wrong type": (with_content(arrays=pack(GOOD | {"b": np.zeros(10)})), "dtype"),
    "unknown key": (with_content(arrays=pack(GOOD | {"c": np.zeros(10)})), "unknown_key"),
    "missing key": (with_content(arrays=pack({"w": GOOD["w"]})), "missing_key"),
    "huge": (with_content(arrays=pack(GOOD | {"b": np.zeros(10**7, np.float32)})), "too_large"),
    "another node's": (from_another_node, "malformed"),
    "unreadable": (unreadable, "malformed"),
    "raised in Flower": (with_error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "<class>:\n<'no\tluck'>"), "raised"),
    "app did not load": (with_error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ""), "raised"),
    "process crashed": (with_error(ErrorCode.CLIENT_APP_CRASHED, "killed"), "raised"),
    "node lost": (with_error(ErrorCode.NODE_UNAVAILABLE, "node is gone", node=1), "gone"),
    "message lost": (with_error(ErrorCode.MESSAGE_UNAVAILABLE, "no such message", node=1), "gone"),
    "reply lost": (with_error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "no such reply", node=1), "gone"),
}


@pytest.mark.parametrize(("meddle", "kind"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_answer_is_that_clients_typed_failure(meddle: Meddle, kind: str) -> None:
    failure = failure_of_bia(meddle)
    assert failure.kind == kind
    assert failure.reason
    assert failure.reason.isprintable()


def test_a_reply_of_an_earlier_round_counts_for_nothing_when_it_comes_again() -> None:
    def rounds(meddle: Meddle) -> list[Any]:
        task = softmax_task()
        grid, fleet = connected(task)
        grid.meddlers[grid.node_of("bia")] = meddle
        fleet.timeout = 0.3
        assert fleet.clients() == NAMES
        made = []
        for round in (1, 2):
            start = {name: array + array.dtype.type(round) for name, array in task.initial().items()}
            asked = {name: Request("train", start, {"round": round}) for name in NAMES}
            made.append(check(fleet.ask(asked), lambda reply: fault(task.initial(), reply)))
        return made

    kept: list[Message] = []

    def again(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return [kept[0], reply] if len(kept) > 1 else [reply]

    def instead(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return [kept[0]]

    plain, replayed = rounds(honest), rounds(again)
    assert not replayed[1].failures
    for name in NAMES:
        for key, array in plain[1].replies[name].arrays.items():
            np.testing.assert_array_equal(replayed[1].replies[name].arrays[key], array)
    kept.clear()
    alone = rounds(instead)[1]
    assert alone.failures["bia"].kind == "late"
    assert list(alone.replies) == [n for n in NAMES if n != "bia"]


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


def test_an_answer_of_an_earlier_round_is_not_taken_for_the_current_one() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana", "bia"])
    held: list[Message] = []
    fleet.timeout = 0.2
    fleet.clients()
    grid.meddlers[grid.node_of("bia")] = lambda message, reply: held.append(reply) or []
    first = fleet.ask({n: Request("train", task.initial(), {"round": 1}) for n in ("ana", "bia")})
    assert first.failures["bia"].kind == "late"
    grid.meddlers[grid.node_of("bia")] = lambda message, reply: [held[0]]  # a SuperLink that mixes up answers
    second = fleet.ask({n: Request("train", task.initial(), {"round": 2}) for n in ("ana", "bia")})
    assert list(second.replies) == ["ana"]
    assert second.failures["bia"].kind == "late"


def test_a_slow_upload_does_not_hold_up_the_others() -> None:
    task = softmax_task()
    grid, fleet = connected(task)
    stuck = grid.node_of("bia")
    pull, arrived = grid.pull_messages, threading.Event()

    def slow(message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(pull(message_ids))
        if any(m.metadata.src_node_id == stuck and m.metadata.message_type == "train" for m in found):
            arrived.wait(30)
        return found

    grid.pull_messages = slow  # type: ignore[method-assign]
    fleet.clients()
    fleet.timeout, started = 0.5, time.monotonic()
    answers = fleet.ask({n: Request("train", task.initial()) for n in NAMES})
    assert time.monotonic() - started < 10
    arrived.set()
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "late"}


def test_a_client_that_left_is_gone() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana", "bia"])
    assert fleet.clients() == ["ana", "bia"]
    del grid.nodes[grid.node_of("bia")]
    answers = fleet.ask({n: Request("train", task.initial()) for n in ("ana", "bia", "zoe")})
    assert list(answers.replies) == ["ana"]
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "gone", "zoe": "gone"}
    assert fleet.clients() == ["ana"]


def test_the_list_of_clients_changes_only_when_the_clients_do() -> None:
    grid, fleet = connected(softmax_task(), ["bia", "ana"])
    first = fleet.clients()
    assert first == ["ana", "bia"]
    assert fleet.clients() is first
    grid.join(name="caio")
    second = fleet.clients()
    assert (first, second) == (["ana", "bia"], ["ana", "bia", "caio"])
    assert fleet.clients() is second
    assert grid.greetings == 3


def test_a_name_that_is_taken_is_refused_until_its_node_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    fleet.clients()
    old = grid.node_of("ana")
    new = grid.join(name="ana")  # a SuperNode restarted; the SuperLink has not yet noticed that the old one is dead
    for _ in range(3):
        assert fleet.clients() == ["ana", "bia"]
    assert [r.getMessage() for r in caplog.records if "'ana'" in r.getMessage()] == [
        "'ana' is connected already: another node of that name is refused for now"
    ]
    assert fleet._nodes["ana"] == old
    del grid.nodes[old]
    assert fleet.clients() == ["ana", "bia"]
    assert fleet._nodes["ana"] == new
    assert grid.greetings == 3


def test_a_node_may_not_take_the_name_of_an_absent_one(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    thief = grid.node_of("bia")
    fleet.entitled = lambda name, node: name != "bia" or node != thief
    for _ in range(3):
        assert fleet.clients() == ["ana"]
    assert [r.getMessage() for r in caplog.records] == [
        f"node {thief} calls itself 'bia', and its key is another's: refused"
    ]
    own = grid.join(name="bia")
    assert fleet.clients() == ["ana", "bia"]
    assert fleet._nodes["bia"] == own


def test_two_newcomers_with_one_name_are_both_refused(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia", "bia"])
    for _ in range(3):
        assert fleet.clients() == ["ana"]
    assert [r.getMessage() for r in caplog.records] == ["2 nodes call themselves 'bia': refused until only one is left"]
    del grid.nodes[grid.node_of("bia")]
    assert fleet.clients() == ["ana", "bia"]


@pytest.mark.parametrize("name", ["", "a\nb", "a,b", "a\x00b", "\u202eana", "x" * 101, " ana", "ana\t"])
def test_a_name_that_could_do_harm_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, fleet = connected(softmax_task(), ["ana", name])
    for _ in range(2):
        assert fleet.clients() == ["ana"]
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "name" in record.getMessage()


@pytest.mark.parametrize(
    "content",
    [RecordDict(), RecordDict({"name": MetricRecord({"name": 1})}), RecordDict({"name": ConfigRecord({"name": [1]})})],
)
def test_a_node_that_answers_the_question_for_its_name_with_nonsense_is_refused(content: RecordDict) -> None:
    app = ClientApp()
    app.query("name")(lambda message, context: Message(content, reply_to=message))
    grid = LoopGrid(app)
    grid.join()
    assert FlowerFleet(grid, greet=0.2).clients() == []


def test_a_silent_node_is_asked_again_later_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "SILENCE", 2.0)
    grid, fleet = connected(softmax_task(), ["ana"])
    fleet.greet = 0.3
    silent = grid.join(name="bia")
    deliver = grid.deliver
    monkeypatch.setattr(grid, "deliver", lambda m, node: None if node == silent else deliver(m, node))
    assert fleet.clients() == ["ana"]
    started = time.monotonic()
    for _ in range(10):
        assert fleet.clients() == ["ana"]
    assert time.monotonic() - started < 1  # it was waited for once
    monkeypatch.setattr(grid, "deliver", deliver)
    time.sleep(2)
    assert fleet.clients() == ["ana", "bia"]


def test_a_node_whose_app_fails_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, fleet = connected(softmax_task(), ["ana"])
    monkeypatch.setattr(flower, "TROUBLE", 0.2)
    node = grid.join()  # it has no name yet
    assert fleet.clients() == ["ana"]
    grid.nodes[node].node_config["name"] = "bia"
    assert fleet.clients() == ["ana"]
    time.sleep(0.3)
    assert fleet.clients() == ["ana", "bia"]


def test_a_name_that_comes_late_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    fleet.greet, slow = 0.1, grid.node_of("bia")
    held: list[tuple[Message, int]] = []
    deliver = grid.deliver
    monkeypatch.setattr(grid, "deliver", lambda m, node: held.append((m, node)) if node == slow else deliver(m, node))
    assert fleet.clients() == ["ana"]
    deliver(*held[0])
    assert fleet.clients() == ["ana", "bia"]
    assert len(held) == 1


def test_a_node_without_a_name_is_told_how_to_have_one(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana"])
    grid.join()
    assert fleet.clients() == ["ana"]
    assert "--node-config" in caplog.text


def test_a_name_the_task_does_not_have_is_a_clear_failure() -> None:
    task = softmax_task()
    _, fleet = connected(task, ["ana", "anna"])
    fleet.clients()
    answers = fleet.ask({n: Request("train", task.initial()) for n in ("ana", "anna")})
    assert list(answers.replies) == ["ana"]
    assert answers.failures["anna"].reason.startswith("ConfigError: the task has no client 'anna'; did you mean 'ana'?")


def test_partitions_of_a_simulation_are_the_clients_in_order() -> None:
    grid = LoopGrid(client_app(lambda _: softmax_task()))
    for i in (4, 2, 0, 1, 3, 5):
        grid.join(**{"partition-id": i, "num-partitions": 6})
    assert FlowerFleet(grid, greet=1).clients() == NAMES  # the sixth has no client


def test_a_closed_fleet_waits_for_nobody() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana"])
    fleet.clients()
    grid.meddlers[grid.node_of("ana")] = lambda message, reply: []
    fleet.timeout = 60
    fleet.close()
    started = time.monotonic()
    assert fleet.ask({"ana": Request("train", task.initial())}).failures["ana"].kind == "late"
    assert time.monotonic() - started < 10


def test_probes_and_evaluations_travel_too() -> None:
    task = softmax_task()
    _, fleet = connected(task, ["ana"])
    fleet.clients()
    reply = fleet.ask({"ana": Request("probe", task.initial())}).replies["ana"]
    assert (reply.arrays, reply.metrics) == ({}, {"size": 120.0})
    answers = fleet.ask({"ana": Request("evaluate", task.initial())})
    assert "ana" in answers.replies


def test_a_run_configuration_holds_settings_and_assignments() -> None:
    text = settings_in(
        {
            "recipe": "quickstart",
            "rounds": 3,
            "lr": 0.2,
            "partition.alpha": 0.7,
            "partition": "dirichlet",
            "set": 'clients=4 aggregate=fedavgm aggregate.momentum=0.8 data="digits"',
            "out": "somewhere",
            "resume": False,
            "timeout": 30,
        }
    )
    name, config = flower.recipe_from(text)
    assert name == "quickstart"
    assert (config.rounds, config.lr, config.clients, config.data) == (3, 0.2, 4, "digits")
    assert config.partition.settings["alpha"] == 0.7
    assert (config.aggregate.name, config.aggregate.settings["momentum"]) == ("fedavgm", 0.8)


@pytest.mark.parametrize(
    ("run_config", "text"),
    [
        ({"recipe": "quickstar"}, "did you mean 'quickstart'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": "many"}, "rounds: 'many' is not a whole number"),
        ({"set": "lr"}, "not of the form key=value"),
        ({"set": "data='x"}, "No closing quotation"),
    ],
)
def test_a_wrong_run_configuration_is_refused_in_one_line(run_config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_in(run_config)


def test_a_process_builds_its_task_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flower.task_from.cache_clear()
    recipe, built = flower.find("quickstart"), []
    counted = dataclasses.replace(recipe, task=lambda config: built.append(config.lr) or recipe.task(config))
    monkeypatch.setattr(flower, "find", lambda name: counted)
    grid = LoopGrid(client_app(), recipe="quickstart", clients=2, set="lr=0.2")
    for i in range(2):
        grid.join(**{"partition-id": i})
    fleet = FlowerFleet(grid, timeout=20, greet=20)
    assert fleet.clients() == ["c0", "c1"]
    start = flower.recipe_task(Context(7, 1, {}, RecordDict(), grid.run_config)).initial()
    for number in (1, 2):
        assert (
            len(fleet.ask({c: Request("train", start, {"seed": 0, "round": number}) for c in fleet.clients()}).replies)
            == 2
        )
    assert built == [0.2]


def served(out: Path, nodes: dict[int, Context] | None = None, **run_config: Any) -> LoopGrid:
    """Run the server app over six clients, or over the nodes of an earlier run."""
    grid = LoopGrid(client_app(), **{"recipe": "conftest:iris", "out": str(out), "timeout": 5.0, **run_config})
    for i in range(0 if nodes else 6):
        grid.join(name=f"c{i}")
    grid.nodes |= nodes or {}
    server_app()(grid, Context(7, 1, {}, RecordDict(), grid.run_config))
    return grid


def digest_in(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def test_the_server_app_writes_the_run_folder_of_a_local_run(tmp_path: Path) -> None:
    served(tmp_path / "there", rounds=3, set="aggregate=fedavgm seed=5")
    config = resolve(iris.config, {"rounds": 3, "aggregate": "fedavgm", "seed": 5})
    here = execute("conftest:iris", config, tmp_path / "here")
    assert digest_in(tmp_path / "there") == here["digest"]
    for file in ("config.toml", "clients.csv"):
        assert (tmp_path / "there" / file).read_text() == (tmp_path / "here" / file).read_text()


def test_a_run_goes_on_only_if_it_is_asked_to_and_with_the_same_settings(tmp_path: Path) -> None:
    grid = served(tmp_path / "there", rounds=2)
    with pytest.raises(ConfigError, match="already holds a run"):
        served(tmp_path / "there", rounds=4)
    with pytest.raises(ConfigError, match="seed cannot change"):
        served(tmp_path / "there", rounds=4, resume=True, seed=1)
    served(tmp_path / "there", grid.nodes, rounds=4, resume=True)
    here = execute("conftest:iris", resolve(iris.config, {"rounds": 4}), tmp_path / "here")
    assert digest_in(tmp_path / "there") == here["digest"]


def test_the_server_app_says_in_one_line_who_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TooFewClients, match="6 came: c0, c1, c2, c3, c4, c5"):
        served(tmp_path, set="clients=7 wait=0.1")


@pytest.mark.parametrize(
    ("run_config", "text"), [({"timeout": "long"}, "timeout: 'long'"), ({"resume": 1}, "resume: 1")]
)
def test_the_server_app_refuses_wrong_values(tmp_path: Path, run_config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        served(tmp_path, **run_config)


def engine_of(grid: LoopGrid, problem: Exception | None = None) -> Callable[..., None]:
    """In place of Flower's engine: one node a client, until the server is done or there is a problem."""

    def run_engine(app: Any, toml: str, nodes: int, cpus: float, gpus: float) -> None:
        for i in range(nodes):
            grid.join(**{"partition-id": i})
        server = threading.Thread(target=app, args=(grid, Context(7, 1, {}, RecordDict(), {})))
        server.start()
        while problem is not None and grid.greetings < nodes:
            time.sleep(0.01)
        if problem is not None:
            grid.deliver = lambda message, node: None  # type: ignore[method-assign]
            time.sleep(0.3)
            raise RuntimeError("Simulation Runtime crashed.") from problem
        server.join()

    return run_engine


def simulated(monkeypatch: pytest.MonkeyPatch, out: Path, problem: Exception | None = None) -> dict[str, Any]:
    config = resolve(iris.config, {"rounds": 3})
    grid = LoopGrid(client_app(lambda _: iris.task(config)))
    monkeypatch.setattr(flower, "run_engine", engine_of(grid, problem))
    return simulate("conftest:iris", config, out)


def test_a_simulation_gives_what_the_local_fleet_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = simulated(monkeypatch, tmp_path / "there")
    here = execute("conftest:iris", resolve(iris.config, {"rounds": 3}), tmp_path / "here")
    assert there["digest"] == here["digest"]
    assert not [t for t in threading.enumerate() if t.name == "flower-engine"]


def test_an_engine_that_dies_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(MutiraoError, match="Flower's simulation ended: MemoryError: no more of it"):
        simulated(monkeypatch, tmp_path, MemoryError("no more of it"))
    assert time.monotonic() - started < 10


def test_a_refused_simulation_does_not_start_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated(monkeypatch, tmp_path)
    monkeypatch.setattr(flower, "run_engine", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigError, match="already holds a run"):
        simulate("conftest:iris", resolve(iris.config, {"rounds": 5}), tmp_path)
    assert simulate("conftest:iris", resolve(iris.config, {"rounds": 3}), tmp_path, resume=True)["already"]


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install mutirao\[flower\]"):
        simulate("conftest:iris", resolve(iris.config, {}), tmp_path)


def test_the_example_names_a_recipe_and_settings_that_exist() -> None:
    table = tomllib.loads((ROOT / "examples/flower-quickstart/pyproject.toml").read_text())
    name, config = flower.recipe_from(settings_in(table["tool"]["flwr"]["app"]["config"]))
    assert (name, config.rounds, config.clients) == ("quickstart", 3, 3)


def test_the_documented_app_with_data_that_is_only_at_the_client_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/flower.md").read_text(), re.DOTALL)[-1]
    page: dict[str, Any] = {}
    exec(compile(code, "flower.md", "exec"), page)  # the page's own code
    grid = LoopGrid(page["client"])
    for name, size in {"recife": 2, "olinda": 6}.items():
        np.save(tmp_path / f"{name}.npy", np.full((size, 3), size))
        grid.join(name=name, data=str(tmp_path / f"{name}.npy"))
    page["server"](grid, Context(7, 1, {}, RecordDict(), {}))
    assert capsys.readouterr().out == "1 [5. 5. 5.]\n2 [5. 5. 5.]\n"  # (2 * 2 + 6 * 6) / 8


def test_without_flower_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    spec = importlib.util.find_spec("mutirao.fleets.flower")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ConfigError, match=r"install mutirao\[flower\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_warning_is_logged_under_the_projects_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        connected(softmax_task(), ["ana", "ana"])[1].clients()
    assert {r.name for r in caplog.records} == {"mutirao"}
