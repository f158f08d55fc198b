"""What a search site tells of its documents before the first round, and how the server makes a scale of it.

A site tells one vector of numbers: how many documents it trains on, its highest grade, and of each feature the sum and
the squared deviations. With fewer documents than `least` it tells neither, as they would say too much of each: its
count is 0 and so are its moments. The server joins these in whatever order they come.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mutirao.core.agreement import PROFILE
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.moments import Transform, combine_moments, hold_moments, measure_moments
from mutirao.core.validation import MOST_SAMPLES
from mutirao.errors import ConfigError
from mutirao.systems.ranking.feature_scale import Scale
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE

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
        mean, std = combine_moments(hold_moments(own, FAR, MOST_TIMES))
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
