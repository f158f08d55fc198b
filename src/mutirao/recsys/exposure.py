"""How much of a user was read: items found, ratings that are right, and what one would have guessed without reading."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.recsys.ratings import Ratings

Floats = npt.NDArray[np.float64]
SMOOTH = 5.0  # ratings of the general kind that are added to those of an item


class Usual(NamedTuple):
    """What a server knows without reading any update, of people whose ratings are public, say."""

    shares: Floats  # items x levels: how often each rating is given to an item
    popularity: Floats  # of the items: the share of people who rate it


@dataclass(frozen=True)
class Exposure:
    """Means over ratings, of one user or of many: shares between 0 and 1.

    `read` of the ratings were stated rightly, `guessed` if one states the user's mean rating for all, which is not even
    known to the server; `usual` if one states for each item what people rate it, and reads nothing. `precision` and
    `recall` are of the items said to be the user's; `popular` is the precision if one says the most popular instead, as
    many as there are.
    """

    ratings: int
    read: float
    guessed: float
    usual: float
    precision: float
    recall: float
    popular: float

    @property
    def gain(self) -> float:
        """What is stated rightly above guessing the user's mean."""
        return self.read - self.guessed

    @property
    def learned(self) -> float:
        """What reading gave: above the better of both guesses."""
        return self.read - max(self.guessed, self.usual)


def judge_reading(
    truth: Mapping[int, float],
    items: Collection[int],
    said: Mapping[int, float],
    named: Collection[int],
    usual: Usual,
    levels: Floats,
) -> Exposure:
    """How a server does for a user with these ratings, the `truth`, and `items`: it read what is `said`, and `named`.

    Of items whose rating it did not read it states the most usual one.
    """
    often = levels[usual.shares.argmax(1)]
    values = np.array(list(truth.values()))
    mean = levels[np.abs(levels - values.mean()).argmin()]
    hits = len(set(items) & set(named))
    top = set(most_likely(usual.popularity, len(items)))
    return Exposure(
        ratings=len(truth),
        read=float(np.mean([said.get(item, often[item]) == value for item, value in truth.items()])),
        guessed=float(np.mean(values == mean)),
        usual=float(np.mean([often[item] == value for item, value in truth.items()])),
        precision=hits / len(named) if named else 0.0,
        recall=hits / len(items),
        popular=len(top & set(items)) / len(items),
    )


def join_exposures(parts: list[Exposure]) -> Exposure:
    """Of many users together: every rating counts the same."""
    weights = np.array([part.ratings for part in parts], np.float64)
    shares = [f.name for f in fields(Exposure) if f.name != "ratings"]
    means = {name: float(np.average([getattr(p, name) for p in parts], weights=weights)) for name in shares}
    return Exposure(int(weights.sum()), **means)


def most_likely(score: Floats, count: int) -> list[int]:
    """The places with the highest scores."""
    return [int(i) for i in np.argsort(-score, kind="stable")[:count]]


def usual_takings(known: Ratings, negatives: int) -> Usual:
    """What people take, and how likely an item of a user's query was taken, not drawn, as `negatives` for each are."""
    popularity = (np.bincount(known.items, minlength=len(known.catalogue)) + 0.5) / len(known.users)
    drawn = negatives * popularity.mean() * (1 - np.minimum(popularity, 1.0))
    taken = popularity / (popularity + drawn)
    return Usual(np.stack([1 - taken, taken], 1), popularity)


def usual_ratings(known: Ratings, levels: Floats) -> Usual:
    """What people the server knows of rate: smoothed by how it is in general."""
    counts = np.zeros((len(known.catalogue), len(levels)))
    np.add.at(counts, (known.items, np.abs(known.values[:, None] - levels[None]).argmin(1)), 1.0)
    general = (counts.sum(0) + 1) / (counts.sum() + len(levels))
    shares = (counts + SMOOTH * general) / (counts.sum(1, keepdims=True) + SMOOTH)
    return Usual(shares, (counts.sum(1) + 0.5) / len(known.users))
