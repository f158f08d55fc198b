"""8-bit quantization: each number of an update is sent as one of 255 levels, with one scale for each array."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from mutirao.compression.codec import Malformed, Vector, take, width
from mutirao.compression.methods import CodecCompression
from mutirao.core.arrays import Arrays

CODES = "int8@codes"
SCALES = "int8@scales"
LEVELS = 127  # on either side of 0


@dataclass(frozen=True)
class Int8(CodecCompression):
    """C(u) = s round(u / s) with s = max|u| / 127 of each array.

    With rounding=stochastic floor(u / s + r), r uniform in [0, 1): unbiased (QSGD: Alistarh, Grubic, Li,
    Tomioka and Vojnovic, 2017).

    >>> import numpy as np
    >>> codec, update = Int8(), {"w": np.array([0.3, -1.27, 0.004], np.float32)}
    >>> sent = codec.encode(update, ["w"], np.random.default_rng(0))
    >>> sent["int8@codes"], codec.decode(sent, update, ["w"]).round(2)
    (array([  30, -127,    0], dtype=int8), array([ 0.3 , -1.27,  0.  ], dtype=float32))
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = True
    name: ClassVar[str] = "int8"
    keys: ClassVar[frozenset[str]] = frozenset({CODES, SCALES})

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is {self.rounding!r}, it must be nearest or stochastic")

    def encode(self, update: Arrays, names: list[str], draw: np.random.Generator) -> Arrays:
        """Levels of all numbers, and the scale of each array."""
        scales = np.zeros(len(names), kind_of_scale(update, names))
        codes = []
        for i, name in enumerate(names):
            line = np.ravel(update[name])
            # Read back from the array, so that the divisor is the rounded scale by which the decoder multiplies.
            scales[i] = np.max(np.abs(line), initial=0) / LEVELS
            codes.append(self.quantise(line, float(scales[i]), draw))
        return {CODES: np.concatenate(codes), SCALES: scales}

    def quantise(self, line: Vector, scale: float, draw: np.random.Generator) -> Vector:
        """The level of each number."""
        if not scale:  # all are 0, or too small for their type
            return np.zeros(line.size, np.int8)
        steps = line.astype(np.float64) / scale
        steps = np.rint(steps) if self.rounding == "nearest" else np.floor(steps + draw.random(line.size))
        return np.clip(steps, -LEVELS, LEVELS).astype(np.int8)

    def decode(self, sent: Arrays, like: Arrays, names: list[str]) -> Vector:
        """Level times scale."""
        sizes = [like[name].size for name in names]
        codes = take(sent, CODES, np.int8, sum(sizes))
        scales = take(sent, SCALES, kind_of_scale(like, names), len(names))
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise Malformed("not_finite", f"{SCALES!r} has an invalid scale")
        with np.errstate(over="ignore"):
            return np.asarray(codes * np.repeat(scales, sizes))


def kind_of_scale(like: Arrays, names: list[str]) -> np.dtype[Any]:
    """The dtype of the scales: that of the model, at least float32."""
    return np.promote_types(width(like, names), np.float32)
