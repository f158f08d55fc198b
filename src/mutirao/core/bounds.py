"""Bounds on what one client may claim, relative to the others of its round: samples, update length, metrics.

A reply may be valid by itself and still outweigh all the others. What exceeds a bound is cut or refused, so that no
single client takes over the model, ends the run or floods the tables.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, joint_square, square, squares
from mutirao.core.fleet import Answers, ClientId, Failure, Reply
from mutirao.core.roster import Roster
from mutirao.core.sparse_rows import ROWS
from mutirao.core.validation import MOST_METRICS

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
                away = arrays[name].astype(np.float64) - (mine if rows is None else mine[rows])
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
