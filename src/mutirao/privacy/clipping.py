"""Clipping of updates, noise on updates, and adaptive clipping.

The length of updates is not known beforehand. So the clip C moves towards the quantile g of their lengths:
C' = C exp(-lr (b - g)), where b is the share of clients whose update was not longer than C, noised as well. Andrew,
Thakkar, McMahan and Ramaswamy, 2021: Differentially Private Learning with Adaptive Clipping.
"""

import math
from dataclasses import dataclass

import numpy as np

from mutirao.core.arrays import Arrays, cast_to
from mutirao.core.sparse_rows import ROWS
from mutirao.randomness import Draw


def clip_update(current: Arrays, model: Arrays, clip: float) -> tuple[Arrays, float]:
    """The update model - current in float64, scaled to length `clip` if it is longer; and the factor.

    Of a table that came as rows (`items@rows`), these rows.

    >>> update, factor = clip_update({"w": np.zeros(2)}, {"w": np.array([3.0, 4.0])}, clip=1.0)
    >>> update["w"], factor  # from length 5 to length 1
    (array([0.6, 0.8]), 0.2)
    """
    update: Arrays = {}
    for name in (k for k, v in current.items() if v.dtype.kind == "f"):
        rows = model.get(name + ROWS)
        update[name] = model[name].astype(np.float64) - (current[name] if rows is None else current[name][rows])
    length = math.sqrt(math.fsum(float(np.vdot(u, u)) for u in update.values()))
    if not math.isfinite(length):
        # An update that cannot be bounded must not count.
        return {k: np.zeros_like(u) for k, u in update.items()}, 0.0
    scale = min(1.0, clip / length) if length else 1.0
    return {k: scale * u for k, u in update.items()}, scale


def add_noise(current: Arrays, update: Arrays, draw: Draw, deviation: float, share: float = 1.0) -> Arrays:
    """current + share (update + Gaussian noise); arrays that are not floating-point stay as they are.

    >>> draw = np.random.default_rng(0)
    >>> noised = add_noise({"w": np.zeros(10_000)}, {"w": np.ones(10_000)}, draw, deviation=2.0)["w"]
    >>> round(float(noised.mean()), 1), round(float(noised.std()), 1)
    (1.0, 2.0)
    """
    out = dict(current)
    for name in sorted(update):
        noise = draw.normal(0.0, deviation, update[name].shape)
        out[name] = cast_to(current[name] + share * (update[name] + noise), current[name].dtype)
    return out


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip that follows the `quantile` of the updates' lengths, at the rate `lr`.

    How many were not longer is released with the updates, with noise of deviation `count_noise`.
    """

    quantile: float
    lr: float
    count_noise: float

    def update_noise(self, noise: float) -> float:
        """The noise z_u of the updates, so that updates and count together cost what `noise` z alone would.

        1 / z^2 = 1 / z_u^2 + 1 / (2 count_noise)^2. A client moves the sum of `halves` by at most 1/2, whence the 2.

        >>> round(AdaptiveClip(0.5, 0.2, 5.0).update_noise(1.0), 4)
        1.005
        """
        return math.sqrt(1 / (1 / noise**2 - 1 / (2 * self.count_noise) ** 2))

    def next(self, clip: float, halves: float, expected: float) -> float:
        """C exp(-lr (b - quantile)), with b = halves / expected + 1/2.

        `halves` is the noised sum, over the clients of the round, of 1/2 (not longer than C) or -1/2 (longer).

        >>> AdaptiveClip(0.5, 0.2, 5.0).next(1.0, 0.0, 10.0)  # as many below as above
        1.0
        """
        return clip * math.exp(-self.lr * (halves / expected + 0.5 - self.quantile))
