"""Fixed-point updates: integers that add up modulo 2^32 or 2^64 without wrapping, and the mean that they encode.

A number d of an update becomes q = round(d / step), step = range / 2^(bits - 1), and a client adds w q to the sum,
where w is its number of samples. The weighted mean sum(w q) step / sum(w) is then within step / 2 of the exact one
(step, if lengths are clipped: then numbers are rounded towards 0, so that no update gets longer). Weights are exact,
and so are integer arrays: their changes are summed without rounding.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, cast_to, flat
from mutirao.core.fleet import Reply
from mutirao.errors import ConfigError
from mutirao.privacy import clip_update
from mutirao.privacy.secure_aggregation.settings import Settings
from mutirao.randomness import Secret

Words = npt.NDArray[Any]  # uint32 or uint64
METRIC = 2.0**20  # metrics are clipped to plus or minus this
SIGNED = {np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}


@dataclass(frozen=True)
class FixedPoint:
    """The encoding of one sum: for this many `clients`, and the `metrics` that are summed with the update."""

    secure: Settings
    clients: int
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.secure.bits + self.count_bits > 64 or self.fraction < 4:
            raise ConfigError(
                f"secure: {self.clients} clients of {self.secure.most_samples} samples each do not fit with "
                f"{self.secure.bits} bits; lower secure.most_samples or secure.bits"
            )

    @property
    def count_bits(self) -> int:
        """Bits of the largest possible sum of weights."""
        return (self.secure.most_samples * self.clients).bit_length()

    @property
    def word(self) -> np.dtype[Any]:
        """The smallest word in which no sum of updates wraps: |sum| <= clients most 2^(bits - 1), below half of it."""
        if self.secure.bits + self.count_bits <= 32:
            return np.dtype(np.uint32)
        return np.dtype(np.uint64)

    @property
    def step(self) -> float:
        """The value of 1 in an encoded update."""
        return math.ldexp(self.secure.range, 1 - self.secure.bits)

    @property
    def fraction(self) -> int:
        """Fractional bits of a metric."""
        return min(30, 62 - 20 - self.count_bits)

    def write(self, current: Arrays, reply: Reply, weight: int) -> tuple[Words, Words]:
        """A client's part of the sum: the update in words; weight, metrics and integers in wide words."""
        update: Arrays = {}
        changes: list[npt.NDArray[np.int64]] = []
        if reply.arrays:
            update = self.update_of(current, reply)
            changes = [self.change_of(current[k], reply.arrays[k]) * weight for k in integers(current)]
        most = 2.0 ** (self.secure.bits - 1)
        with np.errstate(over="ignore"):
            scaled = np.clip(flat(update) / self.step, -most, most)
        rounded = np.rint(scaled)
        if self.secure.clip:
            # Towards 0: rounding must not make a clipped update longer.
            rounded = np.trunc(scaled)
        words = rounded.astype(np.int64) * weight
        wide = [weight]
        for name in self.metrics:
            value = reply.metrics.get(name)
            if value is None:
                wide += [0, 0]
                continue
            level = round(math.ldexp(min(max(value, -METRIC), METRIC), self.fraction))
            wide += [weight, weight * level]
        # Negative numbers become their two's complement, which adds up correctly modulo 2^32 or 2^64.
        return words.astype(self.word), np.concatenate([np.array(wide, np.int64), *changes]).view(np.uint64)

    def update_of(self, current: Arrays, reply: Reply) -> Arrays:
        """The update of the floating-point arrays, clipped and noised if configured."""
        if self.secure.clip:
            update = clip_update(current, reply.arrays, self.secure.clip)[0]
            deviation = self.secure.noise
            if deviation:
                # This client's share of the noise, so that the server never sees the sum without noise.
                return {k: u + Secret().normal(0.0, deviation * self.secure.clip, u.shape) for k, u in update.items()}
            return update
        return {k: reply.arrays[k].astype(np.float64) - v for k, v in current.items() if v.dtype.kind == "f"}

    def change_of(self, mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The change of integer arrays, limited to what the sum can hold."""
        most = 2 ** (62 - self.count_bits)
        return np.ravel(np.clip(theirs.astype(np.int64) - mine.astype(np.int64), -most, most))

    def sizes(self, current: Arrays, trained: bool) -> tuple[int, int]:
        """The number of words and of wide words of a part."""
        figures = 1 + 2 * len(self.metrics)
        if not trained:
            return 0, figures
        update = sum(v.size for v in current.values() if v.dtype.kind == "f")
        return update, figures + sum(current[k].size for k in integers(current))

    def read(self, current: Arrays, update: Words, wide: Words, trained: bool) -> tuple[Arrays, dict[str, float], int]:
        """The mean model, the mean metrics and the sum of weights that a sum encodes."""
        counts = wide.view(np.int64)
        total = int(counts[0])
        known = counts[1 : 1 + 2 * len(self.metrics)].reshape(-1, 2)
        if not 0 < total <= self.secure.most_samples * self.clients:
            raise ValueError(f"the sum of the weights is {total}, which these clients cannot have")
        metrics = {
            name: math.ldexp(float(level) / float(weight), -self.fraction)
            for name, (weight, level) in zip(self.metrics, known.tolist(), strict=True)
            if weight > 0
        }
        if not trained:
            return {}, metrics, total
        mean = update.view(SIGNED[update.dtype]) * (self.step / total)
        arrays = dict(current)
        at = 0
        for name in sorted(k for k, v in current.items() if v.dtype.kind == "f"):
            x = current[name]
            arrays[name] = cast_to(x + mean[at : at + x.size].reshape(x.shape), x.dtype)
            at += x.size
        rest = counts[1 + 2 * len(self.metrics) :]
        at = 0
        for name in integers(current):
            x = current[name]
            arrays[name] = shift(x, rest[at : at + x.size].reshape(x.shape), total)
            at += x.size
        return arrays, metrics, total

    def text(self) -> str:
        """The settings of the encoding as JSON; all parties must have the same."""
        names = ("threshold", "least", "clip", "range", "bits", "most_samples", "sizes", "noise")
        return json.dumps({k: getattr(self.secure, k) for k in names}, sort_keys=True)


def integers(arrays: Mapping[str, npt.NDArray[Any]]) -> Sequence[str]:
    """The names of integer and boolean arrays."""
    return sorted(k for k, v in arrays.items() if v.dtype.kind in "iub")


def shift(x: npt.NDArray[Any], change: npt.NDArray[np.int64], total: int) -> npt.NDArray[Any]:
    """Integers moved by the rounded mean change; halves round to the even result, as in a plain mean."""
    # divmod rounds down for negative changes, too, so that 0 <= left < total always.
    low, left = np.divmod(change, total)
    if x.dtype.kind == "b":
        return np.asarray(2 * (x.astype(np.int64) * total + change) >= total)
    up = (2 * left > total) | ((2 * left == total) & ((x.astype(np.int64) + low) % 2 == 1))
    return np.asarray((x.astype(np.int64) + low + up).astype(x.dtype))
