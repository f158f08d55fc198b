"""Train item vectors on pooled ratings: matrix factorisation by SGD, starting at random, from PCA or from Word2Vec."""

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import Capabilities
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.embeddings import SPREAD, Embeddings
from mutirao.systems.recsys.kernels import MIX, require_kernel
from mutirao.systems.recsys.ratings import Ratings

log = logging.getLogger("mutirao")

ITEMS = "items"
# Word2Vec
MIN_POSITIONS = 1_000_000  # items processed in all: smaller data sets get more epochs
NEGATIVES = 5  # for each pair
POWER = 0.75  # negatives are sampled by popularity to this power
SUBSAMPLE = 1e-3  # items with a larger share of all ratings are left out at random
RATES = (0.025, 0.0001)  # the learning rate decreases linearly
SLOTS = 2**20  # size of the table that negatives are sampled from; at least 64 for each item

Floats = npt.NDArray[np.float32]
Begin = Literal["random", "pca", "word2vec"]


@dataclass(frozen=True)
class Factorisation:
    """min sum (r - p)^2 + decay (|v_u|^2 + |x_i|^2) by SGD over shuffled ratings, p as in FedRecon.

    `begin` sets the initial item vectors: N(0, 0.1); `pca`, the right singular vectors of the centred rating matrix; or
    `word2vec`, skip-grams within `window` items of each user in the order of time, which needs no ratings. Both are
    scaled to the standard deviation `spread`, with `whiten` each component of PCA by itself (`spread` = 1: unit
    variance). `epochs` = 0 keeps the initial vectors; implicit feedback allows nothing else.
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
        valid_counts = self.dimension > self.biases and self.epochs >= 0 and self.window >= 1
        if not (valid_counts and self.lr > 0 and self.decay >= 0 and 0 < self.spread < float("inf")):
            raise ConfigError(f"{self!r}: all numbers must be above 0 (epochs and decay at least 0)")
        if self.whiten and self.begin != "pca":
            raise ConfigError(
                f"whiten: components are those of begin=pca, not of begin={self.begin}; leave it at false"
            )


def pretrain(ratings: Ratings, config: Factorisation, seed: int = 0, folds: int = 0) -> Embeddings:
    """Train item vectors on all ratings. With `folds`, the number of epochs is chosen by cross-validation.

    Implicit feedback, where all ratings are equal, is never factorised.
    """
    card: dict[str, Any] = {"how": "pretrain", "seed": seed, "users": len(ratings.users), "ratings": len(ratings)}
    levels = np.unique(ratings.values)
    implicit = len(levels) == 1
    card |= {"levels": [float(v) for v in levels], "loss": "weighted" if implicit else "squared"}
    if implicit and config.epochs:
        log.warning("all ratings are %g: the vectors are those of %s, not factorised", ratings.values[0], config.begin)
        config = replace(config, epochs=0)
    if folds and config.epochs:
        curves = np.array([fold_errors(ratings, config, seed, fold, folds) for fold in range(folds)])
        best = int(curves.mean(0).argmin())
        config = replace(config, epochs=best + 1)
        card |= {"folds": folds, "rmse": float(curves[:, best].mean()), "rmse_folds": curves[:, best].tolist()}
    vectors = initial_items(ratings, config, seed)
    users = initial_users(ratings, config, seed)
    for epoch in range(config.epochs):
        train_epoch(ratings, config, rng(seed, epoch + 1, "order"), users, vectors)
    return Embeddings(ratings.recount().catalogue, vectors, card | asdict(config))


def initial_items(ratings: Ratings, config: Factorisation, seed: int) -> Floats:
    """The initial item vectors; biases are 0."""
    vectors = (
        rng(seed, 0, "begin").normal(0, config.spread, (len(ratings.catalogue), config.dimension)).astype(np.float32)
    )
    first = int(config.biases)
    if config.begin != "random":
        find = pca if config.begin == "pca" else word2vec
        rated = np.bincount(ratings.items, minlength=len(vectors)) > 0
        found = find(ratings, config.dimension - first, config.window, seed)[rated]
        sizes = found.std(0) if config.whiten else found.std()
        vectors[rated, first:] = found * (config.spread / np.maximum(sizes, 1e-12))
    if config.biases:
        vectors[:, 0] = 0
    return vectors


def pca(ratings: Ratings, dimension: int, window: int, seed: int) -> npt.NDArray[np.float64]:
    """PCA: right singular vectors of the users x items matrix of ratings minus item means, times singular values.

    Missing ratings count as the mean. If all ratings are equal, each is 1 and nothing is subtracted.
    """
    from scipy import sparse
    from scipy.sparse.linalg import svds

    shape = (len(ratings.users), len(ratings.catalogue))
    if not 0 < dimension < min(shape):
        raise ConfigError(f"PCA of {shape[0]} users x {shape[1]} items has no {dimension} components; use fewer")
    values = ratings.values.astype(np.float64)
    counts = np.bincount(ratings.items, minlength=shape[1])
    means = np.bincount(ratings.items, values, shape[1]) / np.maximum(counts, 1)
    # Of implicit feedback nothing would be left without the mean.
    centred = np.ones_like(values)
    if values.min() < values.max():
        centred = values - means[ratings.items]
    matrix = sparse.csr_array((centred, (ratings.owners(), ratings.items)), shape=shape)
    _, sizes, right = svds(matrix, k=dimension, v0=rng(seed, 0, "svd").normal(size=min(shape)))
    order = np.argsort(-sizes)
    # svds does not determine the signs: the largest element of each component is made positive.
    signs = np.sign(right[order, np.abs(right[order]).argmax(1)])
    return np.asarray((right[order] * (signs * sizes[order])[:, None]).T)


def initial_users(ratings: Ratings, config: Factorisation, seed: int) -> Floats:
    """The initial user vectors: N(0, 0.1), biases 0."""
    users = rng(seed, 0, "users").normal(0, SPREAD, (len(ratings.users), config.dimension)).astype(np.float32)
    users[:, : int(config.biases)] = 0
    return users


def train_epoch(
    ratings: Ratings, config: Factorisation, draw: np.random.Generator, users: Floats, items: Floats
) -> float:
    """Train `users` and `items` in place on every rating once, in random order. Returns the RMSE before each step."""
    owners = ratings.owners()
    order = draw.permutation(len(ratings))
    y = ratings.values - np.float32(centre(ratings, config.biases))
    total = require_kernel(sgd_epoch)(
        users, items, owners, ratings.items, y, order, config.biases, config.lr, config.decay
    )
    if not np.isfinite(total):
        raise ConfigError(f"the factorisation diverged; lr={config.lr} is too large for these ratings")
    return float(np.sqrt(total / len(ratings)))


def centre(ratings: Ratings, biases: bool) -> float:
    """The middle of the scale, to which biases are relative."""
    if biases:
        return float((ratings.values.min() + ratings.values.max()) / 2)
    return 0.0


def sgd_epoch(p: Any, q: Any, users: Any, items: Any, y: Any, order: Any, biases: bool, lr: float, decay: float) -> Any:
    """One epoch of SGD over ratings in this order: e = y - prediction; p += lr (e q - decay p), q likewise.

    With `biases`, columns 0 of `p` and `q` are biases. Returns the sum of e^2 before each step.
    """
    d = p.shape[1]
    first = 1 if biases else 0
    total = 0.0
    rate = np.float32(lr)
    keep = np.float32(1 - lr * decay)
    for t in range(len(order)):
        k = order[t]
        u = users[k]
        i = items[k]
        prediction = p[u, 0] + q[i, 0] if biases else np.float32(0)
        for j in range(first, d):
            prediction += p[u, j] * q[i, j]
        error = y[k] - prediction
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


def fold_errors(ratings: Ratings, config: Factorisation, seed: int, fold: int, folds: int) -> list[float]:
    """The RMSE on one fold of the ratings after each epoch on the other folds."""
    if folds < 2 or len(ratings) < folds:
        raise ConfigError(f"{len(ratings)} ratings cannot be split into {folds} folds; use 2 or more")
    part = rng(seed, 0, "folds").permutation(len(ratings)) % folds
    train = ratings.where(part != fold)
    test = part == fold
    owners = ratings.owners()[test]
    rows = ratings.items[test]
    middle = centre(ratings, config.biases)
    low = ratings.values.min()
    high = ratings.values.max()
    users = initial_users(train, config, seed)
    items = initial_items(train, config, seed)
    first = int(config.biases)
    errors = []
    for epoch in range(config.epochs):
        train_epoch(train, config, rng(seed, epoch + 1, "order"), users, items)
        prediction = (users[owners, first:] * items[rows, first:]).sum(1) + np.float32(middle)
        if config.biases:
            prediction += users[owners, 0] + items[rows, 0]
        gap = np.clip(prediction, low, high).astype(np.float64) - ratings.values[test]
        errors.append(float(np.sqrt(np.mean(gap**2))))
    return errors


@dataclass(frozen=True)
class Pooled:
    """A handler for one site with all ratings, as centralised reference: an epoch of factorisation in each round."""

    config: Factorisation

    capabilities = Capabilities(metrics={"loss"})

    def __post_init__(self) -> None:
        require_kernel(sgd_epoch)  # fails before the first round

    def __call__(self, request: Request, site: Site) -> Reply:
        """One epoch. The users' vectors stay in the site's state."""
        ratings: Ratings = site.data
        items = request.arrays[ITEMS].copy()
        seed = int(request.config["seed"])
        users = site.state.get("users")
        if users is None:
            users = initial_users(ratings, self.config, seed)
        loss = train_epoch(ratings, self.config, rng(seed, int(request.config["round"]), "order"), users, items) ** 2
        site.state["users"] = users
        return Reply({ITEMS: items}, metrics={"loss": loss}, n=len(ratings))


# Word2Vec


def word2vec(ratings: Ratings, dimension: int, window: int, seed: int) -> Floats:
    """Item vectors: max sum log s(x_c y_o) + sum_n log s(-x_c y_n), with the sigmoid s (Mikolov et al., 2013).

    The sum is over pairs of an item o and one c at most r items away, with r random from 1 to `window` for each o, and
    5 negatives n sampled by popularity^0.75. An item with the share f of all ratings is kept with probability
    sqrt(t / f) + t / f, t = 0.001. One thread processes the pairs in order, so that results are reproducible.
    """
    kernel = require_kernel(skipgram_epoch)
    counts = np.bincount(ratings.items, minlength=len(ratings.catalogue))
    epochs = min(max(5, MIN_POSITIONS // len(ratings)), 50)
    share = np.maximum(counts / (SUBSAMPLE * len(ratings)), 1e-12)
    keep = np.sqrt(1 / share) + 1 / share
    owners = ratings.owners()
    table = fill_table(counts)
    inner = ((rng(seed, 0, "word2vec").random((len(counts), dimension)) - 0.5) / dimension).astype(np.float32)
    outer = np.zeros_like(inner)
    for epoch in range(epochs):
        draw = rng(seed, epoch + 1, "word2vec")
        at = np.flatnonzero(draw.random(len(ratings)) < keep[ratings.items])
        ends = np.cumsum(np.bincount(owners[at], minlength=len(ratings.users)))
        windows = draw.integers(1, window + 1, len(at))
        progress = (epoch + at / len(ratings)) / epochs
        rates = (RATES[0] + (RATES[1] - RATES[0]) * progress).astype(np.float32)
        state = np.uint64(derive_seed(seed, epoch + 1, "negatives"))
        kernel(inner, outer, ratings.items[at], ends, windows, rates, table, NEGATIVES, state)
    return inner


def fill_table(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """A table in which each item has slots in proportion to counts^0.75, so that negatives are sampled uniformly."""
    # A power of two, so that the lowest bits of a random number are a slot.
    slots = 1 << (max(SLOTS, 64 * len(counts)) - 1).bit_length()
    cumulative = np.cumsum(counts**POWER)
    places = (np.arange(slots) + 0.5) * (cumulative[-1] / slots)
    return np.asarray(np.searchsorted(cumulative, places), np.int32)


def skipgram_epoch(
    inner: Any, outer: Any, items: Any, ends: Any, windows: Any, rates: Any, table: Any, negative: int, first: Any
) -> None:
    """One epoch in place. User u has the items ends[u - 1]:ends[u]; item k has windows[k] neighbours on either side.

    g = rate (1 - s(x y)) for the pair and -rate s(x y) for each negative; y += g x at once, x by their sum after the
    pair. A negative that is the item itself is skipped. Random numbers are SplitMix64's (Steele, Lea and Flood, 2014).
    """
    d = inner.shape[1]
    change = np.zeros(d, np.float32)
    one = np.float32(1)
    last = np.uint64(len(table) - 1)
    state = first
    begin = 0
    for end in ends:
        for k in range(begin, end):
            for near in range(max(begin, k - windows[k]), min(end, k + windows[k] + 1)):
                if near == k:
                    continue
                x = inner[items[near]]
                change[:] = 0
                for turn in range(negative + 1):
                    target = items[k]
                    label = one
                    if turn > 0:
                        state += np.uint64(MIX[0])
                        z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX[1])
                        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[2])
                        target = table[(z ^ (z >> np.uint64(31))) & last]
                        label = np.float32(0)
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
