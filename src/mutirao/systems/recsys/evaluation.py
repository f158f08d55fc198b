"""How good recommendations are: errors of ratings, ranks of items, and how much an attack read of a user.

`Evaluator` rebuilds users' vectors from what is known of them and predicts the rest. `HeldOut` is the field's
leave-one-out protocol: one item of each user is kept from training and ranked among all items, and among a few drawn.
He, Liao, Zhang, Nie, Hu and Chua, 2017 (NCF); Zhang, Long, Zhou, Yan, Zhang, Zhang and Yang, 2023 (PFedRec).
`Exposure` counts what a server states rightly of a user, beside what it would have guessed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.clustering.late_joiners import place_clients
from mutirao.clustering.membership import Groups
from mutirao.clustering.signature_handler import WARM, SignatureHandler
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply, Request, Site
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.local_training import Batch, Local, batch_of
from mutirao.systems.recsys.ratings import Ratings, Taste
from mutirao.systems.recsys.user_split import Parts

CUTS = (5, 10, 20)
CUT = 10  # of `Evaluator`
SAMPLED = "sampled_"  # prefix of metrics among the candidates drawn
# Work is done in parts of this size, so that memory does not grow with the number of users.
SCORES_AT_ONCE = 2**20
RATINGS_AT_ONCE = 250_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.floating]


# Ranks


def sample_negatives(taken: npt.ArrayLike, items: int, count: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` different rows of `items`, drawn evenly from those that are not among the `taken`.

    >>> sorted(sample_negatives([0, 2, 3], 6, 3, np.random.default_rng(0)).tolist())
    [1, 4, 5]
    """
    known = np.unique(np.asarray(taken, np.int64))
    if count > items - len(known):
        raise ValueError(f"{count} items cannot be drawn: of {items}, only {items - len(known)} are not taken")
    places = draw.choice(items - len(known), count, replace=False)  # among the rows that are left
    return np.asarray(places + np.searchsorted(known - np.arange(len(known)), places, side="right"), np.int64)


def rank_among(target_score: npt.ArrayLike, other_scores: npt.ArrayLike) -> Ints:
    """The rank, from 1, of a score among others along the last axis: ties count against it, and so does NaN.

    >>> int(rank_among(0.5, [0.9, 0.5, 0.1]))
    3
    """
    target = np.asarray(target_score)
    return np.asarray(1 + np.count_nonzero(~(np.asarray(other_scores) < target[..., None]), axis=-1))


def summarise_ranks(ranks: npt.ArrayLike, cuts: Iterable[int] = CUTS) -> dict[str, float]:
    """Means over users whose one item has rank r (from 1), with 0 for r > k.

    hr@k 1, ndcg@k 1 / log2(r + 1), mrr@k 1 / r. There is one item to find, so recall@k is the same as hr@k.

    >>> summarise_ranks([1, 3, 40], cuts=[10])
    {'hr@10': 0.666..., 'ndcg@10': 0.5, 'mrr@10': 0.444..., 'recall@10': 0.666...}
    """
    r = np.asarray(ranks, np.float64)
    if not r.size:
        raise ValueError("there are no ranks to summarise")
    found = {}
    for k in cuts:
        hit = r <= k
        found[f"hr@{k}"] = float(hit.mean())
        found[f"ndcg@{k}"] = float(np.where(hit, 1 / np.log2(r + 1), 0).mean())
        found[f"mrr@{k}"] = float(np.where(hit, 1 / r, 0).mean())
        found[f"recall@{k}"] = found[f"hr@{k}"]
    return found


def coverage(top: npt.ArrayLike, items: int, cuts: Iterable[int] = CUTS) -> dict[str, float]:
    """The share of `items` that are in anybody's first k, from everybody's first items in order, a row a user.

    >>> coverage([[0, 1], [0, 2]], items=4, cuts=[1, 2])
    {'coverage@1': 0.25, 'coverage@2': 0.75}
    """
    first = np.asarray(top)
    return {f"coverage@{k}": len(np.unique(first[:, :k])) / items for k in cuts}


def top_rows(scores: Scores, count: int) -> npt.NDArray[np.intp]:
    """The `count` highest of each row, highest first; of equal ones the lower number comes first."""
    count = min(count, scores.shape[1])
    some = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


# FedRecon on ratings that are not known


class Evaluator:
    """Evaluates on the ratings that are not `known`: RMSE and MAE, or, for implicit feedback, HR@10 and nDCG@10.

    Predictions are cut to the scale of the ratings. Implicit: the items not known rank among all items the user has
    not taken; a user with one of them in the first ten is a hit.
    """

    def __init__(self, method: FedRecon, ratings: Ratings, known: Mask, seed: int) -> None:
        if known.all():
            raise ConfigError("the users to evaluate on have too few ratings: nothing is left to predict")
        self.method = method
        self.ratings = ratings
        self.known = known
        self.metrics = (f"hr@{CUT}", f"ndcg@{CUT}") if method.implicit else ("rmse", "mae")
        self._batches = [(users, unseen_batch(method, ratings, known, users, seed)) for users in self._parts()]

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""
        measure = self._ranks if self.method.implicit else self._errors
        parts = []
        for users, batch in self._batches:
            batch.table = arrays[ITEMS]
            self.method.work(batch, epochs=0)
            parts.append(measure(users, batch))
        found = np.concatenate(parts)
        if self.method.implicit:
            return {f"hr@{CUT}": float((found[:, 0] <= CUT).mean()), f"ndcg@{CUT}": float(found[:, 1].mean())}
        return {"rmse": float(np.sqrt(np.mean(found**2))), "mae": float(np.abs(found).mean())}

    def _parts(self) -> Iterator[slice]:
        """Users that are worked on at a time."""
        cost = self.ratings.counts()
        if self.method.implicit:
            cost = np.full(len(cost), self.method.items)
        turn = np.cumsum(cost) // RATINGS_AT_ONCE
        edges = np.flatnonzero(np.diff(turn, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(cost)], strict=True):
            yield slice(int(begin), int(end))

    def _errors(self, users: slice, batch: Batch) -> Floats:
        low, high = self.method.levels[0], self.method.levels[-1]
        guesses = np.clip(batch.predictions.astype(np.float64) + self.method.centre, low, high)
        return guesses - (batch.y[batch.query].astype(np.float64) + self.method.centre)

    def _ranks(self, users: slice, batch: Batch) -> Floats:
        """Rank of the best item not known, and the user's nDCG, a row a user."""
        scores = score_items(self.method, batch)
        owners = self.ratings.owners()
        mine = (owners >= users.start) & (owners < users.stop)
        user, item, known = owners[mine] - users.start, self.ratings.items[mine], self.known[mine]
        scores[user[known], item[known]] = -np.inf
        user, item = user[~known], item[~known]
        theirs = scores[user, item]
        ranks = np.array([(scores[u] >= s).sum() for u, s in zip(user.tolist(), theirs, strict=True)])
        gains = np.bincount(user, np.where(ranks <= CUT, 1 / np.log2(ranks + 1.0), 0.0), len(batch))
        ideal = np.cumsum(1 / np.log2(np.arange(2, CUT + 2)))
        wanted = np.bincount(user, minlength=len(batch))
        best = np.full(len(batch), np.inf)
        np.minimum.at(best, user, ranks)
        return np.stack([best, gains / ideal[np.minimum(np.maximum(wanted, 1), CUT) - 1]], 1)[wanted > 0]


def unseen_batch(method: FedRecon, ratings: Ratings, known: Mask, users: slice, seed: int) -> Batch:
    """The work of rebuilding these users from what is `known`, without item vectors, which come with each model."""
    ends = ratings.offsets.tolist()
    works = []
    for user in range(users.start, users.stop):
        mine = slice(ends[user], ends[user + 1])
        items, values, support = ratings.items[mine], ratings.values[mine], known[mine]
        if method.implicit:
            chance = derive_seed(seed, 0, "others judged", ratings.users[user])
            works.append(method.known(Taste(items[support], values[support]), chance))
        else:
            works.append(Local(items, values, support=support))
    empty = np.zeros((0, method.dimension), np.float32)
    return batch_of(method.drawn(works), empty, method.centre, method.compiled)


def score_items(method: FedRecon, batch: Batch) -> npt.NDArray[np.float32]:
    """Scores of all items for the users of a batch whose vectors were rebuilt, a row a user."""
    vectors = batch.vectors.copy()
    vectors[:, : int(method.biases)] = 1  # a user's own bias changes no rank
    return np.asarray(vectors @ batch.table.T)


# One item of each user held out


@dataclass(frozen=True)
class HeldOut:
    """Every user's `targets`, the `candidates` they rank among when some are drawn, and what is `hidden` from the rest.

    Whoever has scores can be evaluated: `held_out(score)`, where `score(users)` gives new scores, a row for each user
    of the slice and a column an item. Metrics with the prefix `sampled_` are among the candidates, the others among all
    items that are not hidden. Ties count against the target.
    """

    users: tuple[str, ...]
    items: int
    targets: npt.NDArray[np.int64]  # an item a user
    candidates: npt.NDArray[np.int64]  # users x items drawn
    owners: npt.NDArray[np.intp]  # of what is hidden, in rising order
    hidden: npt.NDArray[np.int32]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all that is measured."""
        found = tuple(summarise_ranks([1]))
        sampled = tuple(SAMPLED + name for name in found) if self.candidates.shape[1] else ()
        return (*found, *(f"coverage@{k}" for k in CUTS), *sampled)

    @property
    def parts(self) -> list[slice]:
        """The users in slices that are evaluated at a time."""
        step = max(1, SCORES_AT_ONCE // self.items)
        return [slice(at, min(at + step, len(self.users))) for at in range(0, len(self.users), step)]

    def __call__(self, score: Callable[[slice], Scores]) -> dict[str, float]:
        """The metrics of these scores."""
        ranks, sampled, tops = [], [], []
        for users in self.parts:
            scores = score(users)
            theirs = scores[np.arange(len(scores)), self.targets[users]]
            sampled.append(rank_among(theirs, np.take_along_axis(scores, self.candidates[users], axis=1)))
            begin, end = np.searchsorted(self.owners, [users.start, users.stop])
            scores[self.owners[begin:end] - users.start, self.hidden[begin:end]] = -np.inf
            ranks.append(rank_among(theirs, scores) - 1)  # it ties with itself
            tops.append(top_rows(scores, CUTS[-1]))
        found = summarise_ranks(np.concatenate(ranks)) | coverage(np.concatenate(tops), self.items)
        if self.candidates.shape[1]:
            among = summarise_ranks(np.concatenate(sampled))
            found |= {SAMPLED + name: value for name, value in among.items()}
        return found


def hold_out(parts: Parts, part: Literal["vali", "test"], candidates: int, seed: int) -> HeldOut:
    """What is sought after `leave_one_out`: each user's item of the validation, or of the test.

    Hidden is what the user took before it. Candidates are drawn among the items the user never took, now or later.
    """
    train, vali, test = parts
    sought = vali if part == "vali" else test
    before = [train] if part == "vali" else [train, vali]
    owners = np.concatenate([p.owners() for p in before])
    hidden = np.concatenate([p.items for p in before])
    order = np.argsort(owners, kind="stable")
    items = len(train.catalogue)
    drawn = np.zeros((len(train.users), candidates), np.int64)
    for user, name in enumerate(train.users if candidates else ()):
        taken = np.concatenate([p.items[p.offsets[user] : p.offsets[user + 1]] for p in parts])
        try:
            drawn[user] = sample_negatives(taken, items, candidates, rng(seed, 0, f"candidates {part}", name))
        except ValueError as error:
            raise ConfigError(f"candidates: user {name!r}: {error}; draw fewer") from None
    return HeldOut(train.users, items, sought.items.astype(np.int64), drawn, owners[order], hidden[order])


class HeldOutEvaluator:
    """Evaluates an item matrix on what was held out: every user's vector is rebuilt from all that is `known` of it."""

    def __init__(self, method: FedRecon, known: Ratings, held_out: HeldOut, seed: int) -> None:
        self.method = method
        self.held_out = held_out
        self.metrics = held_out.metrics
        everything = np.ones(len(known), np.bool_)
        self._batches = {users.start: unseen_batch(method, known, everything, users, seed) for users in held_out.parts}

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""

        def score(users: slice) -> Scores:
            batch = self._batches[users.start]
            batch.table = arrays[ITEMS]
            self.method.work(batch, epochs=0)
            return score_items(self.method, batch)

        return self.held_out(score)


class UserEvaluation(NamedTuple):
    """What users evaluate the model on by themselves, and the metrics they report."""

    sought: Ratings
    held_out: HeldOut | None
    metrics: tuple[str, ...]


Figures = dict[str, float]
Evaluate = Callable[[Arrays], Mapping[str, float]]
BY_RATINGS = ("rmse", "mae")  # metrics of which every rating counts the same; of others every user does


@dataclass(frozen=True)
class Part:
    """The evaluation on a group's users, and how many ratings and users it counts."""

    evaluate: Evaluate
    ratings: int
    users: int


@dataclass
class GroupEvaluator:
    """Evaluates the models of groups; `make(ratings, known)` is the evaluation on these users alone."""

    make: Callable[[Ratings, Mask], Evaluate]
    test: Ratings
    known: Mask
    sign: Callable[[dict[ClientId, Taste]], Mapping[ClientId, npt.NDArray[np.float64]]]
    _found: dict[bytes, dict[str, Part]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, models: Mapping[str, Arrays], groups: Groups) -> tuple[Figures, dict[str, Figures]]:
        """The figures of all users together, and of each group's."""
        parts = self.parts(groups)
        found = {g: dict(parts[g].evaluate(arrays)) for g, arrays in models.items() if g in parts}
        together: Figures = {}
        for name in dict.fromkeys(name for figures in found.values() for name in figures):
            power = 2 if name == "rmse" else 1
            sizes = {g: parts[g].ratings if name in BY_RATINGS else parts[g].users for g in found if name in found[g]}
            total = sum(n * found[g][name] ** power for g, n in sizes.items())
            together[name] = (total / sum(sizes.values())) ** (1 / power)
        return together, found

    def parts(self, groups: Groups) -> dict[str, Part]:
        """The evaluation on each group's users, made once."""
        key = groups.labels.tobytes() + repr(sorted(groups.admitted.items())).encode()
        if key not in self._found:
            owners, home = self.test.owners(), self.homes(groups)
            table = {}
            for name in groups.names:
                rows = np.flatnonzero([home[user] == name for user in self.test.users])
                mine = np.isin(owners, rows)
                unknown = mine & ~self.known
                if unknown.any():
                    evaluate = self.make(self.test.of_users(rows), self.known[mine])
                    table[name] = Part(evaluate, int(unknown.sum()), len(np.unique(owners[unknown])))
            self._found = {key: table}
        return self._found[key]

    def homes(self, groups: Groups) -> dict[ClientId, str]:
        """The group of each user: its own, or the one its signature is nearest to, or else the largest."""
        members = groups.members()
        largest = max(members, key=lambda g: (len(members[g]), g))
        home = {user: groups.group_of(user) or largest for user in self.test.users}
        strangers = [user for user in self.test.users if user not in groups.labelled]
        if strangers and groups.signatures.shape[1]:
            rows = dict(zip(self.test.users, range(len(self.test.users)), strict=True))
            signed = self.sign({user: self.taste(rows[user]) for user in strangers})
            names = sorted(signed)
            if names:
                placed = place_clients(groups, np.stack([signed[user] for user in names]))
                home |= {u: groups.names[g] for u, g in zip(names, placed.label.tolist(), strict=True)}
        return home

    def taste(self, row: int) -> Taste:
        """What is known of a user."""
        mine = slice(int(self.test.offsets[row]), int(self.test.offsets[row + 1]))
        known = self.known[mine]
        return Taste(self.test.items[mine][known], self.test.values[mine][known])


def sign_all(
    signing: SignatureHandler, first: Arrays, seed: int, tastes: Mapping[ClientId, Taste]
) -> dict[ClientId, npt.NDArray[np.float64]]:
    """The signatures of users who warm up here; who cannot, for want of ratings, has none."""
    request = Request(WARM, first, {"seed": seed, "round": 0})
    many = signing.many
    assert many is not None
    answers = many(dict.fromkeys(tastes, request), {c: Site(c, taste) for c, taste in tastes.items()})
    return {c: r.extras["signature"].astype(np.float64) for c, r in answers.items() if isinstance(r, Reply)}
