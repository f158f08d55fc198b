"""What users work on in a round, side by side, and the squared loss: rebuild the vectors, predict, train the items."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.systems.recsys.kernels import MIX, NEWTON, STILL, compiled, find_kernel
from mutirao.training.cpu_cores import core_count

USER = 40  # ratings that take as long as what a user takes however few it has
AT_ONCE = 16  # users for whom a second thread is worth its start
PARTS = 3  # of the work a thread: who begins late, or is slow, does fewer

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Local(NamedTuple):
    """One user's work: rows of the items, in rising order, and targets. Who brings no support draws one from `seed`."""

    rows: npt.NDArray[np.int32]
    y: Floats
    seed: int = 0
    draws: int = 0  # how many ratings to draw as support
    support: Mask | None = None
    weights: Floats | None = None  # None: all 1
    partner: npt.NDArray[np.int32] | None = None  # of an item drawn, the place of that taken; -1 of those
    ages: npt.NDArray[np.integer[Any]] | None = None  # how many of the user's items are later


@dataclass
class Batch:
    """The work of some users, one after the other: what they know, then what comes of it.

    The vector of a rating's item is row `at` of the table. What is said of the query, of all users one after the
    other, begins for user u at begins[u].
    """

    offsets: Ints  # of the users' ratings
    rows: npt.NDArray[np.int32]
    table: Floats
    at: npt.NDArray[np.integer[Any]]
    y: Floats
    weights: Floats
    support: Mask
    partner: npt.NDArray[np.int32]  # of an item drawn, the place of that taken among its user's; else -1
    query: npt.NDArray[np.intp]  # the ratings that are not support
    begins: Ints
    vectors: Floats  # users x dimension: they stay here
    predictions: Floats  # of the query
    trained: Floats  # items of the query, if they were trained

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Rules:
    """What the work depends on; see `FedRecon`. No result depends on the number of workers."""

    biases: bool
    ridge: float
    ridge_bias: float
    passes: int  # of SGD; 0: the vector is solved for
    rebuild_lr: float
    lr: float
    decay: float
    whole: float = 0.0  # how much every item there is counts as 0 in the vector
    fast: bool = True
    workers: int = 0


def batch_of(
    works: Sequence[Local], table: Floats, centre: float, fast: bool, at: npt.NDArray[np.integer[Any]] | None = None
) -> Batch:
    """The work of some users side by side. The table has all items, unless `at` says where each rating's stands.

    Targets are counted from `centre`.
    """
    offsets = np.array([0, *accumulate(len(w.rows) for w in works)])
    rows, y = np.concatenate([w.rows for w in works]), np.concatenate([w.y for w in works])
    if works[0].support is not None:
        support = np.concatenate([w.support for w in works if w.support is not None])
    else:
        support = draw_support([w.seed for w in works], [w.draws for w in works], offsets, fast)
    weighted = works[0].weights is not None
    query = np.flatnonzero(~support)
    return Batch(
        offsets=offsets,
        rows=rows,
        table=table,
        at=rows if at is None else at,
        y=(y - np.float32(centre)).astype(np.float32, copy=False),
        weights=np.concatenate([w.weights for w in works if w.weights is not None]) if weighted else np.ones_like(y),
        support=support,
        partner=np.concatenate([np.full(len(w.rows), -1, np.int32) if w.partner is None else w.partner for w in works]),
        query=query,
        begins=np.searchsorted(query, offsets),
        vectors=np.zeros((len(works), table.shape[1]), np.float32),
        predictions=np.zeros(len(query), np.float32),
        trained=np.zeros((0, table.shape[1]), np.float32),
    )


def draw_support(seeds: Sequence[int], counts: Sequence[int], offsets: Ints, fast: bool) -> Mask:
    """A mask with so many ratings of each user, drawn from its seed; the same with numba and without."""
    support = np.zeros(offsets[-1], np.bool_)
    mark_support = find_kernel("mark_support") if fast else None
    if mark_support is not None:
        mark_support(np.array(seeds, np.uint64), np.array(counts, np.int64), offsets, support)
        return support
    for state, count, begin, end in zip(seeds, counts, offsets.tolist(), offsets[1:].tolist(), strict=False):
        chosen, _ = shuffle(list(range(end - begin)), count, state)
        support[begin:end][chosen] = True
    return support


def shuffle(values: list[int], count: int, state: int) -> tuple[list[int], int]:
    """The first `count` of a shuffle (Fisher and Yates), and the state after it."""
    for k in range(count):
        state, z = mix_bits(state)
        at = k + z % (len(values) - k)
        values[k], values[at] = values[at], values[k]
    return values[:count], state


def mix_bits(state: int) -> tuple[int, int]:
    """The next state and number of SplitMix64 (Steele, Lea and Flood, 2014)."""
    last = (1 << 64) - 1
    state = (state + MIX[0]) & last
    z = ((state ^ (state >> 30)) * MIX[1]) & last
    z = ((z ^ (z >> 27)) * MIX[2]) & last
    return state, z ^ (z >> 31)


def rebuild_and_train(rules: Rules, batch: Batch, epochs: int, proximal: float = 0.0) -> None:
    """Fill in the vectors and predictions of a batch, then let the items of its queries make `epochs` steps."""
    work, against = find_kernel("work") if rules.fast else None, against_all(rules, batch)
    batch.trained = np.empty((len(batch.query) if epochs else 0, batch.table.shape[1]), np.float32)
    if work is None:
        for user in range(len(batch)):
            work_plainly(rules, batch, user, epochs, proximal, against)
        return
    spread(work, (batch.table, batch.at, batch.y, batch.weights, *against), rules, batch, epochs, proximal)


def against_all(rules: Rules, batch: Batch) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What all items, as zeros that count `whole`, add to the equations of every vector: to the left and the right."""
    table = batch.table
    if not rules.whole:
        return np.zeros((table.shape[1], table.shape[1])), np.zeros(table.shape[1])
    if batch.at is not batch.rows:
        raise ValueError("others=all needs the whole item matrix, and was sent some rows")
    features, known = table.copy(), table[:, : int(rules.biases)].sum(1)
    features[:, : int(rules.biases)] = 1
    left, right = features.T @ features, features.T @ known
    return rules.whole * left.astype(np.float64), -rules.whole * right.astype(np.float64)


def spread(work: Any, given: tuple[Any, ...], rules: Rules, batch: Batch, epochs: int, proximal: float) -> None:
    """Let a kernel do the users' work on as many threads as there are cores."""
    how_vectors = (rules.biases, rules.ridge, rules.ridge_bias, rules.passes, rules.rebuild_lr)
    numbers = (*how_vectors, epochs, rules.lr, rules.decay, proximal)
    whose = (batch.support, batch.offsets, batch.begins)
    arrays = (*given, *whose, batch.vectors, batch.predictions, batch.trained)
    workers = rules.workers or core_count()
    if workers == 1 or len(batch) < AT_ONCE:
        work(*arrays, *numbers, 0, len(batch))
        return
    cost = batch.offsets + USER * np.arange(len(batch) + 1)  # users differ in ratings: deal the work evenly
    parts = PARTS * workers
    ends = [0, *np.searchsorted(cost, [cost[-1] * k // parts for k in range(1, parts)]).tolist(), len(batch)]
    left = iter(list(pairwise(ends)))  # every thread takes the next part until there is none

    def take_parts() -> None:
        for part in left:
            work(*arrays, *numbers, *part)

    others = [pool(workers - 1, os.getpid()).submit(take_parts) for _ in range(workers - 1)]
    take_parts()
    for other in others:
        if not other.cancel():  # one that has not begun, on a busy machine, is not waited for
            other.result()


@functools.lru_cache(maxsize=4)
def pool(workers: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child has none of its parent's."""
    return ThreadPoolExecutor(workers, thread_name_prefix="mutirao-users")


def work_plainly(
    rules: Rules,
    batch: Batch,
    user: int,
    epochs: int,
    proximal: float,
    against: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
) -> None:
    """One user's work with NumPy: what `mutirao.systems.recsys.kernels.work` does in compiled loops."""
    mine = slice(batch.offsets[user], batch.offsets[user + 1])
    asked = slice(batch.begins[user], batch.begins[user + 1])
    y, w, chosen = batch.y[mine], batch.weights[mine], batch.support[mine]
    # With biases, 1 takes the place of the item's bias, which is taken off the target: v_0 then is the user's bias.
    x, first = batch.table[batch.at[mine]].astype(np.float64), int(rules.biases)
    features, known = x.copy(), x[:, :first].sum(1)
    features[:, :first] = 1
    penalty = np.full(x.shape[1], rules.ridge)
    penalty[:first] = rules.ridge_bias
    if rules.passes:
        v = np.zeros(x.shape[1], np.float64)
        for _ in range(rules.passes):
            for k in np.flatnonzero(chosen):
                pull = rules.rebuild_lr * w[k] * (y[k] - known[k] - features[k] @ v)
                v = (1 - rules.rebuild_lr * penalty) * v + pull * features[k]
    else:
        s, weight = features[chosen], w[chosen].astype(np.float64)
        gram = (s * weight[:, None]).T @ s + np.diag(penalty) + against[0]
        v = np.asarray(np.linalg.solve(gram, s.T @ (weight * (y - known)[chosen]) + against[1]), np.float64)
    batch.vectors[user] = v
    query = ~chosen
    batch.predictions[asked] = known[query] + features[query] @ v
    step = np.where(np.arange(x.shape[1]) < first, 1.0, v)  # d p / d x
    moved, constant = x[query], v[:first].sum()
    for _ in range(epochs):
        error = w[query] * (y[query] - constant - moved @ step)
        pull_back = rules.decay * moved + proximal * (moved - x[query])
        moved = moved + rules.lr * (np.outer(error, step) - pull_back)
    if epochs:
        batch.trained[asked] = moved


def rank_and_train(rules: Rules, batch: Batch, epochs: int, proximal: float = 0.0) -> None:
    """Rebuild vectors from the pairs of the support, then let the items of the query's pairs make `epochs` steps.

    For a pair (i, j) with s = p_i - p_j the loss is -ln sigmoid(s), to which the vector adds ridge / 2 |v|^2. The items
    move along sigmoid(-s) times the derivative of s, all pairs of a user at once.
    Rendle, Freudenthaler, Gantner and Schmidt-Thieme, 2009.
    """
    first, rank = int(rules.biases), find_kernel("rank") if rules.fast else None
    batch.trained = np.empty((len(batch.query) if epochs else 0, batch.table.shape[1]), np.float32)
    if rank is not None:
        spread(rank, (batch.table, batch.at, batch.partner), rules, batch, epochs, proximal)
        return
    for user in range(len(batch)):
        mine = slice(batch.offsets[user], batch.offsets[user + 1])
        asked = slice(batch.begins[user], batch.begins[user + 1])
        x, partner, known = batch.table[batch.at[mine]].astype(np.float64), batch.partner[mine], batch.support[mine]
        drawn = np.flatnonzero(partner >= 0)
        pairs = np.stack([partner[drawn], drawn])
        i, j = pairs[:, known[pairs[0]]]
        gap = x[i] - x[j]
        bias = gap[:, :first].sum(1)
        gap[:, :first] = 0  # a user's own bias changes no rank
        v = rebuild_vector(rules, gap, bias)
        step = v.copy()
        step[:first] = 1  # d p / d x
        batch.vectors[user] = v
        batch.predictions[asked] = x[~known] @ step
        if epochs:
            batch.trained[asked] = train_pairs(rules, x, step, pairs[:, ~known[pairs[0]]], epochs, proximal)[~known]


def rebuild_vector(rules: Rules, gap: Doubles, bias: Doubles) -> Doubles:
    """The vector under which the pairs are likeliest: by Newton's method, or by so many passes of gradient descent."""
    v: Doubles = np.zeros(gap.shape[1])
    change, climb = v.copy(), 0.0
    for _ in range(rules.passes or NEWTON):
        under = below(bias + gap @ v)
        slope = gap.T @ under - rules.ridge * v
        if rules.passes:
            v += rules.rebuild_lr / max(1, len(gap)) * slope
        elif -slope @ change > climb / 2:  # far beyond the top: half of the step back
            change, climb = change / 2, climb / 2
            v -= change
        else:
            bend = (gap * (under * (1 - under))[:, None]).T @ gap
            change = np.asarray(np.linalg.solve(bend + max(rules.ridge, 1e-6) * np.eye(len(v)), slope), np.float64)
            climb = float(slope @ change)
            v += change
            if np.abs(change).max() <= STILL * np.abs(v).max():
                break
    return v


def train_pairs(
    rules: Rules, x: Doubles, step: Doubles, pairs: npt.NDArray[np.int64], epochs: int, proximal: float
) -> Doubles:
    """The items of the pairs after `epochs` steps."""
    i, j = pairs
    start, moving = x.copy(), np.zeros((len(x), 1))
    moving[pairs.ravel()] = 1
    for _ in range(epochs):
        force = below((x[i] - x[j]) @ step)
        pull = np.bincount(i, force, len(x)) - np.bincount(j, force, len(x))
        x = x + rules.lr * moving * (np.outer(pull, step) - rules.decay * x - proximal * (x - start))
    return x


def below(s: Doubles) -> Doubles:
    """sigmoid(-s), without overflow."""
    return np.asarray(0.5 * (1 - np.tanh(0.5 * s)))


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
