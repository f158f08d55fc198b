"""The scale that search sites agree on: how features are put alike, how many there are, and the highest grade.

It is found from what sites tell of their documents (`profile`), or written down beforehand; it goes with every request,
and a trained ranker carries it.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mutirao.core.agreement import PROFILE
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.moments import Transform, bound_moments, combine_moments, measure_moments, standardise
from mutirao.core.validation import MOST_SAMPLES
from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE

SCALE = "scale"
FORM = "a file scale.json as every run of the ranking recipe leaves it"


@dataclass(frozen=True)
class Scale:
    """What is done to a document's features: (transform(x) - mean) / std; and the grades it may have, from 0."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    transform: Transform = "none"
    highest: int = 4

    @property
    def features(self) -> int:
        """How many features a document has."""
        return len(self.mean)

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Means and deviations as numbers to work with."""
        return np.array(self.mean), np.array(self.std)

    def __call__(self, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Features on this scale, worked out in float64."""
        return standardise(x, *self.arrays, self.transform)

    def content(self) -> bytes:
        """As it travels, and as it is written down: the same bytes for the same numbers."""
        told = {"transform": self.transform, "highest_grade": self.highest, "mean": self.mean, "std": self.std}
        return json.dumps(told).encode()


def plain_scale(features: int, highest: int, transform: Transform) -> Scale:
    """A scale without moments: features are transformed and no more."""
    return Scale((0.0,) * features, (1.0,) * features, transform, max(1, highest))


@lru_cache(maxsize=16)
def read_scale(content: bytes) -> Scale:
    """The scale in these bytes; ValueError says what is wrong with it."""
    try:
        told = json.loads(content)
        transform, highest = told["transform"], told["highest_grade"]
        mean, std = (tuple(map(_number, told[name])) for name in ("mean", "std"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no scale of features ({str(error)[:60]}); right would be {FORM}") from error
    if transform not in get_args(Transform):
        raise ValueError(f"its transform {str(transform)[:20]!r} is not one of {', '.join(get_args(Transform))}")
    if type(highest) is not int or not 1 <= highest <= MOST_GRADE:
        raise ValueError(f"its highest grade {str(highest)[:20]!r} is not a whole number from 1 to {MOST_GRADE}")
    if not 1 <= len(mean) == len(std) <= MOST_FEATURES:
        raise ValueError(f"it has {len(mean)} means and {len(std)} deviations; right would be one each a feature")
    if min(std) <= 0:
        raise ValueError(f"the deviation of feature {int(np.argmin(std)) + 1} is not above 0")
    return Scale(mean, std, transform, highest)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:20]!r} is not a finite number")
    return float(value)


log = logging.getLogger("mutirao")

HEAD = 2  # numbers before the sums
FAR = 1e6  # times the scale of the others; features of documents have long tails, and honest sites differ much
MOST_TIMES = 100.0  # times the documents of the median site that one may count for, as skewed as sites may be


def tell_profile(x: npt.ArrayLike, highest: int, transform: Transform, least: int) -> Arrays:
    """All that leaves a site before the first round."""
    rows = np.asarray(x)
    told = measure_moments(rows if len(rows) >= least else rows[:0], transform)
    return {PROFILE: np.concatenate([[float(told["count"]), float(highest)], told["sum"], told["squares"]])}


def read_profile(reply: Reply) -> tuple[int, Arrays]:
    """The highest grade and the moments in a reply; ValueError says what is wrong with them."""
    told = reply.extras.get(PROFILE)
    if told is None or told.dtype != np.float64 or told.ndim != 1 or len(told) <= HEAD or len(told) % 2:
        raise ValueError("there is no profile in the reply, or it cannot be read")
    features = (len(told) - HEAD) // 2
    if features > MOST_FEATURES:
        raise ValueError(f"its profile is of {features:,} features; at most {MOST_FEATURES:,} can be")
    if not np.isfinite(told).all():
        raise ValueError("its profile holds what is no finite number")
    count, highest, squares = float(told[0]), float(told[1]), told[HEAD + features :]
    if not count.is_integer() or not 0 <= count <= MOST_SAMPLES:
        raise ValueError(f"it tells of {count:g} documents, which is no number of them")
    if not highest.is_integer() or not 0 <= highest <= MOST_GRADE:
        raise ValueError(f"its highest grade is {highest:g}; right would be a whole number from 0 to {MOST_GRADE}")
    if (squares < 0).any():
        raise ValueError(f"the squares of feature {int(np.argmin(squares)) + 1} are negative")
    return int(highest), {
        "count": np.array(int(count)),
        "sum": told[HEAD : HEAD + features],
        "squares": squares,
    }


def join_profiles(
    replies: Mapping[ClientId, Reply], transform: Transform, highest: int = 0, features: int = 0
) -> Scale:
    """The scale of what most sites have; those with another number of features have no part in it.

    `highest` and `features` are what was settled beforehand (0: as most sites tell, or the highest of them).
    """
    told: dict[ClientId, tuple[int, Arrays]] = {}
    for client, reply in sorted(replies.items()):
        try:
            told[client] = read_profile(reply)
        except ValueError as error:
            log.warning("%s: %s", client, error)
            fault = f"{client}: {error}"
    if not told:
        raise ConfigError(f"no client told a profile that can be read; {fault}")
    widths = Counter(len(moments["sum"]) for _, moments in told.values())
    width = features or min(widths, key=lambda many: (-widths[many], -many))
    for client, (_, moments) in told.items():
        if (own := len(moments["sum"])) != width:
            log.warning("%s has %s", client, differing(own, width))
    used = [(grade, m) for grade, m in told.values() if len(m["sum"]) == width]
    enough = [m for _, m in used if int(m["count"])]
    if not enough:
        raise ConfigError(f"no client has {width} features and enough documents to tell means of; give scale=FILE")
    mean, std = join_moments(enough, width)
    return Scale(tuple(mean), tuple(std), transform, highest or max(1, *(grade for grade, _ in used)))


def join_moments(moments: Sequence[Arrays], width: int) -> tuple[list[float], list[float]]:
    """Mean and deviation feature by feature, of moments that no single site can bend far."""
    means, stds = [], []
    for f in range(width):
        own = [{"count": m["count"], "sum": m["sum"][f : f + 1], "squares": m["squares"][f : f + 1]} for m in moments]
        mean, std = combine_moments(bound_moments(own, FAR, MOST_TIMES))
        means.append(float(mean[0]))
        stds.append(float(std[0]))
    return means, stds


def differing(own: int, agreed: int) -> str:
    """How a site's features differ from those agreed on.

    >>> differing(45, 46)
    'features 1 to 45, and 1 to 46 are agreed on: missing: 46'
    """
    first, last, what = (own + 1, agreed, "missing") if own < agreed else (agreed + 1, own, "too many")
    which = f"{first}" if first == last else f"{first} to {last}"
    return f"features 1 to {own}, and 1 to {agreed} are agreed on: {what}: {which}"
