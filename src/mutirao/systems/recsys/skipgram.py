"""Word2Vec over each user's items in the order of time: skip-grams with negative sampling, by numba."""

from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.kernels import MIX, require
from mutirao.systems.recsys.ratings import Ratings

WORDS = 1_000_000  # items read in all: smaller sets are read more often
NEGATIVE = 5  # items drawn against each pair
POWER = 0.75  # they are drawn by popularity to this power
SAMPLE = 1e-3  # items with a larger share of all ratings are left out at times
RATES = (0.025, 0.0001)  # the learning rate falls in a straight line
SLOTS = 2**20  # items are drawn from a table of so many, or of 64 an item if that is more

Floats = npt.NDArray[np.float32]


def word2vec(ratings: Ratings, dimension: int, window: int, seed: int) -> Floats:
    """Item vectors: max sum log s(x_c y_o) + sum_n log s(-x_c y_n), s the sigmoid (Mikolov et al., 2013).

    Over pairs of an item o and one c at most r items away, r drawn from 1 to `window` for each o, and 5 items n drawn
    by popularity^0.75. An item of the share f of all ratings is kept with probability sqrt(t / f) + t / f, t = 0.001.
    One thread, one pair after the other: the same bytes each time.
    """
    train = require(follow)
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
