"""What the server finds in replies itself: numbers that are measured of updates, and short vectors of them.

`replies:sketch` is a client's whole update; one of more than WIDTH numbers is hashed down to that many, so that
lengths and angles stay about the same (the count sketch of Charikar, Chen and Farach-Colton, ICALP 2002).
`replies:bias=C` is how far it moved the bias of the layer with C outputs, or the array of that name.
"""

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, flat
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.parts import names_of
from mutirao.core.sparse_rows import to_dense
from mutirao.errors import ConfigError
from mutirao.randomness import rng

Floats = npt.NDArray[np.float64]
WIDTH = 1024
LARGEST = 1e100  # of such numbers the squares, and sums of these, are finite


def check_vectors(needs: Collection[str], arrays: Arrays) -> None:
    """ConfigError if a model has not the layer that a part goes by, before the first round."""
    for which in wanted_biases(needs):
        bias_in(arrays, which)


def wanted_biases(needs: Collection[str]) -> list[str]:
    """The layers whose bias is asked for."""
    return [name.partition("=")[2] for name in sorted(names_of(needs, "replies")) if name.startswith("bias=")]


def bias_in(arrays: Arrays, which: str) -> str:
    """The name of the bias with so many entries, of which there must be one, or of that name."""
    if which in arrays:
        return which
    flats = {k: len(v) for k, v in arrays.items() if v.ndim == 1 and v.dtype.kind == "f" and k.endswith("bias")}
    found = [name for name, length in flats.items() if str(length) == which]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} biases with {which} entries" if which.isdecimal() else f"no layer of {which or 0!s} classes"
    held = ", ".join(sorted(flats)) or "none at all"
    raise ConfigError(f"select.layer: the model has {what} to be the output layer's; its biases are {held}")


def moves_of(current: Arrays, replies: Mapping[ClientId, Reply]) -> Floats:
    """How each client moved the model, x_k - x, a row each."""
    here = flat(current)
    return np.array([held(flat(to_dense(current, reply.arrays)) - here) for reply in replies.values()])


def lengths(moves: Floats) -> Floats:
    """|x_k - x|."""
    return np.asarray(np.linalg.norm(moves, axis=1))


def dissimilarities(moves: Floats) -> Floats:
    """1 - cos of the angle between each row and the mean of all others, each made of length 1.

    From 0 (all go the same way) to 2; 1 of one that is alone. A long update counts no more than a short one.
    """
    length = lengths(moves)
    unit = np.divide(moves, length[:, None], out=np.zeros_like(moves), where=length[:, None] > 0)
    others = unit.sum(axis=0) - unit
    far = np.linalg.norm(others, axis=1)
    cosine = np.divide(np.sum(unit * others, axis=1), far, out=np.zeros_like(far), where=far > 1e-12)
    return np.asarray(1 - cosine)


MEASURES = {"update_norm": lengths, "dissimilarity": dissimilarities}


def vectors_of(
    needs: Collection[str], current: Arrays, replies: Mapping[ClientId, Reply], seed: int
) -> dict[str, dict[ClientId, Floats]]:
    """The vectors that are needed, by kind and client."""
    out: dict[str, dict[ClientId, Floats]] = {}
    for which in wanted_biases(needs):  # mostly none: replies of a few rows are not made whole for nothing
        name = bias_in(current, which)
        ends = {c: to_dense(current, reply.arrays)[name].astype(np.float64) for c, reply in replies.items()}
        out["bias"] = {c: held(end - current[name]) for c, end in ends.items()}
    if "replies:sketch" in needs:
        moves = moves_of(current, replies)
        out["sketch"] = {c: sketch(move, seed) for c, move in zip(replies, moves, strict=True)}
    return out


def held(vector: Floats) -> Floats:
    """The vector with numbers that can be squared."""
    return np.clip(vector, -LARGEST, LARGEST)


def sketch(vector: Floats, seed: int) -> Floats:
    """WIDTH sums of numbers drawn by lot, each with a sign by lot; a short vector stays as it is."""
    if len(vector) <= WIDTH:
        return vector
    draw = rng(seed, 0, "sketch")
    bucket, sign = draw.integers(0, WIDTH, len(vector)), draw.integers(0, 2, len(vector)) * 2 - 1
    return np.bincount(bucket, weights=sign * vector, minlength=WIDTH).astype(np.float64)
