"""What a server reads in one user's update: which items it rated, its vector, and the ratings themselves.

After a step at rate lr the row of an item of the query has moved by d_i = lr w e_i s, with e_i = y_i - p_i the error
and s = d p / d x the user's vector (with biases (1, v), else v). All rows are multiples of one vector: the first
singular vector gives s, up to its length, which the bias 1 fixes; the length of a row gives e_i, and p_i + e_i is the
rating. The user's bias in p_i, the length of v without biases, and by how much an update was clipped are one number
each: those fit by which all ratings fall on the scale. Several epochs, weight decay and a proximal pull are linear
maps that the settings tell, and are undone first.

In the sum of many users' updates a rare item is touched by a single user of the round: its row is lr e_i s of that
user. Rows in one direction belong together, and are read as the update of one user. Whose it is, the sum does not say.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int32]
STEPS = 500  # tried of a number that is not known, in each of two passes
LENGTHS = (0.02, 50.0)  # of a user's vector, without biases
LEAST_CLIP = 0.02  # the share of an update that clipping leaves, at least
EXACT = 0.05  # so near to the scale, root mean square, are readings that are right
FAINT = 1e-6  # rows that moved by less, as a share of the one that moved most, did not move
TURNS = 10  # of expectation and maximisation
ANCHORS = 4  # ratings from which biases are tried
ALIKE = 3e-3  # sine of the angle between two rows of a sum below which they are of one user
FEWEST = 3  # rows of a user in a sum: two fall on the scale by chance


@dataclass(frozen=True)
class Reading:
    """What was read: rows and their ratings, or 1 and 0 for taken and not; and the vector, in which rows move."""

    rows: Rows
    values: Floats
    vector: Floats
    misfit: float  # root mean square distance from the scale: near 0, the reading is certain
    known: Rows | None = None  # items of the support, and their ratings, if these could be read, too
    known_values: Floats | None = None
    strength: Floats | None = None  # under noise: how far each row moved along it, in deviations of the noise

    @property
    def is_sure(self) -> bool:
        """Whether the readings fall on the scale, which they hardly do by chance."""
        return self.misfit < EXACT

    def ratings(self) -> dict[int, float]:
        """The ratings that were read, by item."""
        read = dict(zip(self.rows.tolist(), self.values.tolist(), strict=True))
        if self.known is not None and self.known_values is not None:
            read |= dict(zip(self.known.tolist(), self.known_values.tolist(), strict=True))
        return read


@dataclass(frozen=True)
class Attacker:
    """A server that follows the protocol and reads replies; it knows all settings, and what it sent.

    `clip` is the length to which users shorten their updates (0: they do not), `noise` the deviation of what they add
    to each number. Of people it knows, `usual` is how often they give each rating, in general or for each item, and
    `popularity` the share of them that rates an item.

    >>> from mutirao.systems.recsys.fedrecon import FedRecon
    >>> weights, targets = Attacker(FedRecon(100, dimension=8)).hypotheses
    >>> len(targets)  # the ratings that it tries to recognise in an update
    5
    """

    method: FedRecon
    mu: float = 0.0
    clip: float = 0.0
    noise: float = 0.0
    usual: Floats | None = None
    popularity: Floats | None = None

    def __call__(self, sent: Arrays, reply: Arrays, asked: Rows | None = None) -> Reading:
        """Read a reply to `sent`, the whole item matrix; `asked` are the rows the user asked for before, if it did."""
        x = sent[ITEMS].astype(np.float64)
        moved, rows = reply[ITEMS].astype(np.float64), reply.get(ITEM_ROWS)
        if rows is None:
            lengths = np.linalg.norm(moved - x, axis=1)
            changed = np.flatnonzero(lengths > FAINT * lengths.max()).astype(np.int32)
            moved, rows = moved[changed], changed
        x0 = x[rows]
        shift = moved - self.left_alone() * x0  # what is along s; of a clipped update, nearly
        if self.noise:
            return self.read_noisy(rows, x0, shift)
        u = first_direction(shift)
        if self.method.loss == "bpr":
            return self.read_pairs(rows, shift, u)
        misfit, values, bias, s = self.fit(rows, x0, shift, u)
        known = self.read_support(x, asked, rows, s, bias) if asked is not None and misfit < EXACT else None
        if known is None:
            return Reading(rows, self.named(values), s, misfit)
        extra, theirs, sure = known
        return Reading(rows, self.named(values + sure - bias), s, misfit, extra, self.named(theirs))

    @property
    def hypotheses(self) -> tuple[Floats, Floats]:
        """The weights and targets that a rating may have had."""
        if self.method.implicit:
            return np.array([self.method.negative_weight, 1.0]), np.array([0.0, 1.0])
        levels = np.array(self.method.levels) - self.method.centre
        return np.ones(len(levels)), levels

    def named(self, values: Floats) -> Floats:
        """Targets as ratings of the scale."""
        levels = self.hypotheses[1]
        nearest = levels[np.abs(values[:, None] - levels[None]).argmin(1)]
        return np.asarray(nearest + self.method.centre)

    def left_alone(self) -> float:
        """By what a number not along s is multiplied in all epochs, by decay and the proximal pull."""
        z = 1.0
        for _ in range(self.method.epochs):
            z -= self.method.lr * (self.method.weight_decay * z + self.mu * (z - 1.0))
        return z

    def response(self, square: Floats) -> tuple[Floats, Floats]:
        """P and Q of the prediction after all epochs, P h + Q q, from the prediction h and the target q before.

        A row for each |s|^2, a column for each hypothesis.
        """
        pull = square[:, None] * self.hypotheses[0][None]
        p, q, lr = np.ones_like(pull), np.zeros_like(pull), self.method.lr
        decay, mu = self.method.weight_decay, self.mu
        for _ in range(self.method.epochs):
            p, q = p - lr * (pull * p + decay * p + mu * (p - 1.0)), q + lr * (pull * (1.0 - q) - (decay + mu) * q)
        return p, q

    def targets(self, x0: Floats, shift: Floats, u: Floats, lengths: Floats, left: float) -> Floats:
        """For each length of s along u, row and hypothesis the target, but for the user's bias.

        Of the update clipping has `left` so much.
        """
        p, q = self.response(float(u @ u) * lengths**2)
        h0, along = x0 @ u, self.left_alone() * (x0 @ u) + shift @ u / left
        both = along[None, :, None] - h0[None, :, None] * p[:, None, :]
        return np.asarray(lengths[:, None, None] * both / q[:, None, :])

    def fit(self, rows: Rows, x0: Floats, shift: Floats, u: Floats) -> tuple[float, Floats, float, Floats]:
        """Misfit, targets, bias and s of the best try of all that is not known: on a coarse grid, then around it."""
        lengths = np.array([1.0])
        if self.method.biases:
            u = u / u[0] if abs(u[0]) > 1e-12 else u
        else:
            lengths = np.geomspace(*LENGTHS, STEPS if self.clip else 20 * STEPS)
            lengths = np.concatenate([lengths, -lengths])
        lefts, best = np.geomspace(LEAST_CLIP, 1.0, STEPS) if self.clip else np.array([1.0]), (np.inf, 0.0, 1.0)
        for near in (0.02, 0.001, 0.0):
            for left in lefts.tolist():
                misfits = self.misfits(rows, self.targets(x0, shift, u, lengths, left))
                at = int(misfits.argmin())
                best = min(best, (float(misfits[at]), float(lengths[at]), left))
            around = 1 + near * np.linspace(-1, 1, 81)
            lengths = best[1] * around if len(lengths) > 1 else lengths
            lefts = np.minimum(1.0, best[2] * around) if len(lefts) > 1 else lefts
        targets = self.targets(x0, shift, u, np.array([best[1]]), best[2])[0]
        return *self.fit_bias(rows, targets), best[1] * u

    def misfits(self, rows: Rows, targets: Floats) -> Floats:
        """How far from the scale the best bias leaves the targets, for each of the lengths tried."""
        if self.method.biases:
            return np.array([self.fit_bias(rows, one)[0] for one in targets])
        gaps = np.abs(targets - self.hypotheses[1]).min(2)
        return np.asarray(np.sqrt(np.mean(gaps**2, 1)))

    def fit_bias(self, rows: Rows, targets: Floats) -> tuple[float, Floats, float]:
        """Misfit, targets and the user's bias that puts them on the scale; of several that do, the most usual."""
        levels = self.hypotheses[1]
        if not self.method.biases:
            gaps = np.abs(targets - levels[None])
            at = gaps.argmin(1)
            values = targets[np.arange(len(at)), at]
            return float(np.sqrt(np.mean(gaps.min(1) ** 2))), values, 0.0
        anchors = np.unique(np.linspace(0, len(targets) - 1, ANCHORS).astype(int))
        tries = (levels[None] - targets[anchors]).ravel()
        gaps = np.abs(targets[None] + tries[:, None, None] - levels[None, None])
        at = gaps.argmin(2)
        misfits = np.sqrt(np.mean(np.take_along_axis(gaps, at[..., None], 2)[..., 0] ** 2, 1))
        alike = np.flatnonzero(misfits <= misfits.min() + EXACT / 10)
        best = alike[self.likelihood(at[alike], rows).argmax()]
        values = np.take_along_axis(targets, at[best][:, None], 1)[:, 0] + tries[best]
        return float(misfits[best]), values, float(tries[best])

    def likelihood(self, at: npt.NDArray[np.intp], rows: Rows) -> Floats:
        """How usual such ratings of these items are, a row a set of them."""
        if self.method.implicit or self.usual is None:
            middle = (len(self.hypotheses[1]) - 1) * (0.0 if self.method.implicit else 0.6)
            return np.asarray(-np.abs(at.mean(1) - middle))
        return np.asarray(np.log(self.shares(rows) + 1e-9)[np.arange(len(rows)), at].mean(1))

    def shares(self, rows: Rows) -> Floats:
        """How usual each rating of these items is."""
        levels = len(self.hypotheses[1])
        usual = np.full(levels, 1 / levels) if self.usual is None else self.usual
        return usual[rows] if usual.ndim == 2 else np.repeat(usual[None], len(rows), 0)

    def read_support(
        self, x: Floats, asked: Rows, rows: Rows, s: Floats, bias: float
    ) -> tuple[Rows, Floats, float] | None:
        """The support and its ratings: the errors e that made the vector solve X^T e = ridge v, sum e = ridge_bias v_0.

        As many equations as the vector is long tell e exactly if the support is no larger; v_0 then needs no guess.
        """
        method = self.method
        extra = np.setdiff1d(asked, rows).astype(np.int32)
        if method.rebuild != "ridge" or method.implicit or not 0 < len(extra) < method.dimension:
            return None
        first, features = int(method.biases), x[extra]
        e, _, rank, _ = np.linalg.lstsq(features[:, first:].T, method.ridge * s[first:], rcond=1e-9)
        if rank < len(extra):
            return None
        if method.biases and method.ridge_bias:
            bias += round(float(e.sum()) / method.ridge_bias - bias)
        theirs = features @ s + bias + e
        levels = self.hypotheses[1]
        off = np.abs(theirs[:, None] - levels[None]).min(1)
        return (extra, theirs, bias) if float(np.sqrt(np.mean(off**2))) < EXACT else None

    def read_noisy(self, rows: Rows, x0: Floats, shift: Floats) -> Reading:
        """The likeliest ratings under noise: how usual each is, times how well it explains the row.

        Which rows moved and along what is found in turn, by expectation and maximisation: rows that moved have
        more than the noise along s. Where that is no more than the best direction has by chance, nothing is read.
        """
        levels, shares = self.hypotheses[1], self.shares(rows)
        prior = np.full(len(rows), 0.1) if self.popularity is None else np.clip(self.popularity[rows], 1e-4, 0.9)
        touched = prior
        for _ in range(TURNS):
            u = first_direction(shift * np.sqrt(touched)[:, None])
            along = shift @ u / self.noise
            many = touched.sum() ** 2 / (touched**2).sum()
            by_chance = (1 + np.sqrt(shift.shape[1] / many)) ** 2 - 1
            power = float(touched @ along**2 / touched.sum()) - 1  # of what moved, in units of the noise
            if power <= 1.1 * by_chance:
                return Reading(rows, levels[shares.argmax(1)] + self.method.centre, u, np.inf, strength=0 * along)
            odds = np.log(prior / (1 - prior)) + along**2 / 2 * power / (1 + power) - np.log1p(power) / 2
            touched = 1 / (1 + np.exp(-odds))
        s = u * np.sign(u[0]) / max(abs(u[0]), 0.5) if self.method.biases else u
        targets = self.targets(x0, shift, s, np.ones(1), 1.0)[0]
        _, q = self.response(np.array([float(s @ s)]))
        spread = self.noise * float(np.linalg.norm(s)) / np.abs(q) * (1 + by_chance / power)
        off = shares @ levels - targets.mean(1)
        bias = float(touched @ off / touched.sum()) if self.method.biases else 0.0
        score = np.log(shares + 1e-9) - (targets + bias - levels) ** 2 / (2 * spread**2)
        values = levels[score.argmax(1)] + self.method.centre
        return Reading(rows, values, s, np.inf, strength=along * np.sign(u[0] if self.method.biases else 1.0))

    def read_pairs(self, rows: Rows, shift: Floats, u: Floats) -> Reading:
        """Which items were taken, by BPR: they moved along s, the others against it."""
        along = shift @ u
        if self.method.biases:
            along = along * np.sign(u[0])
        elif -along.min(initial=0.0) > along.max(initial=0.0):
            along = -along  # one taken is pulled by all that were drawn for it
        return Reading(rows, (along > 0).astype(np.float64), u, 0.0)


def first_direction(shift: Floats) -> Floats:
    """The unit vector of which the rows are multiples, as nearly as can be."""
    _, vectors = np.linalg.eigh(shift.T @ shift)
    return np.asarray(vectors[:, -1])


def read_sum(attacker: Attacker, sent: Arrays, change: Floats) -> list[Reading]:
    """Groups of rows that one user alone touched, with their ratings; `change` is the sum of all updates."""
    lengths = np.linalg.norm(change, axis=1)
    rows = np.flatnonzero(lengths > 1e-5)
    units = change[rows] / lengths[rows, None]
    found = []
    for group in alike(units):
        mine = rows[group].astype(np.int32)
        reply: Arrays = {ITEMS: (sent[ITEMS][mine] + change[mine]).astype(np.float64), ITEM_ROWS: mine}
        reading = attacker(sent, reply)
        if reading.is_sure:
            found.append(reading)
    return found


def alike(units: Floats) -> list[npt.NDArray[np.intp]]:
    """Places of rows in one direction, or in the opposite one: the largest groups first, each row in one."""
    together = 1 - (units @ units.T) ** 2 < ALIKE**2
    count, groups = together.sum(1), []
    while len(count) and count.max() >= FEWEST:
        members = np.flatnonzero(together[count.argmax()])
        groups.append(members)
        count -= together[:, members].sum(1)
        together[:, members] = False
        count[members] = 0
    return groups
