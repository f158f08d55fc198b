"""What the server measures of updates itself: numbers such as their lengths, and short vectors of them.

`sketch` is a client's whole update; one of more than WIDTH numbers is hashed down to that many, so that
lengths and angles stay about the same (the count sketch of Charikar, Chen and Farach-Colton, ICALP 2002).
A bias update is how far it moved the bias of the layer with C outputs, or the array of that name.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, flat
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.sparse_rows import to_dense
from mutirao.errors import ConfigError
from mutirao.randomness import rng

Floats = npt.NDArray[np.float64]
WIDTH = 1024
LARGEST = 1e100  # squares of such numbers, and sums of these, are finite


def check_vectors(needs: Needs, arrays: Arrays) -> None:
    """Raise ConfigError, before the first round, if the model does not have the layer that a part needs."""
    for which in needs.biases:
        bias_in(arrays, which)


def bias_in(arrays: Arrays, which: str) -> str:
    """The name of the only bias with so many entries, or of that name."""
    if which in arrays:
        return which
    flats = {k: len(v) for k, v in arrays.items() if v.ndim == 1 and v.dtype.kind == "f" and k.endswith("bias")}
    found = [name for name, length in flats.items() if str(length) == which]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} biases with {which} entries" if which.isdecimal() else f"no layer of {which or 0!s} classes"
    names = ", ".join(sorted(flats)) or "none"
    raise ConfigError(f"select.layer: the model has {what} as its output layer; its biases are {names}")


def moves_of(current: Arrays, replies: Mapping[ClientId, Reply]) -> Floats:
    """The updates x_k - x, one row for each client."""
    here = flat(current)
    return np.array([clipped(flat(to_dense(current, reply.arrays)) - here) for reply in replies.values()])


def lengths(moves: Floats) -> Floats:
    """|x_k - x|."""
    return np.asarray(np.linalg.norm(moves, axis=1))


def dissimilarities(moves: Floats) -> Floats:
    """1 - cos of the angle between each row and the mean of all others, each scaled to length 1.

    From 0 (all in the same direction) to 2; 1 for a single client. A long update counts no more than a short one.
    """
    length = lengths(moves)
    unit = np.divide(moves, length[:, None], out=np.zeros_like(moves), where=length[:, None] > 0)
    others = unit.sum(axis=0) - unit
    far = np.linalg.norm(others, axis=1)
    # Where the others cancel, rounding leaves some 1e-16, which is no direction.
    cosine = np.divide(np.sum(unit * others, axis=1), far, out=np.zeros_like(far), where=far > 1e-12)
    return np.asarray(1 - cosine)


MEASURES = {"update_norm": lengths, "dissimilarity": dissimilarities}


def vectors_of(
    needs: Needs, current: Arrays, replies: Mapping[ClientId, Reply], seed: int
) -> dict[str, dict[ClientId, Floats]]:
    """The vectors that are needed, by kind and client."""
    out: dict[str, dict[ClientId, Floats]] = {}
    for which in sorted(needs.biases):  # mostly none, so that sparse replies are not made dense needlessly
        name = bias_in(current, which)
        ends = {c: to_dense(current, reply.arrays)[name].astype(np.float64) for c, reply in replies.items()}
        out["bias"] = {c: clipped(end - current[name]) for c, end in ends.items()}
    if "sketch" in needs.server:
        moves = moves_of(current, replies)
        out["sketch"] = {c: sketch(move, seed) for c, move in zip(replies, moves, strict=True)}
    return out


def clipped(vector: Floats) -> Floats:
    """The vector with numbers that can be squared without overflow."""
    return np.clip(vector, -LARGEST, LARGEST)


def sketch(vector: Floats, seed: int) -> Floats:
    """The count sketch: WIDTH random sums with random signs; a short vector is unchanged."""
    if len(vector) <= WIDTH:
        return vector
    # The same buckets in every round and for every client, or else sketches could not be compared.
    draw = rng(seed, 0, "sketch")
    bucket = draw.integers(0, WIDTH, len(vector))
    sign = draw.integers(0, 2, len(vector)) * 2 - 1
    return np.bincount(bucket, weights=sign * vector, minlength=WIDTH).astype(np.float64)
