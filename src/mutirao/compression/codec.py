"""What a kind of compression has to say of itself: how the numbers of an update are encoded, and how decoded.

    u = x_k - x + e,    sent C(u),    e' = u - C(u)

x is the model received, x_k the one trained, e what earlier updates of this client lost: error feedback (Seide, Fu,
Droppo, Li and Yu, 2014; Karimireddy, Rebjock, Stich and Jaggi, 2019). It stays in the site's state. The server takes
x + C(u) for the client's model, so that any aggregator, filter or check goes on as if nothing had been compressed.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays

Vector = npt.NDArray[Any]  # all numbers of floating point of a model, one after the other


class Malformed(Exception):
    """An encoding that cannot be; `kind` is that of the failure it becomes."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Codec:
    """Two functions on the numbers of an update."""

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]]  # the arrays that travel; their names hold an `@`
    feedback: bool  # whether what was lost is added to the client's next update

    def names(self, model: Arrays) -> list[str]:
        """The arrays of a model that are encoded, sorted: all of floating point; whole numbers travel as they are."""
        names = sorted(name for name, value in model.items() if value.dtype.kind == "f")
        return names if any(model[name].size for name in names) and self.keys.isdisjoint(model) else []

    @abstractmethod
    def encode(self, update: Arrays, names: list[str], draw: np.random.Generator) -> Arrays:
        """The arrays of these names as they travel; none of them holds a NaN or an infinity."""

    @abstractmethod
    def decode(self, sent: Arrays, like: Arrays, names: list[str]) -> Vector:
        """The numbers of these arrays that stand in what was sent; Malformed if they cannot."""


def concatenate_arrays(arrays: Arrays, names: list[str]) -> Vector:
    """Their numbers one after the other, in the widest of their types."""
    return np.concatenate([np.ravel(arrays[name]) for name in names])


def split_into_arrays(line: Vector, like: Arrays, names: list[str]) -> Arrays:
    """A line of numbers as arrays of the shapes and types of `like`."""
    out: Arrays = {}
    at = 0
    with np.errstate(over="ignore"):  # what is too large for its type becomes infinite, which the round's checks name
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
