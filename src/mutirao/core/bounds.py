"""What one client may claim, measured against the others of its round: its samples, its reach, its metrics.

A reply may be sound by itself and still outweigh all the others. What is too much is cut to a bound or refused, so that
no single client takes over the model, ends the run or crowds the tables.
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
FEWEST = 3  # replies among which a median means something
LONGEST = 1000.0  # times the median length of the updates of a round
LONGEST_BY_MODEL = (
    10.0  # times the length of the model, below which no update is absurd: a median may be next to nothing
)
ALONE = 1e6  # times the length of the model, for so few replies that there is no median


def cap_sizes(counts: Mapping[ClientId, int], roster: Roster, cap: float) -> dict[ClientId, int]:
    """For each client that declares more samples than it may, as many as count.

    It may declare `cap` times the median, and no more than it first did or was admitted with, but twice that or the
    median in any case. The median is that of the round or of all that were ever heard of, whichever is higher, so that
    a round of small clients cuts nobody; of fewer than three replies, the latter. Of two in the middle, the lower.
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
    """The median, or the lower of the two in the middle: half of an even number of liars cannot move it."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def faults_of_length(current: Arrays, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Failure]:
    """Whose update is absurdly long: 1000 times the median of the round, and 10 times the model itself.

    Who sent an array no longer than nine times the model cannot have moved it by ten times: mostly one product of each
    array with itself tells that nobody did.
    """
    length = math.sqrt(square(current))
    few = len(replies) < FEWEST
    least = ALONE * max(length, math.sqrt(sum(v.size for v in current.values()))) if few else LONGEST_BY_MODEL * length
    reach = least - 1.01 * length  # squares are summed up in the type of the array, with its rounding
    models = [r.arrays for r in replies.values()]
    if joint_square(current, models) <= reach * reach or not any(s > reach * reach for s in squares(models)):
        return {}
    moved = {c: update_length(current, r.arrays) for c, r in replies.items()}
    limit = least if few else max(least, LONGEST * float(np.median(list(moved.values()))))
    return {
        c: Failure("too_long", f"moved the model by {far:.4g}, over {limit:.4g}")
        for c, far in moved.items()
        if not far <= limit
    }


def update_length(current: Arrays, arrays: Arrays) -> float:
    """|x_k - x| over the numbers of floating point; infinite if it is beyond float64."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, mine in current.items():
            if mine.dtype.kind == "f":
                rows = arrays.get(name + ROWS)
                away = arrays[name].astype(np.float64) - (mine if rows is None else mine[rows])
                total += float(np.vdot(away, away))
    return math.sqrt(total)


def strange_metrics(
    replies: Collection[Reply], known: Collection[str], strict: bool, held: Collection[str] = ()
) -> set[str]:
    """The metrics told that are not taken: if `strict`, all but the `known`, which a task has said there are.

    If not, of the others those that half of the replies or fewer tell, and new ones once 64 names are `held`.
    """
    told: dict[str, int] = {}
    for reply in replies:
        for name in reply.metrics:
            if name not in known:
                told[name] = told.get(name, 0) + 1
    full = len(held) >= MOST_METRICS
    return {k for k, times in told.items() if strict or 2 * times <= len(replies) or (full and k not in held)}


def hold_to_bounds(
    answers: Answers, roster: Roster, number: int, cap: float, known: Collection[str], strict: bool
) -> tuple[Answers, dict[ClientId, int]]:
    """The answers of a round with sizes cut and strange metrics left out, and what those who were cut declared."""
    replies = dict(answers.replies)
    sizes = cap_sizes({c: r.n for c, r in replies.items()}, roster, cap)
    strange = strange_metrics(replies.values(), known, strict, roster.figures)
    declared = {c: int(replies[c].n) for c in sizes}
    for c, n in sizes.items():
        log.warning("round %d: %s declares %d samples, of which %d count", number, c, declared[c], n)
        replies[c] = replace(replies[c], n=n)
    for c, reply in replies.items() if strange else ():
        if odd := sorted(strange & reply.metrics.keys()):
            names = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
            log.warning("round %d: %s tells what the task does not know of, which is left out: %s", number, c, names)
            replies[c] = replace(reply, metrics={k: v for k, v in reply.metrics.items() if k not in strange})
    return replace(answers, replies=replies) if sizes or strange else answers, declared
