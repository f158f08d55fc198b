"""Implicit feedback has no zeros: beside the items a user took, others are drawn, anew each round."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.systems.recsys.kernels import MIX, compiled
from mutirao.systems.recsys.local_training import Local, shuffle

Ints = npt.NDArray[np.int64]


def draw_others(
    works: Sequence[Local],
    items: int,
    negatives: int,
    weight: float,
    rebuild_weight: float,
    half_life: float,
    *,
    fast: bool,
) -> list[Local]:
    """The works with `negatives` times as many others beside the items taken, each going where its item goes.

    Both come in rising order, which does not tell which were taken. Taken is 1, another 0, counting `weight`. Drawn,
    from each user's `seed`, are first the others, then `draws` of the items taken as support; the n-th other is the
    partner of the n-th item, modulo the items. With a `half_life`, an item of the support counts 2^-(age / half_life).
    """
    taken = np.array([len(w.rows) for w in works])
    wanted = np.minimum(negatives * taken, items - taken)
    offsets, begins = (np.concatenate([[0], np.cumsum(n)]) for n in (taken, taken + wanted))
    rows, owner = np.empty(begins[-1], np.int32), np.empty(begins[-1], np.int32)
    y, support = np.empty(begins[-1], np.float32), np.empty(begins[-1], np.bool_)
    seeds, draws = np.array([w.seed for w in works], np.uint64), np.array([w.draws for w in works])
    fill = (compiled(fill_others) if fast else None) or fill_plainly
    fill(seeds, draws, offsets, np.concatenate([w.rows for w in works]), items, begins, rows, y, support, owner)
    other = y == 0
    at = owner + np.repeat(offsets[:-1], taken + wanted)  # the item taken, among all users'
    place = np.empty(offsets[-1], np.int32)
    place[at[~other]] = (np.arange(begins[-1]) - np.repeat(begins[:-1], taken + wanted))[~other]
    partner = np.where(other, place[at], np.int32(-1))
    counts = np.ones(offsets[-1], np.float32)
    if half_life > 0:
        ages = np.concatenate([np.zeros(len(w.rows)) if w.ages is None else w.ages for w in works])
        counts = np.exp2(-ages / half_life).astype(np.float32)
    known, asked = np.where(other, np.float32(rebuild_weight), counts[at]), np.where(other, np.float32(weight), 1)
    weights = np.where(support, known, asked).astype(np.float32)
    return [
        Local(rows[a:b], y[a:b], 0, 0, support[a:b], weights[a:b], partner[a:b]) for a, b in pairwise(begins.tolist())
    ]


def fill_others(
    seeds: Any,
    draws: Any,
    offsets: Any,
    taken: Any,
    items: int,
    begins: Any,
    rows: Any,
    y: Any,
    support: Any,
    owner: Any,
) -> None:
    """For each user, from begins[user] on: rows, 1 or 0, whether they are support, and by which item taken.

    Compiled by numba. The numbers are those of SplitMix64 (Steele, Lea and Flood, 2014), the draws the first of
    shuffles (Fisher and Yates): `fill_plainly` draws the same.
    """
    free, mark = np.zeros(items, np.int32), np.zeros(items, np.int32)
    order, chosen = np.zeros(items, np.int32), np.zeros(items, np.bool_)
    for user in range(len(seeds)):
        first, n = offsets[user], offsets[user + 1] - offsets[user]
        wanted = begins[user + 1] - begins[user] - n
        for k in range(n):
            mark[taken[first + k]] = k + 1
            order[k] = k
            chosen[k] = False
        left = 0
        for i in range(items):
            if mark[i] == 0:
                free[left] = i
                left += 1
        state = np.uint64(seeds[user])
        for k in range(wanted + draws[user]):
            state += np.uint64(MIX[0])
            z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX[1])
            z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[2])
            z = z ^ (z >> np.uint64(31))
            if k < wanted:
                at = k + np.int64(z % np.uint64(left - k))
                free[k], free[at] = free[at], free[k]
                mark[free[k]] = -1 - k
            else:
                t = k - wanted
                at = t + np.int64(z % np.uint64(n - t))
                order[t], order[at] = order[at], order[t]
                chosen[order[t]] = True
        place = begins[user]
        for i in range(items):
            if mark[i] != 0:
                mine = mark[i] - 1 if mark[i] > 0 else (-1 - mark[i]) % n
                rows[place] = i
                y[place] = 1 if mark[i] > 0 else 0
                owner[place] = mine
                support[place] = chosen[mine]
                mark[i] = 0
                place += 1


def fill_plainly(
    seeds: Any,
    draws: Any,
    offsets: Any,
    taken: Any,
    items: int,
    begins: Any,
    rows: Any,
    y: Any,
    support: Any,
    owner: Any,
) -> None:
    """`fill_others` without numba."""
    for user, state in enumerate(seeds.tolist()):
        mine, here = taken[offsets[user] : offsets[user + 1]], slice(begins[user], begins[user + 1])
        n, wanted = len(mine), here.stop - here.start - len(mine)
        free = np.setdiff1d(np.arange(items), mine)
        others, state = shuffle(free.tolist(), wanted, state)
        first, state = shuffle(list(range(n)), int(draws[user]), state)
        both = np.concatenate([mine, np.array(others, np.int64)])
        order = np.argsort(both)
        rows[here] = both[order]
        owner[here] = np.concatenate([np.arange(n), np.arange(wanted) % n])[order]
        y[here] = order < n
        support[here] = np.isin(owner[here], first)
