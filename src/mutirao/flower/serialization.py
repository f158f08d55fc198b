"""All arrays of a model as one of Flower's: it carries every array, and every piece of one, by requests of their own.

A bundle is a table in JSON, how long that is in four bytes before it, and the bytes of all arrays one after the other.
"""

import json
import math
import struct
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray

from mutirao.core.arrays import NUMBERS, Array, Arrays

STYPE = "mutirao.bundle"
HEAD = struct.Struct("<I")
MOST_DIMENSIONS = 32


class MalformedError(ValueError):
    """A message that does not hold what it should."""


def serialize(arrays: Arrays) -> FlowerArray:
    """Arrays in one parcel, bit for bit; their bytes are copied once."""
    table: list[list[Any]] = []
    parts: list[Any] = [b"", b""]
    for name, value in arrays.items():
        turned = not value.flags.c_contiguous and value.flags.f_contiguous
        plain = np.asarray(value.T if turned else value, order="C")
        if plain.dtype.kind not in NUMBERS:
            raise TypeError(f"{name[:80]!r} holds {plain.dtype}, not numbers")
        table.append([name, plain.dtype.str, list(value.shape), turned])
        parts.append(plain.reshape(-1).view(np.uint8).data)
    head = json.dumps(table).encode()
    parts[:2] = HEAD.pack(len(head)), head
    data = b"".join(parts)
    return FlowerArray("uint8", (len(data),), STYPE, data)


def deserialize(parcel: FlowerArray) -> Arrays:
    """The arrays of a bundle; MalformedError if it is none. No number in it is believed before all were compared."""
    data = parcel.data
    try:
        (length,) = HEAD.unpack_from(data)
        rows = json.loads(data[HEAD.size : HEAD.size + length])
        table = [array_entry(*row) for row in rows]
    except MalformedError:
        raise
    except Exception as error:
        raise MalformedError("a bundle of arrays cannot be read") from error
    if len({name for name, *_ in table}) != len(table):
        raise MalformedError("a bundle holds two arrays of one name")
    at = HEAD.size + length
    if at + sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in table) != len(data):
        raise MalformedError("the arrays of a bundle are not as long as it says")
    arrays: Arrays = {}
    for name, dtype, shape, turned in table:
        count = math.prod(shape)
        try:
            arrays[name] = array_at(data, at, dtype, shape, turned) if count else np.empty(shape, dtype)
        except ValueError as error:  # one without numbers may still claim to be too large
            raise MalformedError(f"{name[:80]!r} has no shape that an array can have") from error
        at += count * dtype.itemsize
    return arrays


def array_entry(name: Any, descr: Any, shape: Any, turned: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], bool]:
    """One line of the table, if it can be one."""
    if not isinstance(name, str) or not isinstance(descr, str) or len(shape) > MOST_DIMENSIONS:
        raise MalformedError("the table of a bundle names no array")
    if not all(type(length) is int and 0 <= length < 2**48 for length in shape):
        raise MalformedError(f"{name[:80]!r} has no shape that an array can have")
    dtype = np.dtype(descr)
    if dtype.kind not in NUMBERS or dtype.str != descr:
        raise MalformedError(f"{name[:80]!r} holds {descr[:20]!r}, not numbers")
    return name, dtype, tuple(shape), turned is True


def array_at(data: bytes, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], turned: bool) -> Array:
    """An array's own copy: handlers may write into it."""
    flat = np.frombuffer(data, dtype, math.prod(shape), at)
    return flat.reshape(shape, order="F" if turned else "C").copy(order="K")
