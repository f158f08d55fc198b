"""Pairwise Differentiable Gradient Descent: what a click on a ranking that was drawn says of pairs of documents.

A ranking R of the k documents shown is drawn from the Plackett-Luce distribution of the scores f,
P(R | f) = prod_r exp(f(d_r)) / sum of exp(f(d)) over all documents not placed above r. A document clicked is preferred
to every one not clicked down to the one below the last click. The gradient is the sum over these pairs i > j of

    rho(i, j) exp(f_i) exp(f_j) / (exp(f_i) + exp(f_j))^2 (f'_i - f'_j),  rho = P(R* | f) / (P(R | f) + P(R* | f)),

where R* is R with the two exchanged: so preferences that the order alone made likely count less, and in expectation a
pair is moved the way users prefer it. Oosterhuis and de Rijke, 2018: Differentiable Unbiased Online Learning to Rank.

Everything is done for many lists at once, in logarithms; no list's numbers depend on the others.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def draw_rankings(scores: Floats, sizes: Ints, draws: Floats, shown: int) -> tuple[Ints, Floats]:
    """The documents each list shows, by place, and the logarithm of what those not shown sum up to.

    `scores` are of all documents, list after list of `sizes`; `draws` are uniform, one a document. Documents in the
    order of f + g, with g = -log(-log(u)), follow Plackett-Luce (Gumbel, 1954; Yellott, 1977). Places beyond a list's
    end hold -1.

    >>> draw_rankings(np.array([0.0, 9.0, 1.0]), np.array([2, 1]), np.full(3, 0.5), shown=2)[0].tolist()
    [[1, 0], [2, -1]]
    """
    begins = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    gumbel = -np.log(-np.log(np.clip(draws, 1e-300, 1 - 1e-16)))
    order = np.lexsort((-(scores + gumbel), owner))
    places = np.arange(shown)
    there = places < sizes[:, None]
    documents = np.where(there, order[np.minimum(begins[:, None] + places, len(order) - 1)], -1)
    unseen = scores.copy()
    unseen[documents[there]] = -np.inf
    most = np.maximum.reduceat(unseen, begins)
    level = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):  # everything is shown: log 0
        rest = level + np.log(np.add.reduceat(np.exp(unseen - level[owner]), begins))
    return documents, rest


def weigh_documents(scores: Floats, rest: Floats, clicks: Bools) -> Floats:
    """By how much the score of each document shown is to rise: the derivative of the pairs' sum, list by list.

    `scores` are of the documents shown, by place, -inf where there is none.
    """
    shown = scores.shape[1]
    places = np.arange(shown)
    last = np.where(clicks.any(1), shown - 1 - clicks[:, ::-1].argmax(1), -2)
    passed = ~clicks & (places <= last[:, None] + 1) & np.isfinite(scores)
    which, liked, other = np.nonzero(clicks[:, :, None] & passed[:, None, :])  # pairs in the order of their lists
    out = np.zeros(scores.size)
    if len(which):
        gap = scores[which, liked] - scores[which, other]
        tail = np.exp(-np.abs(gap))
        weight = tail / (1 + tail) ** 2 * np.exp(-np.logaddexp(0.0, -flip(scores, rest, which, liked, other)))
        out += np.bincount(which * shown + liked, weight, len(out))
        out -= np.bincount(which * shown + other, weight, len(out))
    return out.reshape(scores.shape)


def flip(scores: Floats, rest: Floats, which: Ints, one: Ints, two: Ints) -> Floats:
    """log P(R* | f) - log P(R | f) of pairs of places, R* having the two documents exchanged.

    Only the sums of those not placed yet differ, at the places after the upper one down to the lower: there, what is
    left holds the upper document instead of the lower.
    """
    upper, lower = np.minimum(one, two), np.maximum(one, two)
    pair, places = np.arange(len(which)), np.arange(scores.shape[1])
    left = scores[which]
    plain = log_left(left, rest[which])
    left[pair, lower] = -np.inf
    turned = np.logaddexp(log_left(left, rest[which]), scores[which, upper][:, None])
    between = (places > upper[:, None]) & (places <= lower[:, None])
    with np.errstate(invalid="ignore"):  # places without a document are not between two
        return np.asarray(np.where(between, plain - turned, 0.0).sum(1))


def log_left(scores: Floats, rest: Floats) -> Floats:
    """By place, the logarithm of the sum of exp(f) of the documents there and below, and of all that are not shown."""
    backwards = np.concatenate([rest[:, None], scores[:, ::-1]], axis=1)
    return np.asarray(np.logaddexp.accumulate(backwards, axis=1)[:, :0:-1])
