"""What the server finds in replies that is more than a number a client: short vectors, kept in the roster.

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
from mutirao.core.rows import whole
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


def vectors_of(
    needs: Collection[str], current: Arrays, replies: Mapping[ClientId, Reply], seed: int
) -> dict[str, dict[ClientId, Floats]]:
    """The vectors that are needed, by kind and client."""
    out: dict[str, dict[ClientId, Floats]] = {}
    biases = wanted_biases(needs)
    if not biases and "replies:sketch" not in needs:
        return out  # most rounds: replies of a few rows are not made whole for nothing
    ends = {c: whole(current, reply.arrays) for c, reply in replies.items()}
    for which in biases:
        name = bias_in(current, which)
        out["bias"] = {c: held(end[name].astype(np.float64) - current[name]) for c, end in ends.items()}
    if "replies:sketch" in needs:
        here = flat(current)
        out["sketch"] = {c: sketch(held(flat(end) - here), seed) for c, end in ends.items()}
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
