"""What travels survives bit for bit, and whatever else comes over Flower's wire is its sender's typed failure."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as Parcel
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from loopgrid import Meddle, connected, failure_of_bia, identity, softmax_task
from mutirao.core.agreement import bytes_to_extra, digest_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.experiments.task import Task
from mutirao.flower.messages import pack

__all__ = ["identity"]  # a fixture that holds for all tests here, too

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
        reply = fleet.ask({"ana": Request("custom", arrays, config, arrays)}).replies["ana"]
        assert asked[-1].do == "custom"
        assert {k: (type(v), v) for k, v in asked[-1].config.items()} == {k: (type(v), v) for k, v in config.items()}
        for got in (asked[-1].arrays, asked[-1].extras, reply.arrays, reply.extras):
            assert list(got) == list(arrays)
            for name, value in arrays.items():
                assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
                assert got[name].tobytes() == value.tobytes(), name
                assert got[name].flags.writeable
    assert (reply.metrics, reply.n) == ({"x": 0.1}, 3)


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


@pytest.mark.parametrize(
    "bad", [ArrayRecord({"w": BAD_PARCELS["garbage"]}), ConfigRecord({"w": 1})], ids=["array", "kind"]
)
@pytest.mark.parametrize("record", ["arrays", "extras"])
def test_a_request_that_cannot_be_read_reaches_no_handler(bad: ArrayRecord | ConfigRecord, record: str) -> None:
    asked: list[Request] = []

    def note(request: Request, site: Site) -> Reply:
        asked.append(request)
        return Reply({}, n=1)

    grid, fleet = connected(Task(note, {"ana": None}, dict), ["ana"])
    assert fleet.clients() == ["ana"]
    deliver = grid.deliver

    def meddle(message: Message, node: int) -> None:
        message.content[record] = bad
        deliver(message, node)

    grid.deliver = meddle  # type: ignore[method-assign]
    failure = fleet.ask({"ana": Request("train", {"w": np.zeros(2)}, {}, {"c": np.zeros(3)})}).failures["ana"]
    assert failure.reason.startswith("MalformedError: ")
    assert asked == []


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


@pytest.mark.parametrize("name", ["", "a\nb", "a,b", "a\x00b", "\u202eana", "x" * 101, " ana", "ana\t"])
def test_a_name_that_could_do_harm_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, fleet = connected(softmax_task(), ["ana", name])
    for _ in range(2):
        assert fleet.clients() == ["ana"]
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "name" in record.getMessage()


def without_digest(message: Message, reply: Message) -> list[Message]:
    del reply.content["agreed"]
    return [reply]


def another_digest(message: Message, reply: Message) -> list[Message]:
    reply.content["agreed"] = ConfigRecord({"body": "b2"})
    return [reply]


@pytest.mark.parametrize(("meddle", "fault"), [(without_digest, "no digest"), (another_digest, "another digest")])
def test_a_reply_counts_only_with_the_digest_of_what_was_agreed_on(meddle: Meddle, fault: str) -> None:
    task = replace(softmax_task(), basis=lambda: {"body": "b1"})
    grid, fleet = connected(task, ["ana", "bia"])
    grid.meddlers[grid.node_of("bia")] = meddle
    fleet.clients()
    answers = fleet.ask({c: Request("train", task.initial(), {"agreed.body": "b1"}) for c in ("ana", "bia")})
    assert list(answers.replies) == ["ana"]
    assert answers.failures["bia"].kind == "refused"
    assert answers.failures["bia"].reason.startswith(f"agreed.body: its answer comes with {fault} of the body")


def test_what_was_agreed_on_may_come_with_the_request_itself() -> None:
    task = softmax_task()
    _, fleet = connected(task, ["ana"])
    fleet.clients()
    schema = b"columns"
    request = Request("train", task.initial(), {"agreed.schema": digest_of(schema)}, bytes_to_extra("schema", schema))
    answers = fleet.ask({"ana": request})
    assert list(answers.replies) == ["ana"], answers.failures
