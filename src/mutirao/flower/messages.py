"""Requests, replies and names in the format of Flower's messages, bit for bit.

Received content is not trusted: everything is checked before it is used, and an invalid answer becomes the `Failure` of
its sender.

Flower carries every array, and every piece of one, by requests of their own. So all arrays of a model travel as one: a
table in JSON, preceded by its length in four bytes, then the bytes of all arrays one after the other.
"""

import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from mutirao.core.agreement import AGREED
from mutirao.core.arrays import NUMBERS, Array, Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, failure_of

STYPE = "mutirao.bundle"
HEAD = struct.Struct("<I")
MOST_DIMENSIONS = 32


class MalformedError(ValueError):
    """A message that does not hold what it should."""


def serialize(arrays: Arrays) -> FlowerArray:
    """Arrays in one parcel, bit for bit; their bytes are copied once."""
    table: list[list[Any]] = []
    parts: list[Any] = [b"", b""]
    for name, value in arrays.items():
        # An array in Fortran's order travels transposed: its bytes stay as they are, and so does its order.
        turned = not value.flags.c_contiguous and value.flags.f_contiguous
        plain = np.asarray(value.T if turned else value, order="C")
        if plain.dtype.kind not in NUMBERS:
            raise TypeError(f"{name[:80]!r} holds {plain.dtype}, not numbers")
        table.append([name, plain.dtype.str, list(value.shape), turned])
        parts.append(plain.reshape(-1).view(np.uint8).data)
    head = json.dumps(table).encode()
    parts[:2] = HEAD.pack(len(head)), head
    data = b"".join(parts)
    return FlowerArray("uint8", (len(data),), STYPE, data)


def deserialize(parcel: FlowerArray) -> Arrays:
    """The arrays of a bundle; MalformedError if it is none. No number in it is believed before all were compared."""
    data = parcel.data
    try:
        (length,) = HEAD.unpack_from(data)
        rows = json.loads(data[HEAD.size : HEAD.size + length])
        table = [array_entry(*row) for row in rows]
    except MalformedError:
        raise
    except Exception as error:
        raise MalformedError("a bundle of arrays cannot be read") from error
    if len({name for name, *_ in table}) != len(table):
        raise MalformedError("a bundle holds two arrays of one name")
    at = HEAD.size + length
    if at + sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in table) != len(data):
        raise MalformedError("the arrays of a bundle are not as long as it says")
    arrays: Arrays = {}
    for name, dtype, shape, turned in table:
        count = math.prod(shape)
        try:
            if count:
                arrays[name] = array_at(data, at, dtype, shape, turned)
            else:
                arrays[name] = np.empty(shape, dtype)
        except ValueError as error:  # one without numbers may still claim to be too large
            raise MalformedError(f"{name[:80]!r} has no shape that an array can have") from error
        at += count * dtype.itemsize
    return arrays


def array_entry(name: Any, descr: Any, shape: Any, turned: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], bool]:
    """One line of the table, if it can be one."""
    if not isinstance(name, str) or not isinstance(descr, str) or len(shape) > MOST_DIMENSIONS:
        raise MalformedError("the table of a bundle names no array")
    # By type: for isinstance, True is an int as well.
    if not all(type(length) is int and 0 <= length < 2**48 for length in shape):
        raise MalformedError(f"{name[:80]!r} has no shape that an array can have")
    dtype = np.dtype(descr)
    if dtype.kind not in NUMBERS or dtype.str != descr:
        raise MalformedError(f"{name[:80]!r} holds {descr[:20]!r}, not numbers")
    return name, dtype, tuple(shape), turned is True


def array_at(data: bytes, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], turned: bool) -> Array:
    """An array's own copy: handlers may write into it."""
    flat = np.frombuffer(data, dtype, math.prod(shape), at)
    return flat.reshape(shape, order="F" if turned else "C").copy(order="K")


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

CLOCK_TOLERANCE = 600.0  # seconds by which the clocks of server and clients may differ before messages expire early
LONGEST_NAME = 100
UNREACHABLE = {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
# What is no training: whatever else is done counts as that.
KINDS = {"evaluate": MessageType.EVALUATE, "probe": MessageType.QUERY, "rows": MessageType.QUERY}
NUMBERS_OF_FLOWER = re.compile(r"\b(?:[0-9a-f]{64}|-?[0-9]{15,20})\b")  # ids with which messages of others can be named
AGREED_RECORD = "agreed"  # the record of an answer in which a site says by digest what it worked with
ROOM = 16 * 2**20  # bytes of arrays in one parcel; Flower needs thrice the memory of a parcel while it opens it
REFUSED = 8001  # the code of an answer that a site's policy does not allow; Flower's own are below 1000


def pack(arrays: Arrays) -> ArrayRecord:
    """Arrays as Flower's own apps send them, bit for bit, one by one."""
    return ArrayRecord({k: FlowerArray.from_numpy_ndarray(np.asarray(v)) for k, v in arrays.items()})


def pack_together(arrays: Arrays) -> ArrayRecord:
    """Arrays as ours send them, bit for bit: in as few parcels as may be, none of which takes much memory to open."""
    groups: list[Arrays] = []
    room = 0
    for name, value in arrays.items():
        whole = np.asarray(value)
        if not groups or whole.nbytes > room:
            groups.append({})
            room = ROOM
        groups[-1][name] = whole
        room -= whole.nbytes
    return ArrayRecord({str(i): serialize(group) for i, group in enumerate(groups)})


def unpack(record: ArrayRecord) -> Arrays:
    """The arrays of a record; MalformedError if one is not what it says it is."""
    arrays: Arrays = {}
    for name, parcel in record.items():
        found: Arrays = {}
        if parcel.stype == STYPE:
            found = deserialize(parcel)
        else:
            found[name] = unpack_one(name[:80], parcel)
        if not arrays.keys().isdisjoint(found):
            raise MalformedError("two arrays of one name")
        arrays |= found
    return arrays


def unpack_one(name: str, parcel: FlowerArray) -> Array:
    """One array in NumPy's file format. The header is believed only after it was compared with the bytes that came."""
    if parcel.stype != "numpy.ndarray":
        raise MalformedError(f"{name!r} is serialised as {parcel.stype[:40]!r}, not as numpy.ndarray")
    stream = io.BytesIO(parcel.data)
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[np.lib.format.read_magic(stream)](stream)
        declared = np.dtype(parcel.dtype)
    except Exception as error:
        raise MalformedError(f"{name!r} cannot be decoded") from error
    if dtype.kind not in NUMBERS:
        raise MalformedError(f"{name!r} holds {dtype}, not numbers")
    if declared != dtype or tuple(parcel.shape) != shape:
        raise MalformedError(f"{name!r} declares {declared} {tuple(parcel.shape)} and holds {dtype} {shape}")
    size = len(parcel.data) - stream.tell()
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != size:
        raise MalformedError(f"{name!r} declares {dtype} {shape} and holds {size} bytes")
    flat = np.frombuffer(parcel.data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")  # handlers may write into it


def request_message(
    request: Request, packed: Mapping[str, ArrayRecord], node: int, timeout: float, where: Mapping[str, Scalar]
) -> Message:
    """A request on its way to a node; `packed` are its arrays and extras, `where` says what the server has recorded."""
    config = ConfigRecord({k: v.item() if isinstance(v, np.generic) else v for k, v in request.config.items()})
    about: dict[str, Any] = {"do": request.do, **where}
    content = RecordDict({**packed, "config": config, "request": ConfigRecord(about)})
    kind = KINDS.get(request.do, MessageType.TRAIN)
    group = str(request.config.get("round", ""))
    return Message(content, node, kind, ttl=timeout + CLOCK_TOLERANCE, group_id=group)


def request_in(message: Message) -> Request:
    """The request a message carries."""
    content = message.content
    config: dict[str, Any] = dict(record_of(content, "config", ConfigRecord))
    do = str(record_of(content, "request", ConfigRecord)["do"])
    return Request(do, unpack(record_of(content, "arrays", ArrayRecord)), config, extras_in(content))


def extras_in(content: RecordDict) -> Arrays:
    """The extras of a request or of a reply; both may have none."""
    if "extras" in content:
        return unpack(record_of(content, "extras", ArrayRecord))
    return {}


def reply_content(reply: Reply) -> RecordDict:
    """All that leaves a client."""
    content: dict[str, Any] = {"arrays": pack_together(reply.arrays)}
    if reply.extras:
        content["extras"] = pack_together(reply.extras)
    content["metrics"] = MetricRecord({k: float(v) for k, v in reply.metrics.items()})
    content["count"] = MetricRecord({"n": int(reply.n)})
    return RecordDict(content)


def reply_in(message: Message, node: int) -> Reply | Failure:
    """The reply a message carries, or what is wrong with it; nothing a client sends makes this raise."""
    try:
        if (failure := failure_in(message, node)) is not None:
            return failure
        content = message.content
        metrics = record_of(content, "metrics", MetricRecord)
        n = record_of(content, "count", MetricRecord).get("n")
        if not isinstance(n, int):
            raise MalformedError("the number of samples is missing or no whole number")
        if any(isinstance(v, list) for v in metrics.values()):
            raise MalformedError("a metric is a list, not a number")
        return Reply(
            unpack(record_of(content, "arrays", ArrayRecord)),
            extras_in(content),
            {k: float(v) for k, v in metrics.items() if not isinstance(v, list)},
            n,
        )
    except MalformedError as error:
        return Failure("malformed", clean_line(str(error)))
    except Exception as error:
        return Failure("malformed", failure_of(error).reason)


def without_arrays(message: Message) -> Message:
    """A message that was read, without its arrays: they may be large, and Flower's own copy of them is not needed."""
    for name in [name for name, record in message.content.items() if isinstance(record, ArrayRecord)]:
        del message.content[name]
    return message


def name_in(message: Message, node: int) -> ClientId | Failure:
    """The name a node declares, or why it cannot be one: names end up in logs and tables."""
    if (failure := failure_in(message, node)) is not None:
        return failure
    record = message.content.get("name")
    name = record.get("name") if isinstance(record, ConfigRecord) else None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return Failure("malformed", f"a name is a text of 1 to {LONGEST_NAME} characters")
    if not name.isprintable() or "," in name or name != name.strip():
        return Failure("malformed", f"{name!r} has characters that a name may not have")
    return name


def audit_head_in(message: Message, record: str) -> dict[str, Scalar]:
    """Where the other side's audit trail stands, as a message says; empty if it says nothing sound."""
    if not message.has_content():
        return {}
    found = message.content.get(record)
    if not isinstance(found, ConfigRecord):
        return {}
    seq = found.get("seq")
    hashes = {k: found.get(k) for k in ("first", "head")}
    if not isinstance(seq, int) or not all(re.fullmatch("[0-9a-f]{64}", str(v)) for v in hashes.values()):
        return {}
    return {"seq": seq, **{k: str(v) for k, v in hashes.items()}}


def error_in_agreed_digests(message: Message, request: Request) -> Failure | None:
    """What is wrong with the digests that an answer must bring of all that its request says is agreed on."""
    found = message.content.get(AGREED_RECORD)
    digests = dict(found) if isinstance(found, ConfigRecord) else {}
    for key, wanted in request.config.items():
        name = key.removeprefix(AGREED)
        if name != key and digests.get(name) != wanted:
            fault = "another digest" if name in digests else "no digest"
            return Failure("refused", f"{key}: its answer comes with {fault} of the {name} that it worked with")
    return None


def failure_in(message: Message, node: int) -> Failure | None:
    """Why a message is not the answer of that node's client code, if so."""
    # Before the sender is checked: the error of a lost node comes from the SuperLink itself.
    if message.has_error():
        code = message.error.code
        kind = "raised"
        if code in UNREACHABLE:
            kind = "gone"
        elif code == REFUSED:
            kind = "refused"
        return Failure(kind, clean_line(message.error.reason or f"Flower's error {message.error.code}"))
    if message.metadata.src_node_id != node:
        return Failure("malformed", "the answer comes from another node")
    if not message.has_content() or not message.content:
        return Failure("empty", "sent nothing")
    return None


def node_tag(node: int) -> str:
    """A stable name of a node for logs, from which its id cannot be derived."""
    return hashlib.sha256(f"node {node}".encode()).hexdigest()[:8]


def record_of(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """The record of that name and kind; MalformedError without it."""
    record = content.get(name)
    if not isinstance(record, kind):
        raise MalformedError(f"the record {name!r} is missing or no {kind.__name__}")
    return record


def clean_line(text: str) -> str:
    """Text of a stranger, fit for a log: one line, without the numbers of nodes and messages."""
    text = NUMBERS_OF_FLOWER.sub("...", text[:1000])
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]
