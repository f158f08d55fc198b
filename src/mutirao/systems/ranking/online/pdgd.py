"""Pairwise Differentiable Gradient Descent (PDGD): gradients from clicks on a sampled ranking.

A ranking R of the k documents shown is sampled from the Plackett-Luce distribution of the scores f,
P(R | f) = prod_r exp(f(d_r)) / sum of exp(f(d)) over all documents not placed above r. A document clicked is preferred
to every document not clicked, down to the one below the last click. The gradient is the sum over these pairs i > j of

    rho(i, j) exp(f_i) exp(f_j) / (exp(f_i) + exp(f_j))^2 (f'_i - f'_j),  rho = P(R* | f) / (P(R | f) + P(R* | f)),

where R* is R with the two exchanged. So preferences that the order alone made likely count less, and in expectation a
pair is moved as users prefer it. Oosterhuis and de Rijke, 2018: Differentiable Unbiased Online Learning to Rank.

The rankers are a linear model and a network of one hidden layer.

All functions take many lists at once and compute in logarithms; no list's numbers depend on the others.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.randomness import rng

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
START = 0.01  # norm of the initial linear model, as in the authors' code


@dataclass(frozen=True)
class Linear:
    """f(x) = w x."""

    features: int

    def initial(self, seed: int) -> Arrays:
        """A random direction of norm 0.01."""
        w = rng(seed, 0, "initial").standard_normal(self.features)
        return {"weight": (START * w / np.linalg.norm(w)).astype(np.float32)}

    def score(self, model: Arrays, x: Floats) -> Floats:
        """The scores of documents."""
        return np.asarray(x @ model["weight"])

    def gradient(self, model: Arrays, x: Floats, weights: Floats) -> Arrays:
        """sum_i weight_i df(x_i)/dmodel."""
        return {"weight": weights @ x}


@dataclass(frozen=True)
class Network:
    """f(x) = w2 relu(W1 x + b1): PDGD works with any differentiable ranker."""

    features: int
    hidden: int

    def initial(self, seed: int) -> Arrays:
        """Random weights of standard deviation 1 / sqrt(inputs)."""
        draw = rng(seed, 0, "initial")
        first = draw.standard_normal((self.features, self.hidden)) / np.sqrt(self.features)
        second = draw.standard_normal(self.hidden) / np.sqrt(self.hidden)
        arrays = {"first": first, "bias": np.zeros(self.hidden), "second": second}
        return {name: value.astype(np.float32) for name, value in arrays.items()}

    def score(self, model: Arrays, x: Floats) -> Floats:
        """The scores of documents."""
        return np.asarray(self.inside(model, x) @ model["second"])

    def gradient(self, model: Arrays, x: Floats, weights: Floats) -> Arrays:
        """sum_i weight_i df(x_i)/dmodel, by the chain rule."""
        inside = self.inside(model, x)
        back = (inside > 0) * np.outer(weights, model["second"])
        return {"first": x.T @ back, "bias": back.sum(0), "second": weights @ inside}

    def inside(self, model: Arrays, x: Floats) -> Floats:
        """relu(W1 x + b1)."""
        return np.asarray(np.maximum(x @ model["first"] + model["bias"], 0.0))


Ranker = Linear | Network


def make_ranker(features: int, hidden: int) -> Ranker:
    """The network, or a linear ranker if it has no hidden units."""
    if hidden:
        return Network(features, hidden)
    return Linear(features)


def sample_rankings(scores: Floats, sizes: Ints, draws: Floats, shown: int) -> tuple[Ints, Floats]:
    """The documents each list shows, by place, and the log of the sum of exp(f) over those not shown.

    `scores` are of all documents, list after list of `sizes`; `draws` are uniform, one a document. Documents in the
    order of f + g, with g = -log(-log(u)), follow Plackett-Luce (Gumbel, 1954; Yellott, 1977). Places beyond a list's
    end hold -1.

    >>> sample_rankings(np.array([0.0, 9.0, 1.0]), np.array([2, 1]), np.full(3, 0.5), shown=2)[0].tolist()
    [[1, 0], [2, -1]]
    """
    begins = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # The Gumbel-max trick: sorting f + g samples without replacement, in one pass over all lists.
    gumbel = -np.log(-np.log(np.clip(draws, 1e-300, 1 - 1e-16)))
    order = np.lexsort((-(scores + gumbel), owner))
    places = np.arange(shown)
    there = places < sizes[:, None]
    documents = np.where(there, order[np.minimum(begins[:, None] + places, len(order) - 1)], -1)
    unseen = scores.copy()
    unseen[documents[there]] = -np.inf
    most = np.maximum.reduceat(unseen, begins)
    level = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):  # log 0 where all are shown
        rest = level + np.log(np.add.reduceat(np.exp(unseen - level[owner]), begins))
    return documents, rest


def document_weights(scores: Floats, rest: Floats, clicks: Bools) -> Floats:
    """The weight of each shown document's score in the gradient: the sum over its pairs, list by list.

    `scores` are of the documents shown, by place, -inf where there is none.
    """
    shown = scores.shape[1]
    places = np.arange(shown)
    # Without a click no document was passed over: -2 + 1 is before the first place.
    last = np.where(clicks.any(1), shown - 1 - clicks[:, ::-1].argmax(1), -2)
    passed = ~clicks & (places <= last[:, None] + 1) & np.isfinite(scores)
    # Pairs of a document clicked and one passed over, in the order of their lists.
    which, liked, other = np.nonzero(clicks[:, :, None] & passed[:, None, :])
    out = np.zeros(scores.size)
    if len(which):
        # exp(f_i) exp(f_j) / (exp(f_i) + exp(f_j))^2 depends on the gap alone and is computed without large powers.
        gap = scores[which, liked] - scores[which, other]
        tail = np.exp(-np.abs(gap))
        weight = (
            tail / (1 + tail) ** 2 * np.exp(-np.logaddexp(0.0, -swapped_log_ratio(scores, rest, which, liked, other)))
        )
        out += np.bincount(which * shown + liked, weight, len(out))
        out -= np.bincount(which * shown + other, weight, len(out))
    return out.reshape(scores.shape)


def swapped_log_ratio(scores: Floats, rest: Floats, which: Ints, one: Ints, two: Ints) -> Floats:
    """log P(R* | f) - log P(R | f) of pairs of places; R* is R with the two documents exchanged.

    Only the denominators after the upper place, down to the lower one, differ: there the documents not placed yet
    include the upper document instead of the lower.
    """
    upper = np.minimum(one, two)
    lower = np.maximum(one, two)
    pair = np.arange(len(which))
    places = np.arange(scores.shape[1])
    left = scores[which]
    plain = log_remaining(left, rest[which])
    left[pair, lower] = -np.inf
    turned = np.logaddexp(log_remaining(left, rest[which]), scores[which, upper][:, None])
    between = (places > upper[:, None]) & (places <= lower[:, None])
    with np.errstate(invalid="ignore"):  # padding is not between two documents
        return np.asarray(np.where(between, plain - turned, 0.0).sum(1))


def log_remaining(scores: Floats, rest: Floats) -> Floats:
    """By place, the log of the sum of exp(f) over the documents there and below, and over those not shown."""
    backwards = np.concatenate([rest[:, None], scores[:, ::-1]], axis=1)
    return np.asarray(np.logaddexp.accumulate(backwards, axis=1)[:, :0:-1])
