"""Every reply is untrusted: checks before aggregation, and of the aggregated model itself.

A reply may be valid by itself and still outweigh all the others. So what one client may claim is bounded relative to
the others of its round: samples, update length, metrics. What exceeds a bound is cut or refused.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import NUMBERS, Arrays, is_finite, joint_square, nbytes, square, squares
from mutirao.core.fleet import ARRAY, Answers, ClientId, Failure, Reply, fault_of_fields
from mutirao.core.parts import Merged
from mutirao.core.roster import Roster
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
    if reply.n <= 0:
        return Failure("count", "declared no samples")
    if reply.n > MOST_SAMPLES:
        return Failure("count", "declared too many samples")
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


log = logging.getLogger("mutirao")

SIZE_CAP = 10.0  # times the median: no honest client of our recipes but recsys has more over a run
GROWTH = 2  # times the samples a client first declared, if that is above the median
FEWEST = 3  # replies among which a median is meaningful
LONGEST = 1000.0  # times the median length of the updates of a round
LONGEST_BY_MODEL = 10.0  # times the model's length: shorter updates pass, since a median may be close to 0
LONGEST_ALONE = 1e6  # times the model's length, for too few replies to have a median


def cap_sizes(counts: Mapping[ClientId, int], roster: Roster, cap: float) -> dict[ClientId, int]:
    """For each client that declares more samples than allowed, the number that counts.

    A client may declare `cap` times the median. It may also not declare more than it first did or was admitted with,
    though always up to twice that or the median. The median is that of the round or of all clients ever heard of,
    whichever is higher, so that a round of small clients cuts none; with fewer than three replies it is the latter.
    """
    if not cap or not counts:
        return {}
    declared = np.fromiter(counts.values(), np.int64, len(counts))
    first = roster.first_n[[roster.row(c) for c in counts]]
    known = roster.first_n[roster.first_n > 0]
    middle = lower_median(np.concatenate([known, declared[first == 0]]))
    if len(declared) >= FEWEST:
        middle = max(middle, lower_median(declared))
    limit = np.full(len(declared), max(1, int(cap * middle)))
    limit = np.where(first > 0, np.minimum(limit, np.maximum(GROWTH * first, middle)), limit)
    over = np.flatnonzero(declared > limit).tolist()
    names = list(counts)
    return {names[i]: int(limit[i]) for i in over}


def lower_median(values: npt.NDArray[np.int64]) -> int:
    """The median, or the lower of the two middle values: Byzantine clients that are half of all cannot raise it."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def faults_of_length(current: Arrays, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Failure]:
    """Updates of absurd length: over 1000 times the median of the round, and over 10 times the model itself."""
    length = math.sqrt(square(current))
    has_median = len(replies) >= FEWEST
    least = LONGEST_BY_MODEL * length
    if not has_median:
        least = LONGEST_ALONE * max(length, math.sqrt(sum(v.size for v in current.values())))
    # A client whose arrays are no longer than nine times the model cannot have moved it by ten times. One product of
    # each array with itself shows that nearly always. Those squares are summed in the arrays' own type, hence the 1.01.
    longest = least - 1.01 * length
    models = [r.arrays for r in replies.values()]
    if joint_square(current, models) <= longest * longest or not any(s > longest * longest for s in squares(models)):
        return {}
    moved = {c: update_length(current, r.arrays) for c, r in replies.items()}
    limit = least
    if has_median:
        limit = max(least, LONGEST * float(np.median(list(moved.values()))))
    # `not <=` instead of `>`, so that a length that is NaN is refused, too.
    return {
        c: Failure("too_long", f"moved the model by {far:.4g}, over {limit:.4g}")
        for c, far in moved.items()
        if not far <= limit
    }


def update_length(current: Arrays, arrays: Arrays) -> float:
    """|x_k - x| over all floating-point arrays; infinite if it overflows float64."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, mine in current.items():
            if mine.dtype.kind == "f":
                rows = arrays.get(name + ROWS)
                if rows is not None:
                    mine = mine[rows]
                away = arrays[name].astype(np.float64) - mine
                total += float(np.vdot(away, away))
    return math.sqrt(total)


def unexpected_metrics(
    replies: Collection[Reply], expected: Collection[str], strict: bool, existing: Collection[str] = ()
) -> set[str]:
    """The reported metrics that are left out: all but the `expected` ones if `strict`, as when a task declares them.

    Otherwise a metric is left out if at most half of the replies report it, or if it is new and there are 64 already.
    """
    times: dict[str, int] = {}
    for reply in replies:
        for name in reply.metrics:
            if name not in expected:
                times[name] = times.get(name, 0) + 1
    is_full = len(existing) >= MOST_METRICS
    return {k for k, n in times.items() if strict or 2 * n <= len(replies) or (is_full and k not in existing)}


def bound_answers(
    answers: Answers, roster: Roster, number: int, cap: float, expected: Collection[str], strict: bool
) -> tuple[Answers, dict[ClientId, int]]:
    """The answers with sample counts cut and unexpected metrics left out, and what the cut clients had declared."""
    replies = dict(answers.replies)
    sizes = cap_sizes({c: r.n for c, r in replies.items()}, roster, cap)
    unexpected = unexpected_metrics(replies.values(), expected, strict, roster.figures)
    if not sizes and not unexpected:
        return answers, {}
    declared = {c: int(replies[c].n) for c in sizes}
    for c, n in sizes.items():
        log.warning("round %d: %s declares %d samples, of which %d count", number, c, declared[c], n)
        replies[c] = replace(replies[c], n=n)
    for c, reply in replies.items():
        if odd := sorted(unexpected & reply.metrics.keys()):
            names = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
            log.warning("round %d: %s reports metrics that the task does not have, ignored: %s", number, c, names)
            replies[c] = replace(reply, metrics={k: v for k, v in reply.metrics.items() if k not in unexpected})
    return replace(answers, replies=replies), declared
