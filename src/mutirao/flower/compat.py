"""What Flower's own apps say to each other, as requests and replies: one ArrayRecord, one ConfigRecord, `num-examples`.

A stock Strategy sends the model and a configuration with `server-round`; a stock ClientApp answers with its model and
metrics, among them `num-examples`. What a method wants besides (`extras`) comes as a list among the metrics, or as an
ArrayRecord of that name: a stock ClientApp needs one more line for it.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import Failure, Reply, Request, Scalar, failure_of
from mutirao.errors import ConfigError
from mutirao.flower.messages import MalformedError, clean_line, failure_in, pack, unpack

COUNT = "num-examples"
ROUND = "server-round"
EXTRAS = "extras"
TYPES = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}
FLOWER_NAMES = {"mu": "proximal-mu", "round": ROUND}  # our names of settings, and what Flower's own apps call them
ERRORS = "squared_errors"
SIZES = "batch_sizes"
LARGEST = 255


def is_flower_message(message: Message) -> bool:
    """Whether a request comes from one of Flower's own strategies: ours say what is to be done in a record."""
    return "request" not in message.content


def config_for(config: Mapping[str, Scalar]) -> dict[str, Any]:
    """Settings of a request by our names and by Flower's, so that its own apps find them as well."""
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in config.items()}
    return {**plain, **{theirs: plain[ours] for ours, theirs in FLOWER_NAMES.items() if ours in plain}}


def flower_message(request: Request, arrays: ArrayRecord, node: int, **about: Any) -> Message:
    """A request as a stock ClientApp understands it; ConfigError for one that it cannot answer."""
    if request.do not in TYPES or request.extras:
        what = "arrays beside the model"
        if request.do not in TYPES:
            what = repr(request.do)
        raise ConfigError(f"Flower's own ClientApps answer 'train' and 'evaluate' with a model alone, not {what}")
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config_for(request.config))})
    return Message(content, node, TYPES[request.do], **about)


def required_extras(request: Request) -> set[str]:
    """What a request wants besides a model and a number of samples."""
    return {name for name in str(request.config.get("extras", "")).split(",") if name}


def flower_request_in(message: Message, seed: int) -> Request:
    """The request in a message of a stock Strategy, which has no seed."""
    content = message.content
    do = {kind: do for do, kind in TYPES.items()}.get(message.metadata.message_type.partition(".")[0])
    if do is None:
        raise MalformedError(f"a message of type {message.metadata.message_type[:40]!r} says not what is to be done")
    records = list(content.array_records.values())
    if len(records) != 1:
        raise MalformedError(f"a request has one ArrayRecord, this one {len(records)}")
    settings: dict[str, Any] = {k: v for record in content.config_records.values() for k, v in record.items()}
    ours = {theirs: ours for ours, theirs in FLOWER_NAMES.items()}
    config = {"seed": seed, "round": 0, **{ours.get(k, k): v for k, v in settings.items()}}
    return Request(do, unpack(records[0]), config)


def flower_reply(reply: Reply, request: Request) -> RecordDict:
    """A reply as a stock Strategy understands it: one ArrayRecord and no more, unless it has asked for extras."""
    content: dict[str, Any] = {}
    if reply.arrays:
        content["arrays"] = pack(reply.arrays)
    content["metrics"] = MetricRecord({**{k: float(v) for k, v in reply.metrics.items()}, COUNT: int(reply.n)})
    # Flower's own strategies refuse replies with more than one ArrayRecord.
    if reply.extras and required_extras(request):
        content[EXTRAS] = pack(reply.extras)
    return RecordDict(content)


def flower_reply_in(message: Message, node: int, wanted: Collection[str] = (), key: str = COUNT) -> Reply | Failure:
    """The reply of a stock ClientApp, with all that was `wanted` of it; nothing a client sends makes this raise."""
    try:
        if (failure := failure_in(message, node)) is not None:
            return failure
        reply = read(message.content, key)
    except MalformedError as error:
        return Failure("malformed", clean_line(str(error)))
    except Exception as error:
        return Failure("malformed", failure_of(error).reason)
    if missing := sorted(set(wanted) - reply.metrics.keys() - reply.extras.keys()):
        return Failure("missing_key", f"did not send {missing[0]!r}: its MetricRecord has to hold it")
    return reply


def read(content: RecordDict, key: str) -> Reply:
    """What the records of a stock ClientApp hold."""
    models = [record for name, record in content.array_records.items() if name != EXTRAS]
    if len(models) > 1:
        raise MalformedError(f"the reply has {len(models)} ArrayRecords, not one")
    values: dict[str, Any] = {k: v for record in content.metric_records.values() for k, v in record.items()}
    n = values.pop(key, None)
    if isinstance(n, list) or n is None or not math.isfinite(n) or n != int(n):
        raise MalformedError(f"the metric {key!r} is missing or no whole number")
    extras = {k: np.asarray(v) for k, v in values.items() if isinstance(v, list)}
    if isinstance(more := content.get(EXTRAS), ArrayRecord):
        extras |= unpack(more)
    metrics = {k: float(v) for k, v in values.items() if not isinstance(v, list)}
    arrays: Arrays = {}
    if models:
        arrays = unpack(models[0])
    return Reply(arrays, errors_in(extras), metrics, int(n))


def errors_in(extras: Arrays) -> Arrays:
    """Extras with the squared errors as FedRisk takes them: a byte each, and how many of them are a batch."""
    if ERRORS not in extras:
        return extras
    errors = as_whole(ERRORS, extras[ERRORS], LARGEST).astype(np.uint8)
    sizes = as_whole(SIZES, extras.get(SIZES, np.array([len(errors)])), max(1, len(errors))).astype(np.int32)
    if sizes.sum() != len(errors):
        raise MalformedError(f"{SIZES!r} sum up to {sizes.sum()}, and there are {len(errors)} of {ERRORS!r}")
    return {**extras, ERRORS: errors, SIZES: sizes}


def as_whole(name: str, values: npt.ArrayLike, most: int) -> Array:
    """A vector of whole numbers from 0 to `most`; MalformedError if it is none."""
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "biuf" or not found.size:
        raise MalformedError(f"{name!r} is no list of numbers")
    if not np.all((found >= 0) & (found <= most) & (found == np.floor(found))):
        raise MalformedError(f"{name!r} holds another than whole numbers from 0 to {most}")
    return found
