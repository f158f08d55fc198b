"""Training, validation and test parts: whole users, at random or by arrival, or each user's latest ratings."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.ratings import Ratings

SHARES = (0.8, 0.1, 0.1)  # training, validation, test
FOLDS = 5
PARTS = ("train", "vali", "test")
SPLITS = {"users": 2, "users_by_time": 2, "time": 3, "leave_one_out": 4}  # with the ratings that a user needs

Mask = npt.NDArray[np.bool_]
Parts = tuple[Ratings, Ratings, Ratings]


def split_ratings(ratings: Ratings, split: str, fold: int, seed: int) -> Parts:
    """Split ratings by the settings `split` and `fold`."""
    if fold and split != "users":
        raise ConfigError(f"fold={fold}: folds are random parts of the users; use split=users, or fold=0")
    if split == "leave_one_out":
        return leave_one_out(ratings, seed)
    if split != "users":
        return {"users_by_time": by_arrival, "time": by_time}[split](ratings)
    draw = rng(seed, 0, "users")
    if fold:
        return by_folds(ratings, draw, fold)
    return by_users(ratings, draw)


def by_users(ratings: Ratings, draw: np.random.Generator) -> Parts:
    """A random 80% of the users for training, 10% for validation and 10% for test, as in FedRecon."""
    return in_order(ratings, draw.permutation(len(ratings.users)))


def by_arrival(ratings: Ratings) -> Parts:
    """The 80% of the users with the earliest first rating for training, the next 10% for validation, the last for test.

    Users of the same second keep the order of the ratings.
    """
    if ratings.times.min() == ratings.times.max():
        raise ConfigError("split=users_by_time: the ratings have no times by which users could be ordered; use users")
    return in_order(ratings, np.argsort(ratings.times[ratings.offsets[:-1]], kind="stable"))


def in_order(ratings: Ratings, order: npt.NDArray[np.intp]) -> Parts:
    """The first 80% of the users in this order, the next 10% and the last."""
    count = len(order)
    if count < 10:
        raise ConfigError(f"{count} users cannot be split 80/10/10; at least 10 are needed")
    first = round(SHARES[0] * count)
    second = round((SHARES[0] + SHARES[1]) * count)
    train, validation, test = (ratings.of_users(np.sort(rows)) for rows in np.split(order, [first, second]))
    return train, validation, test


def by_folds(ratings: Ratings, draw: np.random.Generator, fold: int) -> Parts:
    """Five folds of the users: the given `fold` (1 to 5) for test, the others for training, none for validation."""
    count = len(ratings.users)
    if count < FOLDS:
        raise ConfigError(f"{count} users cannot be split into {FOLDS} folds; at least {FOLDS} are needed")
    part = np.empty(count, np.intp)
    part[draw.permutation(count)] = np.arange(count) % FOLDS
    train, test = (ratings.of_users(np.flatnonzero(rows)) for rows in (part != fold - 1, part == fold - 1))
    return train, ratings.of_users(np.empty(0, np.intp)), test


def by_time(ratings: Ratings) -> Parts:
    """The first 80% of each user's ratings in time, the next 10% and the last 10%."""
    place = position(ratings)
    counts = ratings.counts()[ratings.owners()]
    first = np.maximum(1, np.round(SHARES[0] * counts))
    second = np.maximum(first, np.round((SHARES[0] + SHARES[1]) * counts))
    validation = (place >= first) & (place < second)
    return ratings.where(place < first), ratings.where(validation), ratings.where(place >= second)


def leave_one_out(ratings: Ratings, seed: int = 0) -> Parts:
    """Each user's latest rating for test, the one before for validation, the others for training.

    Ratings of the same second are in random order: by item number, obscure items would be the latest.

    >>> from mutirao.systems.recsys.ratings import plant
    >>> train, vali, test = leave_one_out(plant(20, 50, np.random.default_rng(0)))
    >>> set(test.counts().tolist()), set(vali.counts().tolist())  # one rating of each user
    ({1}, {1})
    """
    if few := int((ratings.counts() < 3).sum()):
        raise ConfigError(f"{few} users have fewer than 3 ratings; leave_one_out needs one for each of its three parts")
    order = np.lexsort((rng(seed, 0, "ties").random(len(ratings)), ratings.times, ratings.owners()))
    ordered = replace(ratings, items=ratings.items[order], values=ratings.values[order], times=ratings.times[order])
    left = ratings.counts()[ratings.owners()] - position(ratings)  # 1: the latest
    return ordered.where(left > 2), ordered.where(left == 2), ordered.where(left == 1)


def position(ratings: Ratings) -> npt.NDArray[np.int64]:
    """The index of each rating among its user's ratings; 0 for the oldest."""
    return np.arange(len(ratings)) - ratings.offsets[:-1][ratings.owners()]


def sample_known(ratings: Ratings, share: float, order: str, seed: int) -> Mask:
    """Which ratings of each user rebuild its vector: a random share, or the earliest. The rest is predicted."""
    counts = ratings.counts()
    chosen = np.minimum(np.maximum(1, np.round(share * counts)), counts - 1).astype(np.int64)
    place = position(ratings)
    if order == "random":
        for user, (begin, end) in zip(ratings.users, pairwise(ratings.offsets.tolist()), strict=True):
            place[begin:end] = rng(seed, 0, "judged support", user).permutation(end - begin)
    return np.asarray(place < chosen[ratings.owners()])


def all_but_last(ratings: Ratings) -> Mask:
    """All ratings of each user but the latest."""
    return position(ratings) < ratings.counts()[ratings.owners()] - 1
