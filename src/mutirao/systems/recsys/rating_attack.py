"""Read a user's items, vector and ratings from its update.

After a step at rate lr the row of an item of the query has moved by d_i = lr w e_i s, with the error e_i = y_i - p_i
and s = dp/dx, the user's vector (with biases (1, v), otherwise v). All rows are multiples of one vector: the first
singular vector gives s up to its length, which the bias 1 fixes. The length of a row gives e_i, and p_i + e_i is the
rating. The user's bias in p_i, the length of v without biases, and the clipping factor are one number each: the attack
takes the values with which all ratings fall on the rating scale. Several epochs, weight decay and a proximal term are
linear maps given by the settings, and are undone first.

In the sum of many updates, a rare item is touched by a single user of the round, and its row is lr e_i s of that user.
Rows in the same direction belong together and are read as the update of one user. The sum does not say which user.

`Exposure` compares what was read with what could have been guessed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.ratings import Ratings

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int32]
GRID = 500  # values tried of an unknown number
LENGTHS = (0.02, 50.0)  # range of the length of a user's vector, without biases
MIN_CLIP_FACTOR = 0.02
MAX_MISFIT = 0.05  # root mean square distance from the scale of a reading that is right
MIN_MOVE = 1e-6  # rows that moved by less, as a share of the largest move, did not move
EM_STEPS = 10
ANCHORS = 4  # ratings from which biases are tried
SAME_DIRECTION = 3e-3  # sine of the angle between two rows of a sum below which they belong to one user
MIN_ROWS = 3  # of a user in a sum: two fall on the scale by chance
SMOOTHING = 5.0  # ratings of the average item that are added to those of each item


@dataclass(frozen=True)
class Reading:
    """Rows that moved, their ratings (1 and 0 for implicit feedback), and the direction of the moves."""

    rows: Rows
    values: Floats
    vector: Floats
    misfit: float  # root mean square distance from the scale: near 0, the reading is certain
    support: Rows | None = None  # items of the support set, if these could be read
    support_values: Floats | None = None
    strength: Floats | None = None  # under noise: how far each row moved, in standard deviations of the noise

    @property
    def is_sure(self) -> bool:
        """Whether the ratings fall on the scale, which hardly happens by chance."""
        return self.misfit < MAX_MISFIT

    def ratings(self) -> dict[int, float]:
        """The ratings that were read, by item."""
        ratings = dict(zip(self.rows.tolist(), self.values.tolist(), strict=True))
        if self.support is not None and self.support_values is not None:
            ratings |= dict(zip(self.support.tolist(), self.support_values.tolist(), strict=True))
        return ratings


@dataclass(frozen=True)
class Attacker:
    """A server that follows the protocol and reads replies. Given are all settings and the model that it sent.

    `clip` is the norm to which users clip their updates (0: they do not). `noise` is the standard deviation of the
    noise that they add. `prior` is how often people give each rating, overall or for each item. `popularity` is the
    share of people who rate each item.

    >>> from mutirao.systems.recsys.fedrecon import FedRecon
    >>> weights, targets = Attacker(FedRecon(100, dimension=8)).hypotheses
    >>> len(targets)  # the ratings that it looks for in an update
    5
    """

    method: FedRecon
    mu: float = 0.0
    clip: float = 0.0
    noise: float = 0.0
    prior: Floats | None = None
    popularity: Floats | None = None

    def __call__(self, sent: Arrays, reply: Arrays, requested: Rows | None = None) -> Reading:
        """Read a reply to `sent`, the whole item matrix. `requested` are the rows that the user asked for, if any."""
        x = sent[ITEMS].astype(np.float64)
        moved = reply[ITEMS].astype(np.float64)
        rows = reply.get(ITEM_ROWS)
        if rows is None:
            lengths = np.linalg.norm(moved - x, axis=1)
            rows = np.flatnonzero(lengths > MIN_MOVE * lengths.max()).astype(np.int32)
            moved = moved[rows]
        x0 = x[rows]
        shift = moved - self.decay_factor() * x0  # along s, if the update was not clipped
        if self.noise:
            return self.read_noisy(rows, x0, shift)
        u = first_direction(shift)
        if self.method.loss == "bpr":
            return self.read_pairs(rows, shift, u)
        misfit, values, bias, s = self.fit(rows, x0, shift, u)
        support = None
        if requested is not None and misfit < MAX_MISFIT:
            support = self.read_support(x, requested, rows, s, bias)
        if support is None:
            return Reading(rows, self.to_ratings(values), s, misfit)
        support_rows, support_values, exact_bias = support
        values = values + exact_bias - bias
        return Reading(rows, self.to_ratings(values), s, misfit, support_rows, self.to_ratings(support_values))

    @property
    def hypotheses(self) -> tuple[Floats, Floats]:
        """The weights and targets that a rating can have."""
        if self.method.implicit:
            return np.array([self.method.negative_weight, 1.0]), np.array([0.0, 1.0])
        levels = np.array(self.method.levels) - self.method.centre
        return np.ones(len(levels)), levels

    def to_ratings(self, values: Floats) -> Floats:
        """The ratings on the scale nearest to these targets."""
        _, levels = self.hypotheses
        nearest = levels[np.abs(values[:, None] - levels[None]).argmin(1)]
        return np.asarray(nearest + self.method.centre)

    def decay_factor(self) -> float:
        """Factor by which all epochs multiply what is orthogonal to s, by weight decay and the proximal term."""
        z = 1.0
        for _ in range(self.method.epochs):
            z -= self.method.lr * (self.method.weight_decay * z + self.mu * (z - 1.0))
        return z

    def response(self, square: Floats) -> tuple[Floats, Floats]:
        """P and Q of the prediction after all epochs, P h + Q q, from the initial prediction h and the target q.

        A row for each |s|^2, a column for each hypothesis.
        """
        pull = square[:, None] * self.hypotheses[0][None]
        p = np.ones_like(pull)
        q = np.zeros_like(pull)
        lr = self.method.lr
        decay = self.method.weight_decay
        for _ in range(self.method.epochs):
            p = p - lr * (pull * p + decay * p + self.mu * (p - 1.0))
            q = q + lr * (pull * (1.0 - q) - (decay + self.mu) * q)
        return p, q

    def targets(self, x0: Floats, shift: Floats, u: Floats, lengths: Floats, clip_factor: float) -> Floats:
        """The target for each length of s along u, row and hypothesis, without the user's bias."""
        p, q = self.response(float(u @ u) * lengths**2)
        before = x0 @ u
        after = self.decay_factor() * before + shift @ u / clip_factor
        gap = after[None, :, None] - before[None, :, None] * p[:, None, :]
        return np.asarray(lengths[:, None, None] * gap / q[:, None, :])

    def fit(self, rows: Rows, x0: Floats, shift: Floats, u: Floats) -> tuple[float, Floats, float, Floats]:
        """Misfit, targets, bias and s of the best fit: on a coarse grid of the unknown numbers, then around it."""
        lengths = np.array([1.0])
        clip_factors = np.array([1.0])
        if self.method.biases:
            # s = (1, vector), so its first element fixes the length.
            if abs(u[0]) > 1e-12:
                u = u / u[0]
        else:
            lengths = np.geomspace(*LENGTHS, GRID if self.clip else 20 * GRID)
            lengths = np.concatenate([lengths, -lengths])
        if self.clip:
            clip_factors = np.geomspace(MIN_CLIP_FACTOR, 1.0, GRID)
        best = (np.inf, 0.0, 1.0)
        for width in (0.02, 0.001, 0.0):
            for clip_factor in clip_factors.tolist():
                misfits = self.misfits(rows, self.targets(x0, shift, u, lengths, clip_factor))
                at = int(misfits.argmin())
                best = min(best, (float(misfits[at]), float(lengths[at]), clip_factor))
            around = 1 + width * np.linspace(-1, 1, 81)
            if len(lengths) > 1:
                lengths = best[1] * around
            if len(clip_factors) > 1:
                clip_factors = np.minimum(1.0, best[2] * around)
        targets = self.targets(x0, shift, u, np.array([best[1]]), best[2])[0]
        return *self.fit_bias(rows, targets), best[1] * u

    def misfits(self, rows: Rows, targets: Floats) -> Floats:
        """Distance from the scale with the best bias, for each of the lengths tried."""
        if self.method.biases:
            return np.array([self.fit_bias(rows, one)[0] for one in targets])
        gaps = np.abs(targets - self.hypotheses[1]).min(2)
        return np.asarray(np.sqrt(np.mean(gaps**2, 1)))

    def fit_bias(self, rows: Rows, targets: Floats) -> tuple[float, Floats, float]:
        """Misfit, targets and the user's bias that puts them on the scale; the likeliest if several do."""
        levels = self.hypotheses[1]
        if not self.method.biases:
            gaps = np.abs(targets - levels[None])
            at = gaps.argmin(1)
            values = targets[np.arange(len(at)), at]
            return float(np.sqrt(np.mean(gaps.min(1) ** 2))), values, 0.0
        anchors = np.unique(np.linspace(0, len(targets) - 1, ANCHORS).astype(int))
        biases = (levels[None] - targets[anchors]).ravel()
        gaps = np.abs(targets[None] + biases[:, None, None] - levels[None, None])
        at = gaps.argmin(2)
        misfits = np.sqrt(np.mean(np.take_along_axis(gaps, at[..., None], 2)[..., 0] ** 2, 1))
        tied = np.flatnonzero(misfits <= misfits.min() + MAX_MISFIT / 10)
        best = tied[self.log_prior(at[tied], rows).argmax()]
        values = np.take_along_axis(targets, at[best][:, None], 1)[:, 0] + biases[best]
        return float(misfits[best]), values, float(biases[best])

    def log_prior(self, at: npt.NDArray[np.intp], rows: Rows) -> Floats:
        """Mean log probability of these levels for these items, one row of `at` for each set of levels."""
        if self.method.implicit or self.prior is None:
            middle = (len(self.hypotheses[1]) - 1) * (0.0 if self.method.implicit else 0.6)
            return np.asarray(-np.abs(at.mean(1) - middle))
        return np.asarray(np.log(self.level_shares(rows) + 1e-9)[np.arange(len(rows)), at].mean(1))

    def level_shares(self, rows: Rows) -> Floats:
        """How often people give each rating to these items."""
        levels = len(self.hypotheses[1])
        prior = np.full(levels, 1 / levels) if self.prior is None else self.prior
        if prior.ndim == 2:
            return prior[rows]
        return np.repeat(prior[None], len(rows), 0)

    def read_support(
        self, x: Floats, requested: Rows, rows: Rows, s: Floats, bias: float
    ) -> tuple[Rows, Floats, float] | None:
        """Items and targets of the support set and the exact bias, or None if they cannot be read.

        The vector solves X^T e = ridge v and sum e = ridge_bias v_0 for the errors e. These are as many equations as
        the vector has numbers: they give e exactly if the support is no larger, and v_0 needs no guess.
        """
        method = self.method
        support = np.setdiff1d(requested, rows).astype(np.int32)
        if method.rebuild != "ridge" or method.implicit or not 0 < len(support) < method.dimension:
            return None
        first = int(method.biases)
        features = x[support]
        e, _, rank, _ = np.linalg.lstsq(features[:, first:].T, method.ridge * s[first:], rcond=1e-9)
        if rank < len(support):
            return None
        if method.biases and method.ridge_bias:
            bias += round(float(e.sum()) / method.ridge_bias - bias)
        targets = features @ s + bias + e
        gaps = np.abs(targets[:, None] - self.hypotheses[1][None]).min(1)
        if float(np.sqrt(np.mean(gaps**2))) >= MAX_MISFIT:
            return None
        return support, targets, bias

    def read_noisy(self, rows: Rows, x0: Floats, shift: Floats) -> Reading:
        """The most probable ratings under noise: the prior of each, times how well it explains the row.

        Expectation-maximisation finds which rows moved and in which direction: rows that moved have more than the
        noise along s. If they have no more than the best direction has by chance, nothing is read.
        """
        levels = self.hypotheses[1]
        shares = self.level_shares(rows)
        prior = np.full(len(rows), 0.1) if self.popularity is None else np.clip(self.popularity[rows], 1e-4, 0.9)
        touched = prior
        for _ in range(EM_STEPS):
            u = first_direction(shift * np.sqrt(touched)[:, None])
            along = shift @ u / self.noise
            # The largest eigenvalue of n rows of pure noise is about (1 + sqrt(d / n))^2 times its variance (Marchenko
            # and Pastur, 1967). Of weighted rows, n is Kish's effective number.
            effective_rows = touched.sum() ** 2 / (touched**2).sum()
            by_chance = (1 + np.sqrt(shift.shape[1] / effective_rows)) ** 2 - 1
            power = float(touched @ along**2 / touched.sum()) - 1  # of the rows that moved, in units of the noise
            if power <= 1.1 * by_chance:
                return Reading(rows, levels[shares.argmax(1)] + self.method.centre, u, np.inf, strength=0 * along)
            # Bayes' rule: along s, a row that moved is N(0, 1 + power), the others are N(0, 1).
            log_odds = np.log(prior / (1 - prior)) + along**2 / 2 * power / (1 + power) - np.log1p(power) / 2
            touched = 1 / (1 + np.exp(-log_odds))
        sign = 1.0
        s = u
        if self.method.biases:
            sign = np.sign(u[0])
            s = u * sign / max(abs(u[0]), 0.5)
        targets = self.targets(x0, shift, s, np.ones(1), 1.0)[0]
        _, q = self.response(np.array([float(s @ s)]))
        spread = self.noise * float(np.linalg.norm(s)) / np.abs(q) * (1 + by_chance / power)
        bias = 0.0
        if self.method.biases:
            gaps = shares @ levels - targets.mean(1)
            bias = float(touched @ gaps / touched.sum())
        score = np.log(shares + 1e-9) - (targets + bias - levels) ** 2 / (2 * spread**2)
        values = levels[score.argmax(1)] + self.method.centre
        return Reading(rows, values, s, np.inf, strength=along * sign)

    def read_pairs(self, rows: Rows, shift: Floats, u: Floats) -> Reading:
        """Which items are positives under BPR: these moved along s, negatives against it."""
        along = shift @ u
        if self.method.biases:
            along = along * np.sign(u[0])
        elif -along.min(initial=0.0) > along.max(initial=0.0):
            # A positive is pulled by all of its negatives, so the row that moved furthest is one.
            along = -along
        return Reading(rows, (along > 0).astype(np.float64), u, 0.0)


def first_direction(shift: Floats) -> Floats:
    """The first right singular vector: the unit vector of which the rows are multiples, as nearly as possible."""
    _, vectors = np.linalg.eigh(shift.T @ shift)
    return np.asarray(vectors[:, -1])


def read_sum(attacker: Attacker, sent: Arrays, change: Floats) -> list[Reading]:
    """Groups of rows that a single user touched, with their ratings. `change` is the sum of all updates."""
    lengths = np.linalg.norm(change, axis=1)
    rows = np.flatnonzero(lengths > 1e-5)
    readings = []
    for group in group_by_direction(change[rows] / lengths[rows, None]):
        of_user = rows[group].astype(np.int32)
        reply: Arrays = {ITEMS: (sent[ITEMS][of_user] + change[of_user]).astype(np.float64), ITEM_ROWS: of_user}
        reading = attacker(sent, reply)
        if reading.is_sure:
            readings.append(reading)
    return readings


def group_by_direction(units: Floats) -> list[npt.NDArray[np.intp]]:
    """Indices of unit vectors with the same or the opposite direction, largest groups first, each vector in one."""
    # 1 - cos^2 is the square of the sine, the same for opposite directions.
    same = 1 - (units @ units.T) ** 2 < SAME_DIRECTION**2
    count = same.sum(1)
    groups = []
    while len(count) and count.max() >= MIN_ROWS:
        members = np.flatnonzero(same[count.argmax()])
        groups.append(members)
        count -= same[:, members].sum(1)
        same[:, members] = False
        count[members] = 0
    return groups


# How much an attack read


class Prior(NamedTuple):
    """How people in general rate, which needs no updates: for example from public ratings."""

    shares: Floats  # items x levels: how often each rating is given to an item
    popularity: Floats  # share of people who rate each item


@dataclass(frozen=True)
class Exposure:
    """Shares between 0 and 1, averaged over the ratings of one user or of many.

    `read` is the share of ratings that the server states rightly. `guessed` is that share if it states the user's mean
    rating for all, which it does not even know; `usual` if it states the most frequent rating of each item. `precision`
    and `recall` are of the items that it names; `popular` is the precision of naming as many of the most popular.
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
        """Ratings read above guessing the user's mean."""
        return self.read - self.guessed

    @property
    def learned(self) -> float:
        """Ratings read above the better of both guesses."""
        return self.read - max(self.guessed, self.usual)


def measure_exposure(
    truth: Mapping[int, float],
    private_items: Collection[int],
    values: Mapping[int, float],
    items: Collection[int],
    prior: Prior,
    levels: Floats,
) -> Exposure:
    """Compare the `values` and `items` that a server read with a user's ratings and private items.

    If the rating of an item was not read, the server states the most frequent one.
    """
    frequent = levels[prior.shares.argmax(1)]
    true_values = np.array(list(truth.values()))
    mean = levels[np.abs(levels - true_values.mean()).argmin()]
    hits = len(set(private_items) & set(items))
    top = set(top_indices(prior.popularity, len(private_items)))
    return Exposure(
        ratings=len(truth),
        read=float(np.mean([values.get(item, frequent[item]) == value for item, value in truth.items()])),
        guessed=float(np.mean(true_values == mean)),
        usual=float(np.mean([frequent[item] == value for item, value in truth.items()])),
        precision=hits / len(items) if items else 0.0,
        recall=hits / len(private_items),
        popular=len(top & set(private_items)) / len(private_items),
    )


def average_exposures(exposures: list[Exposure]) -> Exposure:
    """The exposure of many users together: every rating has the same weight."""
    weights = np.array([exposure.ratings for exposure in exposures], np.float64)
    means = {}
    for field in fields(Exposure):
        if field.name != "ratings":
            shares = [getattr(exposure, field.name) for exposure in exposures]
            means[field.name] = float(np.average(shares, weights=weights))
    return Exposure(int(weights.sum()), **means)


def top_indices(score: Floats, count: int) -> list[int]:
    """The indices of the highest scores."""
    return [int(i) for i in np.argsort(-score, kind="stable")[:count]]


def interaction_prior(public: Ratings, negatives: int) -> Prior:
    """The share of people who took each item, and the probability that an item of a query is a positive."""
    popularity = (np.bincount(public.items, minlength=len(public.catalogue)) + 0.5) / len(public.users)
    sampled = negatives * popularity.mean() * (1 - np.minimum(popularity, 1.0))
    positive = popularity / (popularity + sampled)
    return Prior(np.stack([1 - positive, positive], 1), popularity)


def rating_prior(public: Ratings, levels: Floats) -> Prior:
    """How often people give each rating to each item, smoothed towards the average item."""
    counts = np.zeros((len(public.catalogue), len(levels)))
    np.add.at(counts, (public.items, np.abs(public.values[:, None] - levels[None]).argmin(1)), 1.0)
    average = (counts.sum(0) + 1) / (counts.sum() + len(levels))
    shares = (counts + SMOOTHING * average) / (counts.sum(1, keepdims=True) + SMOOTHING)
    return Prior(shares, (counts.sum(1) + 0.5) / len(public.users))
