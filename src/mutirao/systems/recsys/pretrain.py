"""Item vectors from pooled ratings: matrix factorisation by SGD, begun at random, by PCA or by Word2Vec."""

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import Reply, Request, Site
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.embeddings import SPREAD, Embeddings
from mutirao.systems.recsys.kernels import MIX, require_kernel
from mutirao.systems.recsys.ratings import Ratings

WORDS = 1_000_000  # items read in all: smaller sets are read more often
NEGATIVE = 5  # items drawn against each pair
POWER = 0.75  # they are drawn by popularity to this power
SAMPLE = 1e-3  # items with a larger share of all ratings are left out at times
RATES = (0.025, 0.0001)  # the learning rate falls in a straight line
SLOTS = 2**20  # items are drawn from a table of so many, or of 64 an item if that is more

log = logging.getLogger("mutirao")

ITEMS = "items"
Floats = npt.NDArray[np.float32]
Begin = Literal["random", "pca", "word2vec"]


@dataclass(frozen=True)
class Factorisation:
    """min sum (r - p)^2 + decay (|v_u|^2 + |x_i|^2) by SGD over shuffled ratings, p as in FedRecon.

    `begin` says where item vectors start: N(0, 0.1); `pca`, the right singular vectors of the centred rating matrix;
    or `word2vec`, skip-grams within `window` items of each user's, in the order of time, which needs no ratings. Both
    are brought to the standard deviation `spread`, PCA's components each by itself if they `whiten` (with `spread` = 1:
    unit variance). `epochs` = 0 leaves them as they are, which is all that implicit feedback allows.
    """

    dimension: int = 50
    begin: Begin = "random"
    epochs: int = 25
    lr: float = 0.02
    decay: float = 0.1
    biases: bool = True
    window: int = 5
    whiten: bool = False
    spread: float = SPREAD

    def __post_init__(self) -> None:
        whole = self.dimension > self.biases and self.epochs >= 0 and self.window >= 1
        if not (whole and self.lr > 0 and self.decay >= 0 and 0 < self.spread < float("inf")):
            raise ConfigError(f"{self!r} cannot be: all numbers must be above 0 (epochs and decay at least 0)")
        if self.whiten and self.begin != "pca":
            raise ConfigError(
                f"whiten: components are those of begin=pca, not of begin={self.begin}; leave it at false"
            )


def pretrain(ratings: Ratings, how: Factorisation, seed: int = 0, folds: int = 0) -> Embeddings:
    """Item vectors of all ratings together; with `folds`, how many epochs are best is first found by cross-validation.

    Implicit ratings, which are all the same, are never factorised.
    """
    card: dict[str, Any] = {"how": "pretrain", "seed": seed, "users": len(ratings.users), "ratings": len(ratings)}
    levels = np.unique(ratings.values)
    implicit = len(levels) == 1
    card |= {"levels": [float(v) for v in levels], "loss": "weighted" if implicit else "squared"}
    if implicit and how.epochs:
        log.warning("all ratings are %g: the vectors are those of %s, not factorised", ratings.values[0], how.begin)
        how = replace(how, epochs=0)
    if folds and how.epochs:
        curves = np.array([fold_errors(ratings, how, seed, fold, folds) for fold in range(folds)])
        best = int(curves.mean(0).argmin())
        how = replace(how, epochs=best + 1)
        card |= {"folds": folds, "rmse": float(curves[:, best].mean()), "rmse_folds": curves[:, best].tolist()}
    vectors = start_items(ratings, how, seed)
    users = start_users(ratings, how, seed)
    for epoch in range(how.epochs):
        one_epoch(ratings, how, rng(seed, epoch + 1, "order"), users, vectors)
    return Embeddings(ratings.recount().catalogue, vectors, card | asdict(how))


def start_items(ratings: Ratings, how: Factorisation, seed: int) -> Floats:
    """Where item vectors start; biases at 0."""
    vectors = rng(seed, 0, "begin").normal(0, how.spread, (len(ratings.catalogue), how.dimension)).astype(np.float32)
    first = int(how.biases)
    if how.begin != "random":
        find = principal if how.begin == "pca" else word2vec
        rated = np.bincount(ratings.items, minlength=len(vectors)) > 0
        found = find(ratings, how.dimension - first, how.window, seed)[rated]
        sizes = found.std(0) if how.whiten else found.std()
        vectors[rated, first:] = found * (how.spread / np.maximum(sizes, 1e-12))
    if how.biases:
        vectors[:, 0] = 0
    return vectors


def principal(ratings: Ratings, dimension: int, window: int, seed: int) -> npt.NDArray[np.float64]:
    """PCA: right singular vectors of the users x items matrix, each rating less its item's mean, times singular values.

    What was not rated counts as the mean. If all ratings are alike, 1 stands for each and nothing is taken off.
    """
    from scipy import sparse
    from scipy.sparse.linalg import svds

    shape = (len(ratings.users), len(ratings.catalogue))
    if not 0 < dimension < min(shape):
        raise ConfigError(f"PCA of {shape[0]} users x {shape[1]} items has no {dimension} components; use fewer")
    values = ratings.values.astype(np.float64)
    counts = np.bincount(ratings.items, minlength=shape[1])
    means = np.bincount(ratings.items, values, shape[1]) / np.maximum(counts, 1)
    centred = values - means[ratings.items] if values.min() < values.max() else np.ones_like(values)
    matrix = sparse.csr_array((centred, (ratings.owners(), ratings.items)), shape=shape)
    _, sizes, right = svds(matrix, k=dimension, v0=rng(seed, 0, "svd").normal(size=min(shape)))
    order = np.argsort(-sizes)
    signs = np.sign(right[order, np.abs(right[order]).argmax(1)])  # svds leaves the signs open
    return np.asarray((right[order] * (signs * sizes[order])[:, None]).T)


def start_users(ratings: Ratings, how: Factorisation, seed: int) -> Floats:
    """Where user vectors start: N(0, 0.1), biases at 0."""
    users = rng(seed, 0, "users").normal(0, SPREAD, (len(ratings.users), how.dimension)).astype(np.float32)
    users[:, : int(how.biases)] = 0
    return users


def one_epoch(ratings: Ratings, how: Factorisation, draw: np.random.Generator, users: Floats, items: Floats) -> float:
    """Train `users` and `items` in place by every rating once, in an order drawn; the RMSE as met on the way."""
    owners, order = ratings.owners(), draw.permutation(len(ratings))
    y = ratings.values - np.float32(centre(ratings, how.biases))
    total = require_kernel(factorise)(users, items, owners, ratings.items, y, order, how.biases, how.lr, how.decay)
    if not np.isfinite(total):
        raise ConfigError(f"the factorisation diverged; lr={how.lr} is too large for these ratings")
    return float(np.sqrt(total / len(ratings)))


def centre(ratings: Ratings, biases: bool) -> float:
    """The middle of the scale, from which biases are counted."""
    return float((ratings.values.min() + ratings.values.max()) / 2) if biases else 0.0


def factorise(p: Any, q: Any, users: Any, items: Any, y: Any, order: Any, biases: bool, lr: float, decay: float) -> Any:
    """One epoch of SGD over ratings in the order given: e = y - prediction; p += lr (e q - decay p), q likewise.

    Columns 0 of `p` and `q` are biases, if there are any. Returns the sum of e^2 as met on the way.
    """
    d = p.shape[1]
    first = 1 if biases else 0
    total = 0.0
    rate, keep = np.float32(lr), np.float32(1 - lr * decay)
    for t in range(len(order)):
        k = order[t]
        u, i = users[k], items[k]
        guess = p[u, 0] + q[i, 0] if biases else np.float32(0)
        for j in range(first, d):
            guess += p[u, j] * q[i, j]
        error = y[k] - guess
        total += np.float64(error) * np.float64(error)
        pull = rate * error
        for j in range(first, d):
            mine = p[u, j]
            p[u, j] = keep * mine + pull * q[i, j]
            q[i, j] = keep * q[i, j] + pull * mine
        if biases:
            p[u, 0] += pull
            q[i, 0] += pull
    return total


def fold_errors(ratings: Ratings, how: Factorisation, seed: int, fold: int, folds: int) -> list[float]:
    """The RMSE on one of `folds` parts of the ratings after each epoch on the others."""
    if folds < 2 or len(ratings) < folds:
        raise ConfigError(f"{len(ratings)} ratings cannot make {folds} folds; right would be 2 or more")
    part = rng(seed, 0, "folds").permutation(len(ratings)) % folds
    train, held = ratings.where(part != fold), part == fold
    owners, rows = ratings.owners()[held], ratings.items[held]
    middle, low, high = centre(ratings, how.biases), ratings.values.min(), ratings.values.max()
    users, items, first = start_users(train, how, seed), start_items(train, how, seed), int(how.biases)
    errors = []
    for epoch in range(how.epochs):
        one_epoch(train, how, rng(seed, epoch + 1, "order"), users, items)
        guess = (users[owners, first:] * items[rows, first:]).sum(1) + np.float32(middle)
        if how.biases:
            guess += users[owners, 0] + items[rows, 0]
        gap = np.clip(guess, low, high).astype(np.float64) - ratings.values[held]
        errors.append(float(np.sqrt(np.mean(gap**2))))
    return errors


@dataclass(frozen=True)
class Pooled:
    """A handler for one site that has everybody's ratings: an epoch of factorisation a round, the reference."""

    how: Factorisation

    provides = frozenset({"metrics:loss"})

    def __post_init__(self) -> None:
        require_kernel(factorise)  # fails before the first round, not in it

    def __call__(self, request: Request, site: Site) -> Reply:
        """One epoch; the users' vectors stay in the site's state."""
        ratings: Ratings = site.data
        items, seed = request.arrays[ITEMS].copy(), int(request.config["seed"])
        users = site.state["users"] if "users" in site.state else start_users(ratings, self.how, seed)
        loss = one_epoch(ratings, self.how, rng(seed, int(request.config["round"]), "order"), users, items) ** 2
        site.state["users"] = users
        return Reply({ITEMS: items}, metrics={"loss": loss}, n=len(ratings))


# Word2Vec


def word2vec(ratings: Ratings, dimension: int, window: int, seed: int) -> Floats:
    """Item vectors: max sum log s(x_c y_o) + sum_n log s(-x_c y_n), s the sigmoid (Mikolov et al., 2013).

    Over pairs of an item o and one c at most r items away, r drawn from 1 to `window` for each o, and 5 items n drawn
    by popularity^0.75. An item of the share f of all ratings is kept with probability sqrt(t / f) + t / f, t = 0.001.
    One thread, one pair after the other: the same bytes each time.
    """
    train = require_kernel(follow)
    counts = np.bincount(ratings.items, minlength=len(ratings.catalogue))
    epochs = min(max(5, WORDS // len(ratings)), 50)
    share = np.maximum(counts / (SAMPLE * len(ratings)), 1e-12)
    kept, owners, table = np.sqrt(1 / share) + 1 / share, ratings.owners(), fill_table(counts)
    inner = ((rng(seed, 0, "word2vec").random((len(counts), dimension)) - 0.5) / dimension).astype(np.float32)
    outer = np.zeros_like(inner)
    for epoch in range(epochs):
        draw = rng(seed, epoch + 1, "word2vec")
        at = np.flatnonzero(draw.random(len(ratings)) < kept[ratings.items])
        ends = np.cumsum(np.bincount(owners[at], minlength=len(ratings.users)))
        reach = draw.integers(1, window + 1, len(at))
        progress = (epoch + at / len(ratings)) / epochs
        rates = (RATES[0] + (RATES[1] - RATES[0]) * progress).astype(np.float32)
        first = np.uint64(derive_seed(seed, epoch + 1, "negatives"))
        train(inner, outer, ratings.items[at], ends, reach, rates, table, NEGATIVE, first)
    return inner


def fill_table(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Items, each in as many slots as is its share of sum counts^0.75: a slot drawn evenly is an item drawn so."""
    slots = 1 << (max(SLOTS, 64 * len(counts)) - 1).bit_length()  # a power of two: its lowest bits are a slot
    reached = np.cumsum(counts**POWER)
    places = (np.arange(slots) + 0.5) * (reached[-1] / slots)
    return np.asarray(np.searchsorted(reached, places), np.int32)


def follow(
    inner: Any, outer: Any, items: Any, ends: Any, reach: Any, rates: Any, table: Any, negative: int, first: Any
) -> None:
    """One epoch in place. User u has the items ends[u - 1]:ends[u]; item k looks reach[k] to either side.

    g = rate (1 - s(x y)) for the pair and -rate s(x y) for each item drawn; y += g x at once, x by their sum at the
    end of the pair. Draws that meet the item itself do nothing. Numbers are SplitMix64's (Steele, Lea and Flood, 2014).
    """
    d = inner.shape[1]
    change = np.zeros(d, np.float32)
    one, last, state = np.float32(1), np.uint64(len(table) - 1), first
    begin = 0
    for end in ends:
        for k in range(begin, end):
            for near in range(max(begin, k - reach[k]), min(end, k + reach[k] + 1)):
                if near == k:
                    continue
                x = inner[items[near]]
                change[:] = 0
                for turn in range(negative + 1):
                    target, label = items[k], one
                    if turn > 0:
                        state += np.uint64(MIX[0])
                        z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX[1])
                        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[2])
                        target, label = table[(z ^ (z >> np.uint64(31))) & last], np.float32(0)
                        if target == items[k]:
                            continue
                    y = outer[target]
                    product = np.float32(0)
                    for j in range(d):
                        product += x[j] * y[j]
                    g = rates[k] * (label - one / (one + np.exp(-product)))
                    for j in range(d):
                        change[j] += g * y[j]
                        y[j] += g * x[j]
                for j in range(d):
                    x[j] += change[j]
        begin = end
