"""Ratings by user, in compressed sparse rows, and the split of users into training, validation and test."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.catalogues import Catalogue

log = logging.getLogger("mutirao")

CACHE_SIZE = 10_000  # cached users, which bounds the memory

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Ratings:
    """Ratings by user (CSR): user u rated `items[offsets[u]:offsets[u + 1]]` with the `values` there, oldest first.

    `items` are rows of the catalogue, `times` seconds (0: unknown). A user rates an item at most once.

    >>> from mutirao.systems.recsys.ratings import plant
    >>> ratings = plant(users=20, items=50, draw=np.random.default_rng(0))
    >>> len(ratings.users), ratings.of_users(np.array([0, 1])).counts()
    (20, array([25, 25]))
    >>> set(ratings.implicit(threshold=4.0).values.tolist())  # items rated 4 or 5 are taken
    {1.0}
    """

    users: tuple[str, ...]
    catalogue: Catalogue
    offsets: Ints  # users + 1
    items: Rows
    values: Floats
    times: Ints

    def __len__(self) -> int:
        return len(self.items)

    def counts(self) -> Ints:
        """Ratings of each user."""
        return np.diff(self.offsets)

    def owners(self) -> npt.NDArray[np.intp]:
        """The user of each rating."""
        return np.repeat(np.arange(len(self.users)), self.counts())

    def of_users(self, rows: npt.NDArray[np.intp]) -> "Ratings":
        """The ratings of these users alone, in this order; the catalogue keeps all its items."""
        counts = self.counts()[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Positions in the new arrays, shifted to where each user's ratings begin in the old ones.
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts)
        names = tuple(self.users[r] for r in rows.tolist())
        return Ratings(names, self.catalogue, offsets, self.items[at], self.values[at], self.times[at])

    def where(self, keep: npt.NDArray[np.bool_]) -> "Ratings":
        """The ratings in the mask. Users and catalogue stay the same, even those without ratings."""
        kept_before = np.concatenate([[0], np.cumsum(keep)])
        return replace(
            self,
            offsets=kept_before[self.offsets].astype(np.int64),
            items=self.items[keep],
            values=self.values[keep],
            times=self.times[keep],
        )

    def recount(self) -> "Ratings":
        """Set the catalogue's counts from these ratings."""
        counts = np.bincount(self.items, minlength=len(self.catalogue)).astype(np.int64)
        return replace(self, catalogue=replace(self.catalogue, counts=counts))

    def implicit(self, threshold: float = 0.0) -> "Ratings":
        """Implicit feedback: items rated `threshold` or above are taken (1), others are not seen."""
        kept = self.where(self.values >= threshold)
        return replace(kept, values=np.ones_like(kept.values)).recount()

    def with_at_least(self, ratings: int) -> "Ratings":
        """The users with at least this number of ratings. Logs how many are left out."""
        enough = np.flatnonzero(self.counts() >= ratings)
        if (few := len(self.users) - len(enough)) > 0:
            first = next(name for name, n in zip(self.users, self.counts(), strict=True) if n < ratings)
            log.warning("%d users with fewer than %d ratings are left out, the first of them %r", few, ratings, first)
        if not len(enough):
            raise ConfigError(f"no user has {ratings} ratings or more; there is nothing to learn from")
        if few:
            return self.of_users(enough)
        return self


def gather(
    users: npt.NDArray[np.generic],
    items: npt.NDArray[np.generic],
    values: npt.NDArray[np.floating],
    times: Ints,
    known: Catalogue | None = None,
) -> Ratings:
    """Ratings from columns of ids (whole numbers or text). The catalogue holds the items rated, titles from `known`.

    If a user rated an item more than once, the latest rating counts (of equal times, the last in the columns).
    """
    if not len(users):
        raise ConfigError("there are no ratings")
    names, owner = np.unique(users, return_inverse=True)
    ids, row = np.unique(items, return_inverse=True)
    key = owner.astype(np.int64) * len(ids) + row
    # A stable sort: of equal times, the last in the columns stays last, and the last of each pair is kept below.
    order = np.lexsort((times, key))
    ordered = key[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    if (again := len(order) - int(last.sum())) > 0:
        log.warning("%d ratings were replaced by later ones of the same user and item", again)
        order = order[last]
    order = order[np.lexsort((times[order], owner[order]))]  # by user, then time; of one time, by item
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[order], minlength=len(names)))]).astype(np.int64)
    catalogue = catalogue_of([str(i) for i in ids.tolist()], np.bincount(row[order], minlength=len(ids)), known)
    return Ratings(
        users=tuple(str(n) for n in names.tolist()),
        catalogue=catalogue,
        offsets=offsets,
        items=row[order].astype(np.int32),
        values=values[order].astype(np.float32),
        times=times[order],
    )


def catalogue_of(ids: list[str], counts: npt.NDArray[np.integer], known: Catalogue | None) -> Catalogue:
    """A catalogue of these items, with titles, years and genres from `known` where it has them."""
    titles = [""] * len(ids)
    years = np.zeros(len(ids), np.int32)
    genres: list[tuple[str, ...]] = []
    if known is not None:
        at = known.rows()
        missing = [i for i in ids if i not in at]
        if missing:
            log.warning("%d rated items are not in the catalogue, the first of them %r", len(missing), missing[0])
        if known.genres:
            genres_of = dict(zip(known.ids, known.genres, strict=True))
            genres = [genres_of.get(name, ()) for name in ids]
        for row, name in enumerate(ids):
            if name in at:
                titles[row] = known.titles[at[name]]
                years[row] = known.years[at[name]]
    return Catalogue(tuple(ids), tuple(titles), years, counts.astype(np.int64), tuple(genres))


def join(first: Ratings, then: Ratings) -> tuple[Ratings, npt.NDArray[np.bool_]]:
    """Join two parts of the same users' ratings. Also returns a mask of those from the first part."""
    if first.users != then.users:
        raise ValueError("only parts of the same users can be joined")
    owners = np.concatenate([first.owners(), then.owners()])
    order = np.argsort(owners, kind="stable")
    whole = Ratings(
        users=first.users,
        catalogue=first.catalogue,
        offsets=first.offsets + then.offsets,
        items=np.concatenate([first.items, then.items])[order],
        values=np.concatenate([first.values, then.values])[order],
        times=np.concatenate([first.times, then.times])[order],
    )
    return whole, np.repeat([True, False], [len(first), len(then)])[order]


@dataclass(frozen=True)
class Taste:
    """The ratings of one user: the data of a client."""

    items: Rows
    values: Floats

    def __len__(self) -> int:
        return len(self.items)


class Users(Mapping[str, Taste]):
    """A population over one set of ratings: each client is a user, with its items in ascending order.

    >>> from mutirao.systems.recsys.ratings import plant
    >>> users = Users(plant(20, 10, np.random.default_rng(0)))
    >>> len(users) <= 20, bool((np.diff(users[next(iter(users))].items) > 0).all())
    (True, True)
    """

    def __init__(self, ratings: Ratings) -> None:
        order = np.lexsort((ratings.items, ratings.owners()))
        self.ratings = replace(
            ratings, items=ratings.items[order], values=ratings.values[order], times=ratings.times[order]
        )
        self._places = dict(zip(ratings.users, pairwise(ratings.offsets.tolist()), strict=True))
        self._tastes: dict[str, Taste] = {}  # a cache: users are requested again, at least in the same round

    def __len__(self) -> int:
        return len(self.ratings.users)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ratings.users)

    def __getitem__(self, name: str) -> Taste:
        taste = self._tastes.get(name)
        if taste is None:
            if len(self._tastes) >= CACHE_SIZE:
                self._tastes.clear()
            begin, end = self._places[name]
            taste = self._tastes[name] = Taste(self.ratings.items[begin:end], self.ratings.values[begin:end])
        return taste


START = 1_000_000_000  # time of the first rating, in seconds
SPAN = 100_000_000


def plant(users: int, items: int, draw: np.random.Generator, rank: int = 4, noise: float = 0.6) -> Ratings:
    """Ratings 1 to 5 of users and items with biases and `rank` hidden traits each.

    r = 3.6 + b_u + b_i + t_u t_i + N(0, noise), rounded and cut. Popularity decreases as a power of an item's
    rank. Users rate 20 to 200 items, with a preference for items they like.

    >>> ratings = plant(users=20, items=50, draw=np.random.default_rng(0))
    >>> len(ratings.users), sorted(set(ratings.values.tolist()))
    (20, [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    user_bias = draw.normal(0, 0.4, users)
    item_bias = draw.normal(0, 0.5, items)
    user_trait = draw.normal(0, 1, (users, rank))
    item_trait = draw.normal(0, 0.45, (items, rank))
    popularity = np.log1p(np.arange(items)) * -0.8  # log probability of being seen, before tastes
    draw.shuffle(popularity)
    counts = np.minimum(20 + draw.lognormal(3.2, 0.9, users).astype(int), min(200, items // 2))
    owner = []
    row = []
    value = []
    time = []
    for u, count in enumerate(counts.tolist()):
        liking = user_bias[u] + item_bias + item_trait @ user_trait[u]
        chance = popularity + 0.5 * liking + draw.gumbel(size=items)
        mine = np.argpartition(-chance, count)[:count]
        owner.append(np.full(count, u))
        row.append(mine)
        value.append(np.clip(np.rint(3.6 + liking[mine] + draw.normal(0, noise, count)), 1, 5))
        time.append(START + np.sort(draw.integers(0, SPAN, count)))
    known = Catalogue(
        ids=tuple(str(i) for i in range(items)),
        titles=tuple(f"Item {i}" for i in range(items)),
        years=np.zeros(items, np.int32),
        counts=np.zeros(items, np.int64),
    )
    return gather(
        users=np.concatenate(owner).astype(np.int64),
        items=np.concatenate(row).astype(np.int64),
        values=np.concatenate(value),
        times=np.concatenate(time),
        known=known,
    )


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
    # At least one rating is known and one is left to predict, whatever the share.
    chosen = np.minimum(np.maximum(1, np.round(share * counts)), counts - 1).astype(np.int64)
    place = position(ratings)
    if order == "random":
        for user, (begin, end) in zip(ratings.users, pairwise(ratings.offsets.tolist()), strict=True):
            place[begin:end] = rng(seed, 0, "judged support", user).permutation(end - begin)
    return np.asarray(place < chosen[ratings.owners()])


def all_but_last(ratings: Ratings) -> Mask:
    """All ratings of each user but the latest."""
    return position(ratings) < ratings.counts()[ratings.owners()] - 1
