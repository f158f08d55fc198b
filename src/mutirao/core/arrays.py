"""A model is a dict of named NumPy arrays; functions on such dicts, which keep dtypes and ignore their order.

Digests of models, replies and other values are the same on both sides of a connection.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
"""A model: its arrays by name, as they are sent, averaged and saved.

>>> model: Arrays = {"0.weight": np.zeros((2, 3), np.float32), "0.bias": np.zeros(2, np.float32)}
>>> nbytes(model)
32
"""

NUMBERS = "biufc"  # the kinds of NumPy dtypes that may be sent: no objects, no text, no structures
JOINT = 50  # times the model: the largest array that replies are views of and that is still checked as one
SMALL = 10_000  # numbers; BLAS works on longer arrays with several threads


def cast_to(values: Array, dtype: npt.DTypeLike) -> Array:
    """Cast float64 `values` to `dtype`; integers are rounded to the nearest, halves to even."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        low = float(np.iinfo(kind).min)
        high = float(np.iinfo(kind).max)
        # 2**63 - 1 has no float64, and the next number above it would wrap to the other end.
        if high > np.iinfo(kind).max:
            high = float(np.nextafter(high, 0))
        values = np.clip(np.rint(values), low, high)
    elif kind.kind == "b":
        values = values >= 0.5
    with np.errstate(over="ignore"):  # a value too large for its type becomes inf, which the round reports
        return np.asarray(values, dtype=kind)


def weighted_mean(arrays: Mapping[str, Arrays], weights: Mapping[str, float]) -> Arrays:
    """sum_k w_k x_k / sum_k w_k by name, summed in float64 in the order of the sorted client names.

    >>> one, two = {"w": np.array([0.0])}, {"w": np.array([4.0])}
    >>> weighted_mean({"ana": one, "bia": two}, {"ana": 3, "bia": 1})
    {'w': array([1.])}
    """
    clients = sorted(arrays)
    total = float(sum(weights[c] for c in clients))
    if not clients or total <= 0:
        raise ValueError("a weighted mean needs at least one client with a positive weight")
    shares = [weights[c] / total for c in clients]
    return {name: average_arrays([arrays[c][name] for c in clients], shares) for name in arrays[clients[0]]}


def blend(values: Sequence[Array], shares: Sequence[float]) -> npt.NDArray[np.float64]:
    """sum_k share_k value_k in float64, added up in the order given."""
    # One by one in the order given: floating-point sums depend on it, and the methods sort the clients by name.
    total = np.asarray(np.multiply(values[0], shares[0], dtype=np.float64))
    for value, share in zip(values[1:], shares[1:], strict=True):
        total += np.multiply(value, share, dtype=np.float64)
    return total


def average_arrays(values: Sequence[Array], shares: Sequence[float]) -> Array:
    """The blend in the dtype of the values; integers that are equal in all stay unchanged, however large."""
    first = values[0]
    # float64 would spoil ids and hashes above 2**53.
    if first.dtype.kind in "iub" and all(np.array_equal(first, v) for v in values[1:]):
        return np.array(first)
    return cast_to(blend(values, shares), first.dtype)


def each(f: Callable[..., Array], first: Arrays, *others: Arrays) -> Arrays:
    """Apply `f` name by name in float64, and cast the results to the dtypes of `first`."""
    result = {}
    for name, x in first.items():
        wide = [a[name].astype(np.float64) for a in (first, *others)]
        result[name] = cast_to(f(*wide), x.dtype)
    return result


def mix(a: Arrays, b: Arrays, share: float) -> Arrays:
    """(1 - share) a + share b."""
    return each(lambda x, y: (1 - share) * x + share * y, a, b)


def flat(arrays: Arrays) -> npt.NDArray[np.float64]:
    """All numbers in one float64 vector, in the order of the sorted names."""
    if not arrays:
        return np.zeros(0)
    return np.concatenate([np.ravel(arrays[k]).astype(np.float64) for k in sorted(arrays)])


def part_of(arrays: Arrays, group: str) -> Arrays:
    """The arrays of one group, by their own names; without a group, all of them."""
    if not group:
        return arrays
    prefix = group + "/"
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def as_part(arrays: Arrays, group: str) -> Arrays:
    """Arrays of one group, by the names they have among those of all."""
    if group:
        return {f"{group}/{k}": v for k, v in arrays.items()}
    return arrays


def is_finite(arrays: Arrays) -> bool:
    """Whether no array holds a NaN or an infinity."""
    return all(map(_finite, arrays.values()))  # hundreds of calls a round: a generator would be slower


def _finite(v: Array) -> bool:
    if v.dtype.kind not in "fc":
        return True
    # A finite sum of squares has no NaN or infinity in it; one that merely overflows is examined number by number.
    if v.size <= SMALL and v.dtype.char in "fd" and math.isfinite(np.vdot(v, v)):
        return True
    return bool(np.count_nonzero(np.isfinite(v)) == v.size)  # quicker than all()


def square(arrays: Arrays) -> float:
    """The sum of squares of all floating-point numbers; not finite if one is not, or if it overflows."""
    return squares([arrays])[0]


def squares(models: Iterable[Arrays]) -> list[float]:
    """The `square` of each."""
    totals = []
    with np.errstate(over="ignore", invalid="ignore"):  # entered once: it takes as long as the square of a small model
        for arrays in models:
            total = 0.0
            for v in arrays.values():
                if v.size <= SMALL and v.dtype.char in "fd":  # nearly always: there are hundreds of calls a round
                    total += float(np.vdot(v, v))
                elif v.dtype.kind == "f":
                    line = np.ravel(v if v.dtype.char in "fd" else v.astype(np.float64))
                    parts = (line[i : i + SMALL] for i in range(0, line.size, SMALL))
                    total += sum(float(np.vdot(part, part)) for part in parts)
            totals.append(total)
    return totals


def joint_square(current: Arrays, models: Collection[Arrays]) -> float:
    """An upper bound of each model's `square`: that of the arrays of which they are all views, name by name.

    Models that were trained together mostly are such views, and one sum then shows that all are valid. The bound is
    infinite, which says nothing, if a model is not a view, or if the array has other contents or is too large.
    """
    total = 0.0
    for name, mine in current.items():
        if mine.dtype.kind not in "fc":
            continue
        base = next((arrays[name].base for arrays in models), None)
        size = 0
        if not isinstance(base, np.ndarray) or base.dtype.char not in "fd" or base.size > JOINT * mine.size:
            return math.inf
        for arrays in models:
            piece = arrays[name]
            # A view that is not contiguous, such as a broadcast one, may contain a number of the base many times.
            if piece.base is not base or piece.dtype != base.dtype or not piece.flags.c_contiguous:
                return math.inf
            size += piece.size
        if base.size > size or not base.flags.c_contiguous:
            return math.inf
        total += square({name: base})
    return total


def nbytes(arrays: Arrays) -> int:
    """The size of all arrays in bytes."""
    total = 0
    for v in arrays.values():
        total += v.nbytes
    return total


def digest(arrays: Arrays) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the sorted names.

    >>> one, same = {"w": np.zeros(2)}, {"w": np.zeros(2)}
    >>> digest(one) == digest(same), digest(one) == digest({"w": np.zeros(3)})
    (True, False)
    """
    sha = hashlib.sha256()
    for name in sorted(arrays):
        value = np.asarray(arrays[name], order="C")
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        sha.update(f"{name}\x1f{little.dtype.str}\x1f{value.shape}\x1e".encode())
        sha.update(little.reshape(-1).view(np.uint8).data)  # without a copy
    return sha.hexdigest()


def fingerprint(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
