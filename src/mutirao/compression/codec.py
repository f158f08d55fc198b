"""Codecs: how the numbers of an update are encoded and decoded, with error feedback.

    u = x_k - x + e,    sent C(u),    e' = u - C(u)

x is the model received, x_k the one trained, e the error of earlier updates of this client: error feedback (Seide, Fu,
Droppo, Li and Yu, 2014; Karimireddy, Rebjock, Stich and Jaggi, 2019). It stays in the site's state. The server takes
x + C(u) for the client's model, so that aggregators, filters and checks work as without compression.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays

Vector = npt.NDArray[Any]  # all floating-point numbers of a model as one vector


class Malformed(Exception):
    """An invalid encoding; `kind` is that of the failure it becomes."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Codec:
    """A codec: `encode` and `decode` for the numbers of an update."""

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]]  # the arrays that are sent; their names contain an `@`
    feedback: bool  # whether what was lost is added to the client's next update

    def names(self, model: Arrays) -> list[str]:
        """The arrays of a model that are encoded, sorted: all of floating point; integers are sent unchanged."""
        names = sorted(name for name, value in model.items() if value.dtype.kind == "f")
        # A model with an array of the codec's own key would be confused with its encoding, so it is sent plain.
        if any(model[name].size for name in names) and self.keys.isdisjoint(model):
            return names
        return []

    @abstractmethod
    def encode(self, update: Arrays, names: list[str], draw: np.random.Generator) -> Arrays:
        """The arrays of these names as they are sent; none of them has a NaN or an infinity."""

    @abstractmethod
    def decode(self, sent: Arrays, like: Arrays, names: list[str]) -> Vector:
        """The numbers of these arrays from what was sent; raises Malformed if it is invalid."""


def concatenate_arrays(arrays: Arrays, names: list[str]) -> Vector:
    """All their numbers as one vector, in the widest of their dtypes."""
    return np.concatenate([np.ravel(arrays[name]) for name in names])


def split_into_arrays(line: Vector, like: Arrays, names: list[str]) -> Arrays:
    """A vector as arrays of the shapes and dtypes of `like`."""
    out: Arrays = {}
    at = 0
    with np.errstate(over="ignore"):  # a value too large for its dtype becomes inf, which the checks report
        for name in names:
            mine = like[name]
            out[name] = line[at : at + mine.size].reshape(mine.shape).astype(mine.dtype, copy=False)
            at += mine.size
    return out


def width(like: Arrays, names: list[str]) -> np.dtype[Any]:
    """The widest type of these arrays."""
    return np.result_type(*(like[name].dtype for name in names))


def take(sent: Arrays, name: str, kind: npt.DTypeLike, size: int) -> Array:
    """One array of an encoding; Malformed if it is missing, of another type, or not of this size."""
    found = sent.get(name)
    if found is None:
        raise Malformed("missing_key", f"did not send {name!r}")
    if found.dtype != np.dtype(kind):
        raise Malformed("dtype", f"{name!r} is {found.dtype}, expected {np.dtype(kind)}")
    if found.shape != (size,):
        kind_of = "too_large" if found.size > size else "shape"
        raise Malformed(kind_of, f"{name!r} has shape {found.shape}, expected {(size,)}")
    return found
