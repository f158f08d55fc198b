"""The feature scale that search sites agree on, and the profiles of their documents it is computed from.

A scale is the features' transform, means and deviations, their number, and the highest grade. It is computed before the
first round, or given beforehand; it goes with every request, and a trained ranker contains it.

A site's profile is one vector: the number of its training documents, its highest grade, and of each feature the sum and
the squared deviations. With fewer documents than `least` the count and the moments are 0, as they would reveal too much
of single documents. The server combines profiles in whatever order they arrive.
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

log = logging.getLogger("mutirao")

SCALE = "scale"
FORM = "a file scale.json as every run of the ranking recipe leaves it"
HEAD = 2  # numbers of a profile before the sums
FAR = 1e6  # times the scale of the other sites; features have long tails, and honest sites differ much
MOST_TIMES = 100.0  # a site weighs at most as much as so many times the documents of the median site


@dataclass(frozen=True)
class FeatureScale:
    """Features become (transform(x) - mean) / std; grades range from 0 to `highest`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    transform: Transform = "none"
    highest: int = 4

    @property
    def features(self) -> int:
        """Number of features of a document."""
        return len(self.mean)

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Means and deviations as arrays."""
        return np.array(self.mean), np.array(self.std)

    def __call__(self, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Features on this scale, computed in float64."""
        return standardise(x, *self.arrays, self.transform)

    def content(self) -> bytes:
        """The scale as JSON: the same bytes for the same numbers."""
        fields = {"transform": self.transform, "highest_grade": self.highest, "mean": self.mean, "std": self.std}
        return json.dumps(fields).encode()


def scale_without_moments(features: int, highest: int, transform: Transform) -> FeatureScale:
    """A scale that transforms features and does not standardise them."""
    return FeatureScale((0.0,) * features, (1.0,) * features, transform, max(1, highest))


@lru_cache(maxsize=16)
def parse_scale(content: bytes) -> FeatureScale:
    """The scale in these bytes; ValueError says what is wrong with it."""
    try:
        fields = json.loads(content)
        transform = fields["transform"]
        highest = fields["highest_grade"]
        mean = tuple(map(_number, fields["mean"]))
        std = tuple(map(_number, fields["std"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no scale of features ({str(error)[:60]}); expected {FORM}") from error
    if transform not in get_args(Transform):
        raise ValueError(f"its transform {str(transform)[:20]!r} is not one of {', '.join(get_args(Transform))}")
    if type(highest) is not int or not 1 <= highest <= MOST_GRADE:
        raise ValueError(f"its highest grade {str(highest)[:20]!r} is not a whole number from 1 to {MOST_GRADE}")
    if not 1 <= len(mean) == len(std) <= MOST_FEATURES:
        raise ValueError(f"it has {len(mean)} means and {len(std)} deviations; expected one each a feature")
    if min(std) <= 0:
        raise ValueError(f"the deviation of feature {int(np.argmin(std)) + 1} is not above 0")
    return FeatureScale(mean, std, transform, highest)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:20]!r} is not a finite number")
    return float(value)


def profile_documents(x: npt.ArrayLike, highest: int, transform: Transform, least: int) -> Arrays:
    """A site's profile: all that leaves it before the first round."""
    rows = np.asarray(x)
    # Moments of a few documents would reveal too much of each: they are those of no documents then.
    if len(rows) < least:
        rows = rows[:0]
    moments = measure_moments(rows, transform)
    head = [float(moments["count"]), float(highest)]
    return {PROFILE: np.concatenate([head, moments["sum"], moments["squares"]])}


def parse_document_profile(reply: Reply) -> tuple[int, Arrays]:
    """The highest grade and the moments in a reply; ValueError says what is wrong with them."""
    profile = reply.extras.get(PROFILE)
    if profile is None or profile.dtype != np.float64 or profile.ndim != 1 or len(profile) <= HEAD or len(profile) % 2:
        raise ValueError("there is no profile in the reply, or it cannot be read")
    features = (len(profile) - HEAD) // 2
    if features > MOST_FEATURES:
        raise ValueError(f"its profile has {features:,} features; at most {MOST_FEATURES:,} are possible")
    # A profile comes from outside: every number is checked before it is used.
    if not np.isfinite(profile).all():
        raise ValueError("its profile contains numbers that are not finite")
    count = float(profile[0])
    highest = float(profile[1])
    squares = profile[HEAD + features :]
    if not count.is_integer() or not 0 <= count <= MOST_SAMPLES:
        raise ValueError(f"it reports {count:g} documents; expected a whole number from 0 to {MOST_SAMPLES:,}")
    if not highest.is_integer() or not 0 <= highest <= MOST_GRADE:
        raise ValueError(f"its highest grade is {highest:g}; expected a whole number from 0 to {MOST_GRADE}")
    if (squares < 0).any():
        raise ValueError(f"the squares of feature {int(np.argmin(squares)) + 1} are negative")
    moments = {"count": np.array(int(count)), "sum": profile[HEAD : HEAD + features], "squares": squares}
    return int(highest), moments


def scale_from_profiles(
    replies: Mapping[ClientId, Reply], transform: Transform, highest: int = 0, features: int = 0
) -> FeatureScale:
    """The scale of the sites that have the most common number of features; the others are left out.

    `highest` and `features` are given beforehand; 0 takes the highest grade reported, and the most common number.
    """
    profiles: dict[ClientId, tuple[int, Arrays]] = {}
    for client, reply in sorted(replies.items()):
        try:
            profiles[client] = parse_document_profile(reply)
        except ValueError as error:
            log.warning("%s: %s", client, error)
            fault = f"{client}: {error}"
    if not profiles:
        raise ConfigError(f"no client sent a profile that can be read; {fault}")
    widths = Counter(len(moments["sum"]) for _, moments in profiles.values())
    # Of equally common widths the larger is taken, since files may leave out zeros at the end of their lines.
    width = features or min(widths, key=lambda count: (-widths[count], -count))
    grades: list[int] = []
    used: list[Arrays] = []
    for client, (grade, moments) in profiles.items():
        own = len(moments["sum"])
        if own != width:
            log.warning("%s has %s", client, feature_mismatch(own, width))
            continue
        grades.append(grade)
        if int(moments["count"]):
            used.append(moments)
    if not used:
        raise ConfigError(f"no client has {width} features and enough documents to send moments; set scale=FILE")
    mean, std = combine_robustly(used, width)
    return FeatureScale(tuple(mean), tuple(std), transform, highest or max(1, *grades))


def combine_robustly(moments: Sequence[Arrays], width: int) -> tuple[list[float], list[float]]:
    """Mean and deviation of each feature; no single site can shift them far."""
    means: list[float] = []
    stds: list[float] = []
    # Each feature is bounded on its own: a site may be an outlier in one and not in the others.
    for f in range(width):
        own = [{"count": m["count"], "sum": m["sum"][f : f + 1], "squares": m["squares"][f : f + 1]} for m in moments]
        mean, std = combine_moments(bound_moments(own, FAR, MOST_TIMES))
        means.append(float(mean[0]))
        stds.append(float(std[0]))
    return means, stds


def feature_mismatch(own: int, agreed: int) -> str:
    """How a site's features differ from those agreed on.

    >>> feature_mismatch(45, 46)
    'features 1 to 45, but 1 to 46 are agreed on; missing: 46'
    """
    first = min(own, agreed) + 1
    last = max(own, agreed)
    which = f"{first}" if first == last else f"{first} to {last}"
    what = "missing" if own < agreed else "too many"
    return f"features 1 to {own}, but 1 to {agreed} are agreed on; {what}: {which}"
