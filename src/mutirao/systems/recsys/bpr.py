"""Bayesian personalised ranking: an item taken should score higher than one that was not."""

import numpy as np
import numpy.typing as npt

from mutirao.systems.recsys.kernels import NEWTON, STILL, find_kernel
from mutirao.systems.recsys.local_training import Batch, Rules, spread

Floats = npt.NDArray[np.float64]


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


def rebuild_vector(rules: Rules, gap: Floats, bias: Floats) -> Floats:
    """The vector under which the pairs are likeliest: by Newton's method, or by so many passes of gradient descent."""
    v: Floats = np.zeros(gap.shape[1])
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
    rules: Rules, x: Floats, step: Floats, pairs: npt.NDArray[np.int64], epochs: int, proximal: float
) -> Floats:
    """The items of the pairs after `epochs` steps."""
    i, j = pairs
    start, moving = x.copy(), np.zeros((len(x), 1))
    moving[pairs.ravel()] = 1
    for _ in range(epochs):
        force = below((x[i] - x[j]) @ step)
        pull = np.bincount(i, force, len(x)) - np.bincount(j, force, len(x))
        x = x + rules.lr * moving * (np.outer(pull, step) - rules.decay * x - proximal * (x - start))
    return x


def below(s: Floats) -> Floats:
    """sigmoid(-s), without overflow."""
    return np.asarray(0.5 * (1 - np.tanh(0.5 * s)))
