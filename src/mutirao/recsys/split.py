"""Who is trained on and who judges: whole users, the latest ratings of every user, or the latest two."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.recsys.ratings import Ratings

SHARES = (0.8, 0.1, 0.1)  # training, validation, test

Mask = npt.NDArray[np.bool_]
Parts = tuple[Ratings, Ratings, Ratings]


def by_users(ratings: Ratings, draw: np.random.Generator) -> Parts:
    """80% of the users for training, 10% for validation, 10% for test; judged users are unseen, as in FedRecon."""
    count = len(ratings.users)
    if count < 10:
        raise ConfigError(f"{count} users cannot be split 80/10/10; right would be 10 or more")
    order = draw.permutation(count)
    first, second = round(SHARES[0] * count), round((SHARES[0] + SHARES[1]) * count)
    train, validation, test = (ratings.of_users(np.sort(rows)) for rows in np.split(order, [first, second]))
    return train, validation, test


def by_time(ratings: Ratings) -> Parts:
    """The first 80% of each user's ratings in time, the next 10% and the last; the users are the same."""
    place = position(ratings)
    counts = ratings.counts()[ratings.owners()]
    first = np.maximum(1, np.round(SHARES[0] * counts))
    second = np.maximum(first, np.round((SHARES[0] + SHARES[1]) * counts))
    train, validation, test = place < first, (place >= first) & (place < second), place >= second
    return ratings.where(train), ratings.where(validation), ratings.where(test)


def leave_one_out(ratings: Ratings) -> Parts:
    """Each user's latest rating is the test, the one before the validation, the others train; the users are the same.

    Of ratings of one second, that of the later row of the catalogue is the latest.
    """
    if few := int((ratings.counts() < 3).sum()):
        raise ConfigError(f"{few} users have fewer than 3 ratings; leave one out needs a test, a validation and more")
    left = ratings.counts()[ratings.owners()] - position(ratings)  # 1: the latest
    return ratings.where(left > 2), ratings.where(left == 2), ratings.where(left == 1)


def position(ratings: Ratings) -> npt.NDArray[np.int64]:
    """The place of each rating among its user's, oldest 0."""
    return np.arange(len(ratings)) - ratings.offsets[:-1][ratings.owners()]


def supports(ratings: Ratings, share: float, order: str, seed: int) -> Mask:
    """Which ratings of each user rebuild its vector: a share drawn at random, or the earliest; the rest is judged."""
    counts = ratings.counts()
    chosen = np.minimum(np.maximum(1, np.round(share * counts)), counts - 1).astype(np.int64)
    place = position(ratings)
    if order == "random":
        for user, (begin, end) in zip(ratings.users, pairwise(ratings.offsets.tolist()), strict=True):
            place[begin:end] = rng(seed, 0, "judged support", user).permutation(end - begin)
    return np.asarray(place < chosen[ratings.owners()])


def all_but_last(ratings: Ratings) -> Mask:
    """Every rating of a user but its latest: leave one out."""
    return position(ratings) < ratings.counts()[ratings.owners()] - 1
