"""Every reply is untrusted: what is checked before it may touch the average, and filters that drop odd updates."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mutirao.arrays import Arrays, flat, is_finite, nbytes
from mutirao.fleet import Answers, ClientId, Failure, Reply

Filter = Callable[[Arrays, Mapping[ClientId, Reply]], tuple[dict[ClientId, Reply], dict[ClientId, str]]]

MOST_SAMPLES = 10**12
MOST_EXTRA_BYTES = 256 * 2**20
MOST_METRICS = 64
METRIC_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,40}")


def fault(current: Arrays, reply: Reply) -> Failure | None:
    """What is wrong with a reply to a training request, or None: names, types, shapes, sizes, finiteness, count."""
    if not reply.arrays:
        return Failure("empty", "sent no arrays")
    for name in reply.arrays:
        if name not in current:
            return Failure("unknown_key", f"sent {name[:80]!r}, which the model does not have")
    for name, mine in current.items():
        theirs = reply.arrays.get(name)
        if theirs is None:
            return Failure("missing_key", f"did not send {name!r}")
        if not isinstance(theirs, np.ndarray | np.generic):  # NumPy makes a scalar of an array without axes
            return Failure("dtype", f"{name!r} is of type {type(theirs).__name__}, not an array")
        if theirs.nbytes > mine.nbytes and theirs.shape != mine.shape:
            return Failure("too_large", f"{name!r} has shape {theirs.shape}, expected {mine.shape}")
        if theirs.shape != mine.shape:
            return Failure("shape", f"{name!r} has shape {theirs.shape}, expected {mine.shape}")
        if theirs.dtype != mine.dtype:
            return Failure("dtype", f"{name!r} is {theirs.dtype}, expected {mine.dtype}")
    if not is_finite(reply.arrays):
        return Failure("not_finite", "sent NaN or infinity in its arrays")
    return fault_of_extras(reply)


def fault_of_extras(reply: Reply) -> Failure | None:
    """What is wrong with everything but the arrays: the only checks for replies that carry no model."""
    for name, extra in reply.extras.items():
        if not isinstance(extra, np.ndarray | np.generic) or extra.dtype.kind == "O":
            return Failure("dtype", f"extra {name[:80]!r} is not an array of numbers")
    if (sent := nbytes(reply.extras)) > MOST_EXTRA_BYTES:
        return Failure("too_large", f"sent {sent} bytes of extras, at most {MOST_EXTRA_BYTES} are taken")
    if len(reply.metrics) > MOST_METRICS:
        return Failure("too_large", f"sent {len(reply.metrics)} metrics, at most {MOST_METRICS} are taken")
    if not is_finite(reply.extras):
        return Failure("not_finite", "sent NaN or infinity in its extras")
    for name, value in reply.metrics.items():
        if not METRIC_NAME.fullmatch(name):
            return Failure("unknown_key", f"sent a metric named {name[:80]!r}")
        if not isinstance(value, int | float | np.integer | np.floating):
            return Failure("dtype", f"metric {name!r} is of type {type(value).__name__}, not a number")
        if not _finite(value):
            return Failure("not_finite", f"metric {name!r} is NaN, infinite or too large for a float")
    if not isinstance(reply.n, int | np.integer) or not 0 < reply.n <= MOST_SAMPLES:
        return Failure("count", f"declared {reply.n!r} samples")
    return None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def check(answers: Answers, fault_in: Callable[[Reply], Failure | None]) -> Answers:
    """Move every reply in which `fault_in` finds a fault to the failures."""
    faults = {c: f for c, r in answers.replies.items() if (f := fault_in(r)) is not None}
    return Answers(
        {c: r for c, r in answers.replies.items() if c not in faults},
        dict(sorted((answers.failures | faults).items())),
    )


@dataclass(frozen=True)
class NormFilter:
    """Drop updates whose length is more than `factor` times the median length of the round."""

    factor: float = 3.0

    def __call__(
        self, current: Arrays, replies: Mapping[ClientId, Reply]
    ) -> tuple[dict[ClientId, Reply], dict[ClientId, str]]:
        """The replies kept, and why each of the others was not."""
        here = flat(current)
        lengths = {c: float(np.linalg.norm(flat(r.arrays) - here)) for c, r in replies.items()}
        limit = self.factor * float(np.median(list(lengths.values()))) if lengths else 0.0
        rejected = {
            c: f"update of length {x:.4g}, over {limit:.4g} ({self.factor:g} times the median)"
            for c, x in lengths.items()
            if x > limit
        }
        return {c: r for c, r in replies.items() if c not in rejected}, rejected
