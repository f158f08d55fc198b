"""The scale that search sites agree on: how features are put alike, how many there are, and the highest grade.

It is found from what sites tell of their documents (`profile`), or written down beforehand; it goes with every request,
and a trained ranker carries it.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mutirao.core.moments import Transform, standardise
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
