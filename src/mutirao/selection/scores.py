"""What clients are ranked by: age, utility, size or speed, each a column of the roster, and weighted sums of them.

A score is a function `(roster, round) -> values`, one value a row: the higher, the sooner. NaN is a client that was
never heard of; it ranks a little above the best known one, so that no client is ignored forever.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mutirao.config import load_part, nearest
from mutirao.core.needs import Needs
from mutirao.core.parts import with_defaults
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Score = Callable[[Roster, int], Floats]


class AnyScore(Protocol):
    """A score that declares what it `needs` of the clients."""

    @property
    def needs(self) -> Needs:
        """What it reads besides what the roster always has."""
        return Needs()


CUT = (0.05, 0.95)  # quantiles to which reported values are clipped, as in Oort
LARGEST = 1e300  # clients may send any finite number; differences of these are finite too
ABOVE = 1e-9  # by how much, of itself, the unknown stands above the highest known: more than rounding can hide


def since(column: str) -> Score:
    """An age: rounds since the round that a column of the roster holds (0: never, so since the beginning)."""
    return lambda roster, round: np.subtract(round, getattr(roster, column), dtype=np.float64)


def last(figure: str) -> Score:
    """A utility: the last value of a figure that the roster has of each client."""
    return lambda roster, round: roster.figure(figure)


def seconds_of(roster: Roster) -> Floats:
    """How long a round takes each client, as far as a system model or the clients have reported it."""
    return roster.figure("ready_seconds") + roster.figure("upload_seconds")


SINCE = {
    "age": "last_selected",
    "version_age": "last_sent",  # models made since the one it was given: Yates, "The Age of Gossip in Networks", 2021
    "since_reply": "last_replied",
    "since_improvement": "last_improved",
}
AGES = {name: since(column) for name, column in SINCE.items()}
FOUND = {"update_norm", "dissimilarity", "samples", "since_improvement"}  # computed by the server from replies
CLIENT_METRICS = ("entropy", "loss", "rms_loss", "gradient_norm", "update_norm", "dissimilarity")
UTILITIES = {name: last(name) for name in CLIENT_METRICS}
SCORES: dict[str, Score] = {
    **AGES,
    **UTILITIES,
    "samples": lambda roster, round: np.where(roster.n > 0, roster.n, np.nan),  # as each client declared
    "speed": lambda roster, round: -seconds_of(roster),
}


@functools.lru_cache(maxsize=64)
def parse_scores(text: str) -> Mapping[str, float]:
    """Weights by score from text such as `0.5 age + 0.3 entropy + 0.2 mine:score`.

    >>> dict(parse_scores("age + 0.5 entropy"))
    {'age': 1.0, 'entropy': 0.5}
    """
    weights: dict[str, float] = {}
    for term in re.split(r"\s\+\s", text.strip()):
        weight, _, name = term.strip().rpartition(" ")
        try:
            weights[name] = weights.get(name, 0.0) + float(weight or 1.0)
        except ValueError:
            raise ConfigError(f"scores: {term!r} is not a weight and a score, such as '0.5 age'") from None
        if not math.isfinite(weights[name]):
            raise ConfigError(f"scores: the weight of {name!r} is not a finite number")
        score_of(name)
    return weights


def score_of(name: str) -> Score:
    """The score of that name, or behind a dotted path `package.module:name`.

    >>> from mutirao.core.roster import Roster
    >>> roster = Roster()
    >>> roster.meet(["ana", "bia"])
    >>> roster.mark(2, ["bia"], {})
    >>> score_of("age")(roster, 5)
    array([5., 3.])
    """
    if name not in SCORES and ":" not in name:
        raise ConfigError(f"no score is called {name!r}{nearest(name, SCORES)}")
    if name in SCORES:
        return SCORES[name]
    return load_part("scores", name, SCORES.values())


def needs_of(name: str) -> Needs:
    """What a score needs: a utility itself, and a user's own what it says in `needs`."""
    if name in FOUND:
        return Needs(server={name})
    if name in UTILITIES:
        return Needs(metrics={name})
    return with_defaults(score_of(name), AnyScore).needs  # type: ignore[type-abstract]


def mix_scores(
    weights: Mapping[str, float], roster: Roster, round: int, rows: Rows, classes: int | None = None
) -> Floats:
    """sum_j w_j scale_to_one(score_j) for these rows; with `classes`, an entropy not known is ln(classes), its most.

    A utility without such a bound is cut at the quantiles CUT of those known: a false one cannot shrink all others
    to nothing.

    >>> from mutirao.core.roster import Roster
    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.mark(2, ["bia"], {})
    >>> mix_scores({"age": 0.5}, roster, 5, roster.here())
    array([0.5, 0. , 0.5])
    """
    total = np.zeros(len(rows))
    for name, weight in weights.items():
        values = np.asarray(score_of(name)(roster, round), np.float64)
        if values.shape != (len(roster),):
            raise ConfigError(f"score {name!r} gave values of shape {values.shape} for {len(roster)} clients")
        start = -LARGEST
        most = LARGEST
        if classes and name == "entropy":
            # ln(classes) is the highest entropy there is: that of a model which has learnt nothing.
            most = math.log(classes)
            start = most
        if len(rows) != len(roster):
            values = values[rows]
        known = np.clip(values, -LARGEST, most)
        if name in UTILITIES and name != "entropy":
            known = cut_tails(known)
        scaled = scale_to_one(fill_unknown(known, start))
        # In place: with a million clients another array takes longer to allocate than to fill.
        scaled *= weight
        total += scaled
    return total


def cut_tails(values: Floats) -> Floats:
    """Values clipped to the quantiles CUT of the known ones, if there are at least 3.

    >>> cut_tails(np.array([1.0, 2.0, 3.0, np.nan, 1e9]))
    array([ 2.,  2.,  3., nan,  3.])
    """
    known = values[~np.isnan(values)]
    if len(known) < 3:
        return values
    low = np.quantile(known, CUT[0], method="higher")
    high = np.quantile(known, CUT[1], method="lower")
    return np.clip(values, low, max(low, high))


def fill_unknown(values: Floats, start: float = -LARGEST) -> Floats:
    """Values with the unknown at `start`, or a little above the highest known if that is no less."""
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    if unknown.all():
        return np.full(len(values), max(start, 0.0))
    highest = float(np.fmax.reduce(values))
    above = highest + ABOVE * (abs(highest) or 1.0)
    return np.where(unknown, start if start > highest else above, values)


def scale_to_one(values: Floats) -> Floats:
    """(x - min) / (max - min), from 0 to 1; all 0 if all are equal.

    >>> scale_to_one(np.array([2.0, 3.0, 6.0]))
    array([0.  , 0.25, 1.  ])
    """
    if not len(values) or not (spread := values.max() - (low := values.min())) > 0:
        return np.zeros(len(values))
    scaled: Floats = values - low
    scaled /= spread
    return scaled


def top(scores: Floats, count: int, rng: np.random.Generator) -> Rows:
    """Positions of the `count` highest scores; ties at the margin are broken at random.

    >>> top(np.array([0.2, 0.9, 0.5]), 2, np.random.default_rng(0))
    array([1, 2])
    """
    if count >= len(scores):
        return np.arange(len(scores))
    margin = kth_highest(scores, count)
    above = np.flatnonzero(scores > margin)
    level = np.flatnonzero(scores == margin)
    return np.concatenate([above, rng.choice(level, count - len(above), replace=False, shuffle=False)])


def kth_highest(scores: Floats, count: int) -> float:
    """The lowest of the `count` highest scores.

    Of many, only those are sorted that are no lower than the highest of `count` stretches: there are enough of them.
    """
    stretches = 4 * count
    if len(scores) >= 4 * stretches:
        wide = len(scores) // stretches
        highest = scores[: stretches * wide].reshape(stretches, wide).max(axis=1)
        low = float(np.partition(highest, -count)[-count])
        if low == scores.max():
            return low
        scores = scores[scores >= low]
    return float(np.partition(scores, -count)[-count])
