"""Local training of FedRecon: rebuild users' vectors from the support set, predict the query set, train its items.

Many users are processed at once: by numba kernels, or, without numba, by NumPy one user at a time.
"""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.core.cpu_threads import core_count
from mutirao.systems.recsys.kernels import MIX, NEWTON_STEPS, TOLERANCE, compile_kernel, find_kernel

USER_COST = 40  # fixed cost of a user, in ratings
MIN_USERS = 16  # for which a second thread is worth its start
PARTS_PER_THREAD = 3  # so that a thread that starts late, or is slow, does fewer

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class UserExamples(NamedTuple):
    """What one user trains on: rows of the item matrix, in ascending order, and targets."""

    rows: Rows
    y: Floats
    seed: int = 0
    support_size: int = 0  # ratings to sample as the support set, if `support` is None
    support: Mask | None = None
    weights: Floats | None = None  # None: all 1
    partner: Rows | None = None  # of a negative, the index of its positive; -1 for positives
    ages: npt.NDArray[np.integer[Any]] | None = None  # how many of the user's items are later


@dataclass
class Batch:
    """The examples of several users one after the other, and what training computes from them.

    The vector of an example's item is row `at` of the table. Arrays over the query sets of all users begin for user u
    at query_offsets[u].
    """

    offsets: Ints  # of the users' examples
    rows: Rows
    table: Floats
    at: npt.NDArray[np.integer[Any]]
    y: Floats
    weights: Floats
    support: Mask
    partner: Rows  # of a negative, the index of its positive among the user's examples; otherwise -1
    query: npt.NDArray[np.intp]  # examples that are not in the support set
    query_offsets: Ints
    vectors: Floats  # users x dimension; never sent
    predictions: Floats  # of the query set
    trained: Floats  # items of the query set after training

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class SolverSettings:
    """Hyperparameters of local training; see `FedRecon`. No result depends on the number of workers."""

    biases: bool
    ridge: float
    ridge_bias: float
    passes: int  # of SGD; 0 solves for the vector exactly
    rebuild_lr: float
    lr: float
    decay: float
    unobserved_weight: float = 0.0  # weight of every item as a zero in the vector's least squares
    compiled: bool = True
    workers: int = 0

    def kernel(self, name: str) -> Any:
        """A compiled kernel by its name; None without numba or with `compiled` off."""
        if self.compiled:
            return find_kernel(name)
        return None


def make_batch(
    users: Sequence[UserExamples],
    table: Floats,
    centre: float,
    compiled: bool,
    at: npt.NDArray[np.integer[Any]] | None = None,
) -> Batch:
    """Put the examples of several users one after the other, with targets relative to `centre`.

    The table has all items, unless `at` gives the row of each example's item.
    """
    offsets = np.array([0, *accumulate(len(user.rows) for user in users)])
    rows = np.concatenate([user.rows for user in users])
    y = np.concatenate([user.y for user in users])
    if users[0].support is not None:
        support = np.concatenate([user.support for user in users if user.support is not None])
    else:
        support = sample_support([u.seed for u in users], [u.support_size for u in users], offsets, compiled)
    weights = np.ones_like(y)
    if users[0].weights is not None:
        weights = np.concatenate([user.weights for user in users if user.weights is not None])
    partner = np.full(len(rows), -1, np.int32)
    if users[0].partner is not None:
        partner = np.concatenate([user.partner for user in users if user.partner is not None])
    query = np.flatnonzero(~support)
    return Batch(
        offsets=offsets,
        rows=rows,
        table=table,
        at=rows if at is None else at,
        y=(y - np.float32(centre)).astype(np.float32, copy=False),
        weights=weights,
        support=support,
        partner=partner,
        query=query,
        query_offsets=np.searchsorted(query, offsets),
        vectors=np.zeros((len(users), table.shape[1]), np.float32),
        predictions=np.zeros(len(query), np.float32),
        trained=np.zeros((0, table.shape[1]), np.float32),
    )


def sample_support(seeds: Sequence[int], counts: Sequence[int], offsets: Ints, compiled: bool) -> Mask:
    """A mask of the support sets, sampled from each user's seed; the same with numba and without."""
    support = np.zeros(offsets[-1], np.bool_)
    mark_support = find_kernel("mark_support") if compiled else None
    if mark_support is not None:
        mark_support(np.array(seeds, np.uint64), np.array(counts, np.int64), offsets, support)
        return support
    for state, count, begin, end in zip(seeds, counts, offsets.tolist(), offsets[1:].tolist(), strict=False):
        chosen, _ = shuffle(list(range(end - begin)), count, state)
        support[begin:end][chosen] = True
    return support


def shuffle(values: list[int], count: int, state: int) -> tuple[list[int], int]:
    """The first `count` of a Fisher-Yates shuffle, and the random state after it."""
    for k in range(count):
        state, z = splitmix64(state)
        at = k + z % (len(values) - k)
        values[k], values[at] = values[at], values[k]
    return values[:count], state


def splitmix64(state: int) -> tuple[int, int]:
    """The next state and number of SplitMix64 (Steele, Lea and Flood, 2014)."""
    last = (1 << 64) - 1
    state = (state + MIX[0]) & last
    z = ((state ^ (state >> 30)) * MIX[1]) & last
    z = ((z ^ (z >> 27)) * MIX[2]) & last
    return state, z ^ (z >> 31)


# Squared errors


def allocate_trained(batch: Batch, epochs: int) -> None:
    """Make room for the items of the query sets after training, if there is any."""
    rows = 0
    if epochs:
        rows = len(batch.query)
    batch.trained = np.empty((rows, batch.table.shape[1]), np.float32)


def train_squared(settings: SolverSettings, batch: Batch, epochs: int, proximal: float = 0.0) -> None:
    """Fill in the vectors and predictions of a batch, then train the items of the query sets for `epochs` steps."""
    unobserved = unobserved_terms(settings, batch)
    allocate_trained(batch, epochs)
    kernel = settings.kernel("squared_kernel")
    if kernel is None:
        for user in range(len(batch)):
            train_squared_numpy(settings, batch, user, epochs, proximal, unobserved)
        return
    inputs = (batch.table, batch.at, batch.y, batch.weights, *unobserved)
    run_kernel(kernel, inputs, settings, batch, epochs, proximal)


def unobserved_terms(settings: SolverSettings, batch: Batch) -> tuple[Doubles, Doubles]:
    """What all items as weighted zeros add to the normal equations of every vector: the matrix and the right side."""
    table = batch.table
    if not settings.unobserved_weight:
        return np.zeros((table.shape[1], table.shape[1])), np.zeros(table.shape[1])
    if batch.at is not batch.rows:
        raise ValueError("others=all needs the whole item matrix, but only some rows were sent")
    # The target of an unobserved item is 0, less its bias in column 0. Its feature there is 1, for the user's bias.
    first = int(settings.biases)
    features = table.copy()
    features[:, :first] = 1
    gram = features.T @ features
    right = features.T @ table[:, :first].sum(1)
    return settings.unobserved_weight * gram.astype(np.float64), -settings.unobserved_weight * right.astype(np.float64)


def run_kernel(
    kernel: Any, inputs: tuple[Any, ...], settings: SolverSettings, batch: Batch, epochs: int, proximal: float
) -> None:
    """Run a kernel over the users of a batch on as many threads as there are cores."""
    rebuilding = (settings.biases, settings.ridge, settings.ridge_bias, settings.passes, settings.rebuild_lr)
    numbers = (*rebuilding, epochs, settings.lr, settings.decay, proximal)
    users = (batch.support, batch.offsets, batch.query_offsets)
    arrays = (*inputs, *users, batch.vectors, batch.predictions, batch.trained)
    workers = settings.workers or core_count()
    if workers == 1 or len(batch) < MIN_USERS:
        kernel(*arrays, *numbers, 0, len(batch))
        return
    # Users differ in their number of ratings: parts have equal cost, and each thread takes the next one that is left.
    cost = batch.offsets + USER_COST * np.arange(len(batch) + 1)
    parts = PARTS_PER_THREAD * workers
    ends = [0, *np.searchsorted(cost, [cost[-1] * k // parts for k in range(1, parts)]).tolist(), len(batch)]
    # Threads share this iterator. The next element of a list's iterator is taken in one step, so no part runs twice;
    # a generator would refuse to be entered by two threads.
    left = iter(list(pairwise(ends)))

    def run_parts() -> None:
        for low, high in left:
            kernel(*arrays, *numbers, low, high)

    others = [thread_pool(workers - 1, os.getpid()).submit(run_parts) for _ in range(workers - 1)]
    run_parts()
    for other in others:
        # A thread that has not started yet, on a busy machine, is not waited for: no part is left for it.
        if not other.cancel():
            other.result()


@functools.lru_cache(maxsize=4)
def thread_pool(workers: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(workers, thread_name_prefix="mutirao-users")


def train_squared_numpy(
    settings: SolverSettings,
    batch: Batch,
    user: int,
    epochs: int,
    proximal: float,
    unobserved: tuple[Doubles, Doubles],
) -> None:
    """Train one user with NumPy, as `kernels.squared_kernel` does in compiled loops."""
    of_user = slice(batch.offsets[user], batch.offsets[user + 1])
    of_query = slice(batch.query_offsets[user], batch.query_offsets[user + 1])
    y = batch.y[of_user]
    weights = batch.weights[of_user]
    support = batch.support[of_user]
    # With biases, a feature of 1 replaces the item's bias, which is subtracted from the target: v_0 is the user's bias.
    x = batch.table[batch.at[of_user]].astype(np.float64)
    first = int(settings.biases)
    item_bias = x[:, :first].sum(1)
    features = x.copy()
    features[:, :first] = 1
    penalty = np.full(x.shape[1], settings.ridge)
    penalty[:first] = settings.ridge_bias
    if settings.passes:
        v = np.zeros(x.shape[1], np.float64)
        for _ in range(settings.passes):
            for k in np.flatnonzero(support):
                pull = settings.rebuild_lr * weights[k] * (y[k] - item_bias[k] - features[k] @ v)
                v = (1 - settings.rebuild_lr * penalty) * v + pull * features[k]
    else:
        s = features[support]
        weight = weights[support].astype(np.float64)
        gram = (s * weight[:, None]).T @ s + np.diag(penalty) + unobserved[0]
        v = np.asarray(np.linalg.solve(gram, s.T @ (weight * (y - item_bias)[support]) + unobserved[1]), np.float64)
    batch.vectors[user] = v
    query = ~support
    batch.predictions[of_query] = item_bias[query] + features[query] @ v
    slope = np.where(np.arange(x.shape[1]) < first, 1.0, v)  # dp/dx
    trained = x[query]
    user_bias = v[:first].sum()
    for _ in range(epochs):
        error = weights[query] * (y[query] - user_bias - trained @ slope)
        pull_back = settings.decay * trained + proximal * (trained - x[query])
        trained = trained + settings.lr * (np.outer(error, slope) - pull_back)
    if epochs:
        batch.trained[of_query] = trained


# BPR


def train_bpr(settings: SolverSettings, batch: Batch, epochs: int, proximal: float = 0.0) -> None:
    """Rebuild vectors from the pairs of the support set, then train the items of the query's pairs.

    For a pair (i, j) with s = p_i - p_j the loss is -ln sigmoid(s); the vector adds ridge / 2 |v|^2. Items move along
    sigmoid(-s) times the derivative of s, all pairs of a user at once.
    Rendle, Freudenthaler, Gantner and Schmidt-Thieme, 2009.
    """
    allocate_trained(batch, epochs)
    kernel = settings.kernel("bpr_kernel")
    if kernel is not None:
        run_kernel(kernel, (batch.table, batch.at, batch.partner), settings, batch, epochs, proximal)
        return
    for user in range(len(batch)):
        train_bpr_numpy(settings, batch, user, epochs, proximal)


def train_bpr_numpy(settings: SolverSettings, batch: Batch, user: int, epochs: int, proximal: float) -> None:
    """Train one user with NumPy, as `kernels.bpr_kernel` does in compiled loops."""
    first = int(settings.biases)
    of_user = slice(batch.offsets[user], batch.offsets[user + 1])
    of_query = slice(batch.query_offsets[user], batch.query_offsets[user + 1])
    x = batch.table[batch.at[of_user]].astype(np.float64)
    partner = batch.partner[of_user]
    support = batch.support[of_user]
    negatives = np.flatnonzero(partner >= 0)
    pairs = np.stack([partner[negatives], negatives])
    i, j = pairs[:, support[pairs[0]]]
    gap = x[i] - x[j]
    bias = gap[:, :first].sum(1)
    gap[:, :first] = 0  # the user's own bias changes no ranking
    v = rebuild_vector(settings, gap, bias)
    slope = v.copy()
    slope[:first] = 1  # dp/dx
    batch.vectors[user] = v
    batch.predictions[of_query] = x[~support] @ slope
    if epochs:
        query_pairs = pairs[:, ~support[pairs[0]]]
        batch.trained[of_query] = train_pairs(settings, x, slope, query_pairs, epochs, proximal)[~support]


def rebuild_vector(settings: SolverSettings, gap: Doubles, bias: Doubles) -> Doubles:
    """The vector that maximises the likelihood of the pairs, by Newton's method or by gradient descent."""
    v: Doubles = np.zeros(gap.shape[1])
    change = v.copy()
    climb = 0.0
    for _ in range(settings.passes or NEWTON_STEPS):
        below = negative_sigmoid(bias + gap @ v)
        slope = gap.T @ below - settings.ridge * v
        if settings.passes:
            v += settings.rebuild_lr / max(1, len(gap)) * slope
        elif -slope @ change > climb / 2:
            # Far beyond the maximum: take half of the step back.
            change = change / 2
            climb = climb / 2
            v -= change
        else:
            hessian = (gap * (below * (1 - below))[:, None]).T @ gap + max(settings.ridge, 1e-6) * np.eye(len(v))
            change = np.asarray(np.linalg.solve(hessian, slope), np.float64)
            climb = float(slope @ change)
            v += change
            if np.abs(change).max() <= TOLERANCE * np.abs(v).max():
                break
    return v


def train_pairs(
    settings: SolverSettings, x: Doubles, slope: Doubles, pairs: Ints, epochs: int, proximal: float
) -> Doubles:
    """The items of the pairs after `epochs` steps."""
    i, j = pairs
    start = x.copy()
    # Items without a pair stay where they are: not even weight decay moves them.
    moving = np.zeros((len(x), 1))
    moving[pairs.ravel()] = 1
    for _ in range(epochs):
        force = negative_sigmoid((x[i] - x[j]) @ slope)
        pull = np.bincount(i, force, len(x)) - np.bincount(j, force, len(x))
        x = x + settings.lr * moving * (np.outer(pull, slope) - settings.decay * x - proximal * (x - start))
    return x


def negative_sigmoid(s: Doubles) -> Doubles:
    """sigmoid(-s), without overflow."""
    return np.asarray(0.5 * (1 - np.tanh(0.5 * s)))


# Negative sampling


def add_negatives(
    users: Sequence[UserExamples],
    items: int,
    negatives: int,
    weight: float,
    rebuild_weight: float,
    half_life: float,
    *,
    compiled: bool,
) -> list[UserExamples]:
    """Add `negatives` sampled negatives for each positive, in the same set (support or query) as the positive.

    Items are in ascending order, which does not reveal the positives. Targets are 1 for positives and 0 for negatives,
    which have the given weights. Sampled from each user's seed are first the negatives, then the positives of the
    support set; the n-th negative is the partner of the n-th positive, modulo the positives. With a `half_life`, a
    positive of the support set has the weight 2^-(age / half_life).
    """
    positives = np.array([len(user.rows) for user in users])
    sampled = np.minimum(negatives * positives, items - positives)
    totals = positives + sampled
    offsets = np.concatenate([[0], np.cumsum(positives)])
    ends = np.concatenate([[0], np.cumsum(totals)])
    rows = np.empty(ends[-1], np.int32)
    owner = np.empty(ends[-1], np.int32)
    y = np.empty(ends[-1], np.float32)
    support = np.empty(ends[-1], np.bool_)
    seeds = np.array([user.seed for user in users], np.uint64)
    sizes = np.array([user.support_size for user in users])
    fill = fill_negatives_numpy
    if compiled:
        fill = compile_kernel(fill_negatives) or fill_negatives_numpy
    fill(seeds, sizes, offsets, np.concatenate([u.rows for u in users]), items, ends, rows, y, support, owner)
    is_negative = y == 0
    positive = owner + np.repeat(offsets[:-1], totals)  # index of the positive among those of all users
    place = np.empty(offsets[-1], np.int32)
    place[positive[~is_negative]] = (np.arange(ends[-1]) - np.repeat(ends[:-1], totals))[~is_negative]
    partner = np.where(is_negative, place[positive], np.int32(-1))
    age_weights = np.ones(offsets[-1], np.float32)
    if half_life > 0:
        ages = np.concatenate([np.zeros(len(u.rows)) if u.ages is None else u.ages for u in users])
        age_weights = np.exp2(-ages / half_life).astype(np.float32)
    support_weights = np.where(is_negative, np.float32(rebuild_weight), age_weights[positive])
    query_weights = np.where(is_negative, np.float32(weight), 1)
    weights = np.where(support, support_weights, query_weights).astype(np.float32)
    examples = []
    for begin, end in pairwise(ends.tolist()):
        mine = slice(begin, end)
        examples.append(UserExamples(rows[mine], y[mine], 0, 0, support[mine], weights[mine], partner[mine]))
    return examples


def fill_negatives(
    seeds: Any,
    sizes: Any,
    offsets: Any,
    positives: Any,
    items: int,
    ends: Any,
    rows: Any,
    y: Any,
    support: Any,
    owner: Any,
) -> None:
    """For each user, from ends[user] on: rows, targets, whether they are support, and the index of their positive.

    Compiled by numba. Random numbers are SplitMix64's (Steele, Lea and Flood, 2014), samples the first of Fisher-Yates
    shuffles: `fill_negatives_numpy` samples the same.
    """
    # `mark` of an item is k + 1 for the k-th positive, -1 - k for the k-th negative and 0 for all others. It is 0 again
    # after each user.
    free = np.zeros(items, np.int32)
    mark = np.zeros(items, np.int32)
    order = np.zeros(items, np.int32)
    chosen = np.zeros(items, np.bool_)
    for user in range(len(seeds)):
        first = offsets[user]
        n = offsets[user + 1] - offsets[user]
        wanted = ends[user + 1] - ends[user] - n
        for k in range(n):
            mark[positives[first + k]] = k + 1
            order[k] = k
            chosen[k] = False
        left = 0
        for i in range(items):
            if mark[i] == 0:
                free[left] = i
                left += 1
        state = np.uint64(seeds[user])
        for k in range(wanted + sizes[user]):
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
        place = ends[user]
        for i in range(items):
            if mark[i] != 0:
                if mark[i] > 0:
                    mine = mark[i] - 1
                    y[place] = 1
                else:
                    mine = (-1 - mark[i]) % n
                    y[place] = 0
                rows[place] = i
                owner[place] = mine
                support[place] = chosen[mine]
                mark[i] = 0
                place += 1


def fill_negatives_numpy(
    seeds: Any,
    sizes: Any,
    offsets: Any,
    positives: Any,
    items: int,
    ends: Any,
    rows: Any,
    y: Any,
    support: Any,
    owner: Any,
) -> None:
    """`fill_negatives` without numba."""
    for user, state in enumerate(seeds.tolist()):
        mine = positives[offsets[user] : offsets[user + 1]]
        here = slice(ends[user], ends[user + 1])
        n = len(mine)
        wanted = here.stop - here.start - n
        free = np.setdiff1d(np.arange(items), mine)
        negatives, state = shuffle(free.tolist(), wanted, state)
        first, state = shuffle(list(range(n)), int(sizes[user]), state)
        both = np.concatenate([mine, np.array(negatives, np.int64)])
        order = np.argsort(both)
        rows[here] = both[order]
        owner[here] = np.concatenate([np.arange(n), np.arange(wanted) % n])[order]
        y[here] = order < n
        support[here] = np.isin(owner[here], first)
