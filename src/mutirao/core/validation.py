"""Every reply is untrusted: checks before aggregation, and of the aggregated model itself."""

import math
import re
from collections.abc import Callable, Mapping, Set

import numpy as np

from mutirao.core.arrays import NUMBERS, Arrays, is_finite, joint_square, nbytes
from mutirao.core.fleet import ARRAY, Answers, ClientId, Failure, Reply, fault_of_fields
from mutirao.core.parts import Merged
from mutirao.core.sparse_rows import ROWS, fault_of_rows, faults_of_order

MOST_SAMPLES = 10**12
MOST_EXTRA_BYTES = 256 * 2**20
MOST_METRICS = 64
MOST_METRIC = 1e100  # far beyond any loss, and the sum over all clients is finite
NUMBER = (int, float, np.integer, np.floating)  # tuples made once: they are used for every client of every round
WHOLE = (int, np.integer)
METRIC_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,40}")


def faults(current: Arrays, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Failure]:
    """What is wrong with replies to a training request: names, types, shapes, sizes, finiteness, count, rows."""
    known = {*current, *(name + ROWS for name in current)}
    found = {c: wrong for c, r in replies.items() if (wrong := _fault_of_make(current, known, r)) is not None}
    sound = {c: r for c, r in replies.items() if c not in found}
    # If this bound is finite, replies need not be looked at one by one.
    finite = math.isfinite(joint_square(current, [r.arrays for r in sound.values()]))
    for c, r in sound.items():
        if not finite and not is_finite(r.arrays):
            found[c] = Failure("not_finite", "sent NaN or infinity in its arrays")
        elif (wrong := _fault_of_extras(r)) is not None:
            found[c] = wrong
    for name, mine in current.items():
        key = name + ROWS
        rows = {c: r.arrays[key] for c, r in replies.items() if c not in found and key in r.arrays}
        found |= faults_of_order(name, rows, mine)
    return found


def fault(current: Arrays, reply: Reply) -> Failure | None:
    """What is wrong with one reply to a training request, or None."""
    return faults(current, {"": reply}).get("")


def _fault_of_make(current: Arrays, known: Set[str], reply: Reply) -> Failure | None:
    if (wrong := fault_of_fields(reply)) is not None:
        return wrong
    sent = reply.arrays
    if not sent:
        return Failure("empty", "sent no arrays")
    if not sent.keys() <= known:
        strange = next(name for name in sent if name not in known)
        return Failure("unknown_key", f"sent {strange[:80]!r}, which the model does not have")
    for name, mine in current.items():
        theirs = sent.get(name)
        if theirs is None:
            return Failure("missing_key", f"did not send {name!r}")
        shape = mine.shape
        if (rows := sent.get(name + ROWS)) is not None:  # only these rows were sent
            if (wrong := fault_of_rows(name, rows, mine)) is not None:
                return wrong
            shape = (len(rows), *mine.shape[1:])
        if theirs.shape != shape:
            kind = "too_large" if theirs.nbytes > mine.nbytes else "shape"
            return Failure(kind, f"{name!r} has shape {theirs.shape}, expected {shape}")
        if theirs.dtype != mine.dtype:
            return Failure("dtype", f"{name!r} is {theirs.dtype}, expected {mine.dtype}")
    return None


def fault_of_extras(reply: Reply) -> Failure | None:
    """What is wrong with everything but the arrays: the checks of replies without a model."""
    return fault_of_fields(reply) or _fault_of_extras(reply)


def _fault_of_extras(reply: Reply) -> Failure | None:
    if reply.extras:
        for name, extra in reply.extras.items():
            if extra.dtype.kind not in NUMBERS:
                return Failure("dtype", f"extra {name[:80]!r} is not an array of numbers")
        if (sent := nbytes(reply.extras)) > MOST_EXTRA_BYTES:
            return Failure("too_large", f"sent {sent} bytes of extras, at most {MOST_EXTRA_BYTES} are accepted")
        if not is_finite(reply.extras):
            return Failure("not_finite", "sent NaN or infinity in its extras")
    return fault_of_figures(reply)


def fault_of_figures(reply: Reply) -> Failure | None:
    """What is wrong with the metrics or the count of samples."""
    if len(reply.metrics) > MOST_METRICS:
        return Failure("too_large", f"sent {len(reply.metrics)} metrics, at most {MOST_METRICS} are accepted")
    for name, value in reply.metrics.items():
        if not METRIC_NAME.fullmatch(name):
            return Failure("unknown_key", f"sent a metric named {name[:80]!r}")
        if not isinstance(value, NUMBER):
            return Failure("dtype", f"metric {name!r} is of type {type(value).__name__}, not a number")
        if not _finite(value):
            return Failure("not_finite", f"metric {name!r} is NaN, infinite or beyond {MOST_METRIC:g}")
    if not isinstance(reply.n, WHOLE):
        return Failure("count", f"declared samples of type {type(reply.n).__name__}, not a whole number")
    if not 0 < reply.n <= MOST_SAMPLES:
        return Failure("count", f"declared {'no' if reply.n <= 0 else 'too many'} samples")
    return None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value) and abs(float(value)) <= MOST_METRIC
    except OverflowError:  # a whole number beyond the largest float
        return False


def sift(answers: Answers, fault_in: Callable[[Reply], Failure | None]) -> Answers:
    """Move every reply in which `fault_in` finds a fault to the failures."""
    return set_aside(answers, {c: f for c, r in answers.replies.items() if (f := fault_in(r)) is not None})


def set_aside(answers: Answers, faults: Mapping[ClientId, Failure]) -> Answers:
    """Move the replies in which faults were found to the failures."""
    if not faults:
        return answers
    return Answers(
        {c: r for c, r in answers.replies.items() if c not in faults},
        dict(sorted({**answers.failures, **faults}.items())),
        answers.carried,
    )


def fault_of_merged(current: Arrays, merged: object) -> Failure | None:
    """What is wrong with the result of an aggregator, except NaN and infinity, which are a divergence."""
    if not isinstance(merged, Merged):
        return Failure("empty", f"gave {type(merged).__name__}, not Merged(arrays, weights)")
    if strange := sorted(merged.arrays.keys() ^ current.keys()):
        verb = "has" if strange[0] in current else "does not have"
        return Failure("unknown_key", f"gave other arrays than the model's, which {verb} {strange[0]!r}")
    for name, mine in current.items():
        theirs = merged.arrays[name]
        if not isinstance(theirs, ARRAY) or theirs.shape != mine.shape:
            return Failure("shape", f"gave {name!r} of shape {np.shape(theirs)}, expected {mine.shape}")
        if theirs.dtype != mine.dtype:
            return Failure("dtype", f"gave {name!r} as {theirs.dtype}, expected {mine.dtype}")
    return None
