"""Evaluation of recommendations: errors of ratings and ranks of items.

`Evaluator` rebuilds users' vectors from their known ratings and predicts the others. `HeldOut` is leave-one-out: one
item of each user is held out of training and ranked among all items, and among a few sampled ones. He, Liao, Zhang,
Nie, Hu and Chua, 2017 (NCF); Zhang, Long, Zhou, Yan, Zhang, Zhang and Yang, 2023 (PFedRec). `GroupEvaluator` evaluates
every user with the item matrix of its own group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.clustering.formation import place_clients
from mutirao.clustering.group_state import Groups
from mutirao.clustering.signature_handler import WARM, SignatureHandler
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply, Request, Site
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.local_training import Batch, UserExamples, make_batch
from mutirao.systems.recsys.ratings import Parts, Ratings, Taste

CUTS = (5, 10, 20)
CUT = 10  # of `Evaluator`
SAMPLED = "sampled_"  # prefix of metrics among the sampled candidates
PER_RATING = ("rmse", "mae")  # metrics averaged over ratings; others are averaged over users
# Users are evaluated in parts of these sizes, so that memory does not grow with their number.
SCORES_AT_ONCE = 2**20
RATINGS_AT_ONCE = 250_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.floating]
Metrics = dict[str, float]
Evaluate = Callable[[Arrays], Mapping[str, float]]


# Ranks


def sample_negatives(taken: npt.ArrayLike, items: int, count: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` different items, sampled uniformly from those that are not `taken`.

    >>> sorted(sample_negatives([0, 2, 3], 6, 3, np.random.default_rng(0)).tolist())
    [1, 4, 5]
    """
    known = np.unique(np.asarray(taken, np.int64))
    if count > items - len(known):
        raise ValueError(f"{count} items cannot be sampled: of {items}, only {items - len(known)} are not taken")
    # Places are numbers among the items that are not taken. known[k] - k of these come before the k-th taken item:
    # a place moves up by one for each taken item for which that number is at most the place.
    places = draw.choice(items - len(known), count, replace=False)
    return np.asarray(places + np.searchsorted(known - np.arange(len(known)), places, side="right"), np.int64)


def rank_among(target_score: npt.ArrayLike, other_scores: npt.ArrayLike) -> Ints:
    """The rank, from 1, of a score among others along the last axis. Ties and NaN count against it.

    >>> int(rank_among(0.5, [0.9, 0.5, 0.1]))
    3
    """
    target = np.asarray(target_score)
    # Not `others >= target`, which is false for NaN and would rank a diverged model first.
    return np.asarray(1 + np.count_nonzero(~(np.asarray(other_scores) < target[..., None]), axis=-1))


def summarise_ranks(ranks: npt.ArrayLike, cuts: Iterable[int] = CUTS) -> dict[str, float]:
    """Means over users, each with a single target of rank r (from 1), with 0 for r > k.

    hr@k 1, ndcg@k 1 / log2(r + 1), mrr@k 1 / r. With a single target, recall@k equals hr@k.

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
    """The share of `items` in the first k of at least one user. `top` has the first items of each user, in order.

    >>> coverage([[0, 1], [0, 2]], items=4, cuts=[1, 2])
    {'coverage@1': 0.25, 'coverage@2': 0.75}
    """
    first = np.asarray(top)
    return {f"coverage@{k}": len(np.unique(first[:, :k])) / items for k in cuts}


def top_rows(scores: Scores, count: int) -> npt.NDArray[np.intp]:
    """The columns with the `count` highest scores of each row, highest first; of equal ones the lower column first."""
    count = min(count, scores.shape[1])
    # The candidates are put in order of their columns first, and a stable sort keeps this order among equal scores.
    some = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


# FedRecon, on ratings that are not known


class Evaluator:
    """Evaluates on the ratings that are not `known`: RMSE and MAE, or, for implicit feedback, HR@10 and nDCG@10.

    Predictions are clipped to the rating scale. For implicit feedback, the items that are not known are ranked among
    all items that are not known to be taken; a user with one of them in the first ten is a hit.
    """

    def __init__(self, method: FedRecon, ratings: Ratings, known: Mask, seed: int) -> None:
        if known.all():
            raise ConfigError("the users to evaluate on have too few ratings: nothing is left to predict")
        self.method = method
        self.ratings = ratings
        self.known = known
        self.metrics = (f"hr@{CUT}", f"ndcg@{CUT}") if method.implicit else ("rmse", "mae")
        self._batches = [(users, known_batch(method, ratings, known, users, seed)) for users in self._parts()]

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""
        measure = self._ranks if self.method.implicit else self._errors
        parts = []
        for users, batch in self._batches:
            batch.table = arrays[ITEMS]
            self.method.train(batch, epochs=0)
            parts.append(measure(users, batch))
        values = np.concatenate(parts)
        if self.method.implicit:
            return {f"hr@{CUT}": float((values[:, 0] <= CUT).mean()), f"ndcg@{CUT}": float(values[:, 1].mean())}
        return {"rmse": float(np.sqrt(np.mean(values**2))), "mae": float(np.abs(values).mean())}

    def _parts(self) -> Iterator[slice]:
        """Users that are evaluated at a time."""
        cost = self.ratings.counts()
        if self.method.implicit:
            cost = np.full(len(cost), self.method.items)
        part = np.cumsum(cost) // RATINGS_AT_ONCE
        edges = np.flatnonzero(np.diff(part, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(cost)], strict=True):
            yield slice(int(begin), int(end))

    def _errors(self, users: slice, batch: Batch) -> Floats:
        levels = self.method.levels
        predictions = np.clip(batch.predictions.astype(np.float64) + self.method.centre, levels[0], levels[-1])
        return predictions - (batch.y[batch.query].astype(np.float64) + self.method.centre)

    def _ranks(self, users: slice, batch: Batch) -> Floats:
        """For each user, the rank of its best item that is not known, and its nDCG."""
        scores = score_items(self.method, batch)
        owners = self.ratings.owners()
        in_part = (owners >= users.start) & (owners < users.stop)
        user = owners[in_part] - users.start
        item = self.ratings.items[in_part]
        known = self.known[in_part]
        scores[user[known], item[known]] = -np.inf
        user = user[~known]
        target_scores = scores[user, item[~known]]
        # Not `scores >= s`, which is false for NaN and would rank the items of a diverged model first.
        ranks = np.array([(~(scores[u] < s)).sum() for u, s in zip(user.tolist(), target_scores, strict=True)])
        gains = np.bincount(user, np.where(ranks <= CUT, 1 / np.log2(ranks + 1.0), 0.0), len(batch))
        ideal = np.cumsum(1 / np.log2(np.arange(2, CUT + 2)))
        targets = np.bincount(user, minlength=len(batch))
        best = np.full(len(batch), np.inf)
        np.minimum.at(best, user, ranks)
        ndcg = gains / ideal[np.minimum(np.maximum(targets, 1), CUT) - 1]
        return np.stack([best, ndcg], 1)[targets > 0]


def known_batch(method: FedRecon, ratings: Ratings, known: Mask, users: slice, seed: int) -> Batch:
    """A batch that rebuilds these users from their `known` ratings. Its table is set for each model."""
    ends = ratings.offsets.tolist()
    examples = []
    for user in range(users.start, users.stop):
        of_user = slice(ends[user], ends[user + 1])
        items = ratings.items[of_user]
        values = ratings.values[of_user]
        support = known[of_user]
        if method.implicit:
            user_seed = derive_seed(seed, 0, "others judged", ratings.users[user])
            examples.append(method.all_support(Taste(items[support], values[support]), user_seed))
        else:
            examples.append(UserExamples(items, values, support=support))
    empty = np.zeros((0, method.dimension), np.float32)
    return make_batch(method.with_negatives(examples), empty, method.centre, method.compiled)


def score_items(method: FedRecon, batch: Batch) -> npt.NDArray[np.float32]:
    """Scores of all items for the users of a batch, from their rebuilt vectors: one row for each user."""
    vectors = batch.vectors.copy()
    vectors[:, : int(method.biases)] = 1  # the user's own bias changes no ranking
    return np.asarray(vectors @ batch.table.T)


# Leave-one-out


@dataclass(frozen=True)
class HeldOut:
    """Each user's `targets`, the sampled `candidates` among which they are ranked, and items `hidden` from the ranking.

    Call it with `score(users)`, which returns a new array of scores, a row for each user of the slice and a column for
    each item. Metrics with the prefix `sampled_` are among the candidates, the others among all items that are not
    hidden. Ties count against the target.
    """

    users: tuple[str, ...]
    items: int
    targets: npt.NDArray[np.int64]  # one item for each user
    candidates: npt.NDArray[np.int64]  # users x sampled items
    owners: npt.NDArray[np.intp]  # the user of each hidden item, in ascending order
    hidden: npt.NDArray[np.int32]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics."""
        found = tuple(summarise_ranks([1]))
        names = (*found, *(f"coverage@{k}" for k in CUTS))
        if self.candidates.shape[1]:
            names += tuple(SAMPLED + name for name in found)
        return names

    @property
    def parts(self) -> list[slice]:
        """Slices of users that are evaluated at a time."""
        step = max(1, SCORES_AT_ONCE // self.items)
        return [slice(at, min(at + step, len(self.users))) for at in range(0, len(self.users), step)]

    def __call__(self, score: Callable[[slice], Scores]) -> dict[str, float]:
        """The metrics of these scores."""
        ranks = []
        sampled = []
        tops = []
        for users in self.parts:
            scores = score(users)
            target_scores = scores[np.arange(len(scores)), self.targets[users]]
            sampled.append(rank_among(target_scores, np.take_along_axis(scores, self.candidates[users], axis=1)))
            begin, end = np.searchsorted(self.owners, [users.start, users.stop])
            scores[self.owners[begin:end] - users.start, self.hidden[begin:end]] = -np.inf
            # The target is among the items and ties with itself.
            ranks.append(rank_among(target_scores, scores) - 1)
            tops.append(top_rows(scores, CUTS[-1]))
        found = summarise_ranks(np.concatenate(ranks)) | coverage(np.concatenate(tops), self.items)
        if self.candidates.shape[1]:
            among = summarise_ranks(np.concatenate(sampled))
            found |= {SAMPLED + name: value for name, value in among.items()}
        return found


def hold_out(parts: Parts, part: Literal["vali", "test"], candidates: int, seed: int) -> HeldOut:
    """The held-out items of `leave_one_out`: each user's item of the validation or the test part.

    Items that the user took before are hidden. Candidates are sampled from the items that the user never took.
    """
    train, vali, test = parts
    if part == "vali":
        targets = vali
        before = [train]
    else:
        targets = test
        # The validation item is older than the test item, so it is taken by then.
        before = [train, vali]
    owners = np.concatenate([p.owners() for p in before])
    hidden = np.concatenate([p.items for p in before])
    order = np.argsort(owners, kind="stable")
    items = len(train.catalogue)
    sampled = np.zeros((len(train.users), candidates), np.int64)
    for user, name in enumerate(train.users if candidates else ()):
        # Also items of later parts: a candidate that the user takes in the end is no negative.
        taken = np.concatenate([p.items[p.offsets[user] : p.offsets[user + 1]] for p in parts])
        try:
            sampled[user] = sample_negatives(taken, items, candidates, rng(seed, 0, f"candidates {part}", name))
        except ValueError as error:
            raise ConfigError(f"candidates: user {name!r}: {error}; use fewer candidates") from None
    return HeldOut(train.users, items, targets.items.astype(np.int64), sampled, owners[order], hidden[order])


class HeldOutEvaluator:
    """Evaluates an item matrix on held-out items. Users' vectors are rebuilt from all their `known` ratings."""

    def __init__(self, method: FedRecon, known: Ratings, held_out: HeldOut, seed: int) -> None:
        self.method = method
        self.held_out = held_out
        self.metrics = held_out.metrics
        everything = np.ones(len(known), np.bool_)
        self._batches = {part.start: known_batch(method, known, everything, part, seed) for part in held_out.parts}

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""

        def score(users: slice) -> Scores:
            batch = self._batches[users.start]
            batch.table = arrays[ITEMS]
            self.method.train(batch, epochs=0)
            return score_items(self.method, batch)

        return self.held_out(score)


class UserEvaluation(NamedTuple):
    """The data on which clients evaluate the model themselves, and the metrics that they report."""

    targets: Ratings
    held_out: HeldOut | None
    metrics: tuple[str, ...]


# Groups


@dataclass(frozen=True)
class GroupPart:
    """The evaluation on a group's users, and the numbers of ratings and users for averages."""

    evaluate: Evaluate
    ratings: int
    users: int

    def size(self, metric: str) -> int:
        """The number of values that a metric averages: ratings for errors, otherwise users."""
        if metric in PER_RATING:
            return self.ratings
        return self.users


@dataclass
class GroupEvaluator:
    """Evaluates the models of groups. `make(ratings, known)` makes the evaluation on these users alone.

    Users without a group, which were not in training (`split=users`), sign as late joiners do, with their known
    ratings, and get the model of the nearest group.
    """

    make: Callable[[Ratings, Mask], Evaluate]
    test: Ratings
    known: Mask
    sign: Callable[[dict[ClientId, Taste]], Mapping[ClientId, Floats]]
    _cache: dict[bytes, dict[str, GroupPart]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, models: Mapping[str, Arrays], groups: Groups) -> tuple[Metrics, dict[str, Metrics]]:
        """The metrics of all users together, and of each group."""
        parts = self.parts(groups)
        of_groups = {g: dict(parts[g].evaluate(arrays)) for g, arrays in models.items() if g in parts}
        names: dict[str, None] = {}  # ordered
        for metrics in of_groups.values():
            names.update(dict.fromkeys(metrics))
        overall: Metrics = {}
        for name in names:
            # The RMSE over all groups is the root of the mean square, not the mean of their RMSEs.
            power = 2 if name == "rmse" else 1
            total = 0.0
            count = 0
            for group, metrics in of_groups.items():
                if name in metrics:
                    size = parts[group].size(name)
                    total += size * metrics[name] ** power
                    count += size
            overall[name] = (total / count) ** (1 / power)
        return overall, of_groups

    def parts(self, groups: Groups) -> dict[str, GroupPart]:
        """The evaluation on each group's users, made once for each grouping."""
        key = groups.labels.tobytes() + repr(sorted(groups.admitted.items())).encode()
        if key not in self._cache:
            owners = self.test.owners()
            nearest = self.assign_users(groups)
            parts = {}
            for name in groups.names:
                rows = np.flatnonzero([nearest[user] == name for user in self.test.users])
                in_group = np.isin(owners, rows)
                # A group of users without a rating to predict is not evaluated: `make` would refuse it.
                unknown = in_group & ~self.known
                if unknown.any():
                    evaluate = self.make(self.test.of_users(rows), self.known[in_group])
                    parts[name] = GroupPart(evaluate, int(unknown.sum()), len(np.unique(owners[unknown])))
            self._cache = {key: parts}
        return self._cache[key]

    def assign_users(self, groups: Groups) -> dict[ClientId, str]:
        """The group of each user: its own, or the nearest to its signature, or the largest."""
        members = groups.members()
        largest = max(members, key=lambda g: (len(members[g]), g))
        assigned = {user: groups.group_of(user) or largest for user in self.test.users}
        unassigned = [user for user in self.test.users if user not in groups.labelled]
        if unassigned and groups.signatures.shape[1]:
            rows = dict(zip(self.test.users, range(len(self.test.users)), strict=True))
            signatures = self.sign({user: self.known_taste(rows[user]) for user in unassigned})
            names = sorted(signatures)
            if names:
                placed = place_clients(groups, np.stack([signatures[user] for user in names]))
                assigned |= {u: groups.names[g] for u, g in zip(names, placed.label.tolist(), strict=True)}
        return assigned

    def known_taste(self, row: int) -> Taste:
        """The known ratings of a user."""
        of_user = slice(int(self.test.offsets[row]), int(self.test.offsets[row + 1]))
        known = self.known[of_user]
        return Taste(self.test.items[of_user][known], self.test.values[of_user][known])


def sign_users(
    signing: SignatureHandler, initial: Arrays, seed: int, tastes: Mapping[ClientId, Taste]
) -> dict[ClientId, Floats]:
    """The signatures of users after a warm-up; users with too few ratings have none."""
    request = Request(WARM, initial, {"seed": seed, "round": 0})
    many = signing.many
    assert many is not None
    answers = many(dict.fromkeys(tastes, request), {c: Site(c, taste) for c, taste in tastes.items()})
    return {c: r.extras["signature"].astype(np.float64) for c, r in answers.items() if isinstance(r, Reply)}
