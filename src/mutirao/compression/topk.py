"""Top-k sparsification: only the largest numbers of an update are sent, with their positions."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mutirao.compression.codec import Malformed, Vector, concatenate_arrays, take, width
from mutirao.compression.methods import CodecCompression
from mutirao.core.arrays import Array, Arrays

WHERE = "topk@where"
VALUES = "topk@values"
Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class TopK(CodecCompression):
    """The share of an update's numbers with the largest |u_i| over the whole model is sent; the rest counts as 0.

    Of equal ones the first. Positions are sent as numbers or as a mask of bits, whichever is shorter. Aji and
    Heafield, 2017; with error feedback Stich, Cordonnier and Jaggi, 2018.

    >>> codec, update = TopK(share=0.5), {"w": np.array([0.1, -3.0, 0.0, 2.0], np.float32)}
    >>> sent = codec.encode(update, ["w"], np.random.default_rng(0))
    >>> codec.decode(sent, update, ["w"])  # the largest half of the numbers is sent
    array([ 0., -3.,  0.,  2.], dtype=float32)
    """

    share: float = 0.01
    feedback: bool = True
    name: ClassVar[str] = "topk"
    keys: ClassVar[frozenset[str]] = frozenset({WHERE, VALUES})

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}, it must be above 0 and at most 1")

    def count(self, size: int) -> int:
        """How many of so many numbers are sent: at least one."""
        return min(size, max(1, ceil(self.share * size)))

    def encode(self, update: Arrays, names: list[str], draw: np.random.Generator) -> Arrays:
        """The largest numbers and their positions."""
        line = concatenate_arrays(update, names)
        places = largest(np.abs(line), self.count(line.size))
        return {WHERE: write_places(places, line.size), VALUES: line[places]}

    def decode(self, sent: Arrays, like: Arrays, names: list[str]) -> Vector:
        """A vector of zeros except for what was sent."""
        size = sum(like[name].size for name in names)
        count = self.count(size)
        values = take(sent, VALUES, width(like, names), count)
        if not np.isfinite(values).all():
            raise Malformed("not_finite", "sent NaN or infinity in its update")
        line = np.zeros(size, values.dtype)
        line[read_places(sent, size, count)] = values
        return line


def largest(sizes: Vector, count: int) -> Places:
    """The positions of the `count` largest, in rising order; of equal ones the first, on every machine."""
    # np.argpartition may take any of equal numbers; with a threshold it is the first, on every machine.
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above = np.flatnonzero(sizes > least)
    equal = np.flatnonzero(sizes == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def is_mask(size: int, count: int) -> bool:
    """Whether a bit for each of `size` numbers takes less than the positions of `count` of them."""
    # Both sides decide by sizes that they have anyway, so no flag is sent.
    return (size + 7) // 8 < count * kind_of_place(size).itemsize


def kind_of_place(size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest dtype for a position among so many."""
    if size <= 2**16:
        return np.dtype(np.uint16)
    if size <= 2**32:
        return np.dtype(np.uint32)
    return np.dtype(np.uint64)


def write_places(places: Places, size: int) -> Array:
    """Positions as they are sent."""
    if not is_mask(size, len(places)):
        return places.astype(kind_of_place(size))
    bits = np.zeros(size, np.bool_)
    bits[places] = True
    return np.packbits(bits)


def read_places(sent: Arrays, size: int, count: int) -> Places:
    """The positions that were sent: `count` different ones below `size`, or Malformed."""
    if is_mask(size, count):
        bits = np.unpackbits(take(sent, WHERE, np.uint8, (size + 7) // 8))
        places = np.flatnonzero(bits)
        if len(places) != count or places[-1] >= size:
            raise Malformed("malformed", f"{WHERE!r} does not name {count} of {size} numbers")
        return places
    found = take(sent, WHERE, kind_of_place(size), count)
    if found[-1] >= size or not (found[1:] > found[:-1]).all():
        raise Malformed("malformed", f"{WHERE!r} is not in rising order from 0 to {size - 1}")
    return found.astype(np.intp)
