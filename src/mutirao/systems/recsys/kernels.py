"""Local training of many users at once, compiled by numba: rebuild each user's vector, predict, train the items.

`squared_kernel` (squared errors) and `bpr_kernel` (BPR) are plain loops, compiled where numba is installed. Without it,
`local_training` does the same with NumPy, one user at a time; the results agree to the accuracy of float32.
`Recommender` always uses NumPy: a single user is not worth compiling for.
"""

import functools
import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from mutirao.errors import ConfigError

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's numbers
PAD = 32  # sums over ratings are padded to a multiple of this, so that no vectorised loop has a slow end
NEWTON_STEPS = 40  # at most
TOLERANCE = 1e-4  # a step no longer than this share of the vector is the last
FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered, but NaN and infinity stay what they are


def squared_kernel(
    table: Any,
    at: Any,
    y: Any,
    weights: Any,
    unobserved_gram: Any,
    unobserved_right: Any,
    support: Any,
    offsets: Any,
    begins: Any,
    vectors: Any,
    predictions: Any,
    trained: Any,
    biases: bool,
    ridge: float,
    ridge_bias: float,
    passes: int,
    rebuild_lr: float,
    epochs: int,
    lr: float,
    decay: float,
    proximal: float,
    low: int,
    high: int,
) -> None:
    """For users `low` to `high`: rebuild the vector from the support set, predict the query set, train its items.

    User u has the ratings offsets[u]:offsets[u + 1]; x, the item vector of rating k, is row at[k] of the table.
    `predictions` and `trained` of its query set begin at begins[u]. With biases, column 0 of the table holds the items'
    and element 0 of the vector is the user's: p = v_0 + x_0 + sum_{j>0} v_j x_j, otherwise p = sum v_j x_j. With
    `passes` = 0 the vector is the exact solution of the ridge regression, with `unobserved_gram` and
    `unobserved_right` added to its normal equations; otherwise it takes this number of passes of SGD.
    """
    d = table.shape[1]
    first = 1 if biases else 0
    most = 0
    for user in range(low, high):
        most = max(most, offsets[user + 1] - offsets[user])
    even = d + d % 2  # rows are processed in pairs
    space = np.zeros((even + 1) * (most + PAD), np.float32)
    root = np.zeros((even, even), np.float64)  # Cholesky factor: U in U^T U
    right = np.zeros(even, np.float64)
    v = np.zeros(d, np.float32)
    for user in range(low, high):
        begin = offsets[user]
        end = offsets[user + 1]
        v[:] = 0
        if passes == 0:
            n = 0
            for k in range(begin, end):
                n += support[k] and weights[k] > 0
            # The support set transposed and padded with zeros: sums over ratings run over neighbours in memory.
            wide = (n + PAD - 1) // PAD * PAD
            columns = space[: (even + 1) * wide].reshape(even + 1, wide)
            columns[:] = 0
            targets = columns[even]
            n = 0
            for k in range(begin, end):
                if support[k] and weights[k] > 0:
                    r = at[k]
                    scale = np.sqrt(weights[k])
                    for j in range(first, d):
                        columns[j, n] = scale * table[r, j]
                    targets[n] = scale * y[k]
                    if biases:
                        columns[0, n] = scale
                        targets[n] -= scale * table[r, 0]
                    n += 1
            for i in range(0, even, 2):
                total = np.float32(0)
                other = np.float32(0)
                for k in range(wide):
                    total += columns[i, k] * targets[k]
                    other += columns[i + 1, k] * targets[k]
                right[i], right[i + 1] = total, other
            multiply(columns, wide, root)
            for i in range(d):
                right[i] += unobserved_right[i]
                for j in range(i, d):
                    root[i, j] += unobserved_gram[i, j]
                root[i, i] += ridge_bias if i < first else ridge
            take_root(root, d)
            solve(root, right, d)
            for i in range(d):
                v[i] = right[i]
        for _ in range(passes):
            for k in range(begin, end):
                if support[k]:
                    r = at[k]
                    p = v[0] + table[r, 0] if biases else np.float32(0)
                    for j in range(first, d):
                        p += v[j] * table[r, j]
                    pull = np.float32(rebuild_lr * weights[k] * (y[k] - p))
                    keep = np.float32(1 - rebuild_lr * ridge)
                    for j in range(first, d):
                        v[j] = keep * v[j] + pull * table[r, j]
                    if biases:
                        v[0] = np.float32(1 - rebuild_lr * ridge_bias) * v[0] + pull
        for j in range(d):
            vectors[user, j] = v[j]
        keep = np.float32(1 - lr * (decay + proximal))
        back = np.float32(lr * proximal)
        q = begins[user] - 1
        for k in range(begin, end):
            if support[k]:
                continue
            q += 1
            r = at[k]
            p = v[0] + table[r, 0] if biases else np.float32(0)
            for j in range(first, d):
                p += v[j] * table[r, j]
            predictions[q] = p
            for epoch in range(epochs):
                if epoch == 0:
                    for j in range(d):
                        trained[q, j] = table[r, j]
                pull = np.float32(lr * weights[k] * (y[k] - p))
                p = np.float32(0)
                for j in range(first, d):
                    trained[q, j] = keep * trained[q, j] + back * table[r, j] + pull * v[j]
                    p += v[j] * trained[q, j]
                if biases:
                    trained[q, 0] = keep * trained[q, 0] + back * table[r, 0] + pull
                    p += v[0] + trained[q, 0]


def multiply(columns: Any, wide: int, product: Any) -> None:
    """The upper half of C C^T, for the first `wide` columns of C."""
    even = len(product)
    # In blocks of 2 x 2: each number that is loaded is used in two products.
    for i in range(0, even, 2):
        for j in range(i, even, 2):
            s0 = np.float32(0)
            s1 = np.float32(0)
            s2 = np.float32(0)
            s3 = np.float32(0)
            for k in range(wide):
                a = columns[i, k]
                b = columns[i + 1, k]
                e = columns[j, k]
                f = columns[j + 1, k]
                s0 += a * e
                s1 += a * f
                s2 += b * e
                s3 += b * f
            product[i, j], product[i, j + 1], product[i + 1, j], product[i + 1, j + 1] = s0, s1, s2, s3


def take_root(root: Any, d: int) -> None:
    """Replace a matrix by its Cholesky factor U, with U^T U the matrix. Elements left of the diagonal are not read."""
    for i in range(d):
        fours = i // 4 * 4  # four rows at a time
        for k in range(0, fours, 4):
            f0 = root[k, i]
            f1 = root[k + 1, i]
            f2 = root[k + 2, i]
            f3 = root[k + 3, i]
            for j in range(d):
                root[i, j] -= f0 * root[k, j] + f1 * root[k + 1, j] + f2 * root[k + 2, j] + f3 * root[k + 3, j]
        for k in range(fours, i):
            f0 = root[k, i]
            for j in range(d):
                root[i, j] -= f0 * root[k, j]
        scale = 1 / np.sqrt(root[i, i])
        for j in range(d):
            root[i, j] *= scale


def solve(root: Any, right: Any, d: int) -> None:
    """Solve U^T U x = right in place."""
    for i in range(d):
        for k in range(i):
            right[i] -= root[k, i] * right[k]
        right[i] /= root[i, i]
    for i in range(d - 1, -1, -1):
        for j in range(i + 1, d):
            right[i] -= root[i, j] * right[j]
        right[i] /= root[i, i]


def bpr_kernel(
    table: Any,
    at: Any,
    partner: Any,
    support: Any,
    offsets: Any,
    begins: Any,
    vectors: Any,
    predictions: Any,
    trained: Any,
    biases: bool,
    ridge: float,
    ridge_bias: float,
    passes: int,
    rebuild_lr: float,
    epochs: int,
    lr: float,
    decay: float,
    proximal: float,
    low: int,
    high: int,
) -> None:
    """BPR for users `low` to `high`; see `train_bpr`. If partner[k] >= 0, k is a negative of that positive.

    Newton's method computes the Hessian again only when a step with the last one did not help enough, and goes back
    when a step went too far.
    """
    d = table.shape[1]
    first = 1 if biases else 0
    most = 0
    for user in range(low, high):
        most = max(most, offsets[user + 1] - offsets[user])
    even = d + d % 2
    space = np.zeros(even * (most + PAD), np.float32)
    scaled = np.zeros(even * (most + PAD), np.float32)
    margin = np.zeros(most + PAD, np.float32)
    under = np.zeros(most + PAD, np.float32)
    bias = np.zeros(most + PAD, np.float32)
    pull = np.zeros(most, np.float32)
    score = np.zeros(most, np.float32)
    place = np.zeros(most, np.int64)
    moving = np.zeros(most, np.bool_)
    root = np.zeros((even, even), np.float64)
    right = np.zeros(even, np.float64)
    v = np.zeros(even, np.float64)
    change = np.zeros(even, np.float64)
    step = np.zeros(d, np.float32)
    for user in range(low, high):
        begin = offsets[user]
        end = offsets[user + 1]
        n = 0
        for k in range(begin, end):
            n += support[k] and partner[k] >= 0
        wide = (n + PAD - 1) // PAD * PAD
        columns = space[: even * wide].reshape(even, wide)
        bent = scaled[: even * wide].reshape(even, wide)
        columns[:] = 0
        bias[:] = 0
        n = 0
        for k in range(begin, end):
            if support[k] and partner[k] >= 0:
                r = at[begin + partner[k]]
                s = at[k]
                for j in range(first, d):  # the user's own bias changes no ranking
                    columns[j, n] = table[r, j] - table[s, j]
                if biases:
                    bias[n] = table[r, 0] - table[s, 0]
                n += 1
        v[:] = 0
        change[:] = 0
        # Of the last step: size of the gradient, and its product with the step.
        last = 0.0
        climb = 0.0
        for turn in range(passes if passes > 0 else NEWTON_STEPS):
            for k in range(wide):
                margin[k] = bias[k]
            for j in range(first, d):
                factor = np.float32(v[j])
                for k in range(wide):
                    margin[k] += factor * columns[j, k]
            for k in range(wide):
                under[k] = np.float32(1) / (np.float32(1) + np.exp(margin[k]))
            size = 0.0
            beyond = 0.0
            for j in range(even):
                total = np.float32(0)
                for k in range(wide):
                    total += columns[j, k] * under[k]
                right[j] = total - ridge * v[j]
                size = max(size, abs(right[j]))
                beyond -= right[j] * change[j]
            if passes > 0:
                for j in range(d):
                    v[j] += rebuild_lr / max(1, n) * right[j]
                continue
            # The slope along the last step is negative and steep: it went far beyond the maximum. Take half of it back.
            if beyond > climb / 2:
                for j in range(d):
                    change[j] /= 2
                    v[j] -= change[j]
                climb /= 2
                continue
            # Computing the Hessian is most of the work, so it is kept as long as the gradient shrinks well.
            if turn == 0 or size > 0.3 * last:
                for k in range(wide):
                    margin[k] = np.sqrt(under[k] * (np.float32(1) - under[k]))
                for j in range(even):
                    for k in range(wide):
                        bent[j, k] = margin[k] * columns[j, k]
                multiply(bent, wide, root)
                for j in range(d):
                    root[j, j] += max(ridge, 1e-6)
                take_root(root, d)
            last = size
            climb = 0.0
            for j in range(d):
                change[j] = right[j]
            solve(root, change, d)
            longest = 0.0
            moved = 0.0
            for j in range(d):
                v[j] += change[j]
                climb += right[j] * change[j]
                longest = max(longest, abs(v[j]))
                moved = max(moved, abs(change[j]))
            if moved <= TOLERANCE * longest:
                break
        for j in range(d):
            vectors[user, j] = step[j] = v[j]
        if biases:
            step[0] = 1  # d p / d x
        base = begins[user]
        q = 0
        for k in range(begin, end):
            place[k - begin] = q
            if not support[k]:
                total = np.float32(0)
                for j in range(d):
                    total += step[j] * table[at[k], j]
                predictions[base + q] = score[q] = total
                if epochs > 0:
                    for j in range(d):
                        trained[base + q, j] = table[at[k], j]
                q += 1
        keep = np.float32(1 - lr * (decay + proximal))
        back = np.float32(lr * proximal)
        for _ in range(epochs):
            # All pairs are computed before an item moves, as a positive is in several of them.
            pull[:q] = 0
            moving[:q] = False
            for k in range(begin, end):
                if partner[k] >= 0 and not support[k]:
                    i = place[partner[k]]
                    j = place[k - begin]
                    force = np.float32(lr) / (np.float32(1) + np.exp(score[i] - score[j]))
                    pull[i] += force
                    pull[j] -= force
                    moving[i] = moving[j] = True
            for k in range(begin, end):
                i = place[k - begin]
                if not support[k] and moving[i]:
                    total = np.float32(0)
                    for j in range(d):
                        trained[base + i, j] = keep * trained[base + i, j] + back * table[at[k], j] + pull[i] * step[j]
                        total += step[j] * trained[base + i, j]
                    score[i] = total


def mark_support(seeds: Any, counts: Any, offsets: Any, support: Any) -> None:
    """Mark counts[u] of each user's ratings as support: the first of a Fisher-Yates shuffle with seeds[u].

    Random numbers are SplitMix64's (Steele, Lea and Flood, 2014), so that clients without numba sample the same.
    """
    order = np.zeros(0, np.int64)
    for user in range(len(seeds)):
        begin = offsets[user]
        n = offsets[user + 1] - offsets[user]
        if len(order) < n:
            order = np.zeros(n, np.int64)
        for k in range(n):
            order[k] = k
        state = np.uint64(seeds[user])
        for k in range(counts[user]):
            state += np.uint64(MIX[0])
            z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX[1])
            z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[2])
            z = z ^ (z >> np.uint64(31))
            other = k + np.int64(z % np.uint64(n - k))
            chosen = order[other]
            order[other] = order[k]
            support[begin + chosen] = True


def gather_changes(x: Any, rows: Any, values: Any, shares: Any, sums: Any) -> None:
    """sums[rows[k]] += shares[k] (values[k] - x[rows[k]]), in this order."""
    for k in range(len(rows)):
        old = x[rows[k]]
        new = values[k]
        total = sums[rows[k]]
        share = shares[k]
        for j in range(len(old)):
            total[j] += share * (new[j] - old[j])


@functools.cache
def compile_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function with numba; None without numba. It is cached on disk, so that only the first process waits."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    if function in (squared_kernel, bpr_kernel):
        # numba looks up the functions that they call among their globals, which have to be the compiled ones there.
        scope = function.__globals__ | {part.__name__: compile_kernel(part) for part in (multiply, take_root, solve)}
        function = FunctionType(function.__code__, scope, function.__name__)
    # As in NumPy, x / 0 is infinity: an exception would end the training of all other users of the call.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FAST}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder for the cache
        return numba.njit(**options)(function)


def require_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that has no NumPy form; ConfigError without numba."""
    kernel = compile_kernel(function)
    if kernel is None:
        raise ConfigError("training item vectors on pooled ratings needs numba: pip install 'mutirao[recsys]'")
    return kernel


def find_kernel(name: str) -> Any:
    """Compile a function of this module by its name; None without numba."""
    kernels = (squared_kernel, bpr_kernel, mark_support, gather_changes)
    return compile_kernel({function.__name__: function for function in kernels}[name])
