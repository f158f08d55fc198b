"""Which checkpoints of a run go when another one comes."""

from collections.abc import Mapping
from typing import Literal

LAST = 3  # checkpoints that are kept in any case, so that a damaged one does not end a run
Keep = int | Literal["few", "all"]


def rounds_to_drop(sizes: Mapping[int, int], keep: Keep, most: int | None, sparse: bool) -> list[int]:
    """Rounds whose checkpoints are not to be kept, then the oldest that do not fit into `most` bytes.

    `keep` is so many of the last, `all`, or `few`: the last three and, if `sparse`, those of the rounds 0, 1, 2, 4, 8,
    ... To forget a client one begins before it came, and so never has to make again more than twice the rounds.

    >>> rounds_to_drop(dict.fromkeys(range(10), 100), "few", None, sparse=True)
    [3, 5, 6, 7]
    """
    rounds = sorted(sizes)
    last = LAST if isinstance(keep, str) else keep
    rounds, stay = (rounds[: 1 - last], rounds[1 - last :]) if last > 1 else (rounds, [])
    kept = [n for n in rounds if keep == "all" or (keep == "few" and sparse and not n & (n - 1))]
    total = sum(sizes[n] for n in [*kept, *stay])
    while most is not None and total > most and kept:
        total -= sizes[kept.pop(0)]
    return [n for n in rounds if n not in kept]
