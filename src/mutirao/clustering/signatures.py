"""Signatures: the short vector that a client sends of its warm-up, instead of a model, and by which it is grouped.

All clients train the same test model, so what differs between them comes from their data. The last layer's bias moves
up for classes a client has and down for the others; different meanings of labels show in the last layer's weights;
different inputs show only in the layers before it.
"""

# ruff: noqa: D102  # `__call__` is documented by the class

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.randomness import Draw, Secret, rng

Vector = npt.NDArray[np.float64]
DELTA = 1e-5


@dataclass(frozen=True)
class Bias:
    """The change of the last layer's bias, as published: one number a class. It shows which classes a client has.

    A client with samples of class 1 alone moves the bias of class 1 up:

    >>> before, after = {"head.bias": np.zeros(2)}, {"head.bias": np.array([-0.3, 0.3])}
    >>> Bias()(before, after, head="head")
    array([-0.3,  0.3])
    """

    epsilon: float = 0.0  # of the noise added (0: none)
    clip: float = 1.0  # longer vectors are scaled down to this length before noise is added
    repeatable: bool = False  # noise from the run's seed, which the server has: for experiments only
    directions = False  # whether only directions are compared
    trains = True  # whether it is of the model before and after training, and not of the samples
    array = "bias"  # of the last layer

    def __call__(self, before: Arrays, after: Arrays, head: str) -> Vector:
        return array_change(before, after, f"{head}.{self.array}".lstrip("."))


@dataclass(frozen=True)
class Weights(Bias):
    """The change of the last layer's weights. It also shows different meanings of labels.

    >>> before, after = {"head.weight": np.zeros((2, 2))}, {"head.weight": np.array([[1.0, 0.0], [0.0, -1.0]])}
    >>> Weights()(before, after, head="head")
    array([ 1.,  0.,  0., -1.])
    """

    directions = True
    array = "weight"


@dataclass(frozen=True)
class Projection:
    """A random projection of the whole update, each layer scaled to length one. It also shows different inputs.

    Every number of the update is added, with a random sign, to one of `size` sums (a count sketch: Charikar, Chen and
    Farach-Colton, 2002), which keeps inner products up to an error of the order 1 / sqrt(size).

    >>> before, after = {"0.weight": np.zeros((10, 10))}, {"0.weight": np.ones((10, 10))}
    >>> len(Projection(size=16)(before, after, head="0"))  # instead of 100 numbers
    16
    """

    size: int = 2048
    epsilon: float = 0.0
    clip: float = 1.0
    repeatable: bool = False
    directions = True
    trains = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}, but must be at least 1")

    def __call__(self, before: Arrays, after: Arrays, head: str) -> Vector:
        total = np.zeros(self.size)
        for name in sorted(before):
            if before[name].dtype.kind == "f" and before[name].ndim > 1:  # biases are too noisy
                moved = array_change(before, after, name)
                where, sign = buckets(name, len(moved), self.size)
                length = float(np.linalg.norm(moved))
                total += np.bincount(where, moved * sign, self.size) / (length if length > 0 else 1.0)
        return total


NAMES: dict[str, type] = {"bias": Bias, "weights": Weights, "projection": Projection}


def array_change(before: Arrays, after: Arrays, name: str) -> Vector:
    """How far one array moved, as a vector."""
    if name not in before:
        raise ValueError(f"the model has no array {name!r}, so it cannot be a signature")
    return np.ravel(after[name].astype(np.float64) - before[name])


@lru_cache(maxsize=64)
def buckets(name: str, length: int, size: int) -> tuple[npt.NDArray[np.intp], Vector]:
    """The bucket and the sign of each number of a layer, the same for all clients and runs."""
    draw = rng(0, 0, "sketch", f"{name} {length} {size}")
    return draw.integers(0, size, length), draw.choice([-1.0, 1.0], length)


def add_noise(vector: Vector, epsilon: float, clip: float, draw: Draw, delta: float = DELTA) -> Vector:
    """The vector, clipped to length `clip`, with Gaussian noise that makes it (epsilon, delta)-private.

    This is local differential privacy: any vector of that length could be the client's, so the sensitivity is 2 clip.
    """
    length = float(np.linalg.norm(vector))
    if length > 0:
        vector = vector * min(1.0, clip / length)
    return np.asarray(vector + draw.normal(0.0, gaussian_sigma(epsilon, delta, 2 * clip), vector.shape))


def noise_of(signature: Bias | Projection) -> float:
    """The noise multiplier of a signature: standard deviation over sensitivity."""
    return gaussian_sigma(signature.epsilon, DELTA, 1.0)


def generator(repeatable: bool, seed: int, round: int, client: str) -> Draw:
    """The source of a client's noise: the operating system, since the seed would reveal the noise."""
    if repeatable:
        return rng(seed, round, "signature", client)
    return Secret()


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least standard deviation of the Gaussian mechanism, exact for any epsilon.

    Phi(s/2d - e d/s) - exp(e) Phi(-s/2d - e d/s) = delta, with s the sensitivity, d the deviation, e epsilon
    (Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018).

    >>> round(gaussian_sigma(1.0, 1e-5, 1.0), 2)
    3.73
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon!r}, but must be a number above 0")

    def excess(log_ratio: float) -> float:
        ratio = math.exp(log_ratio)  # deviation over sensitivity
        a = 0.5 / ratio
        b = epsilon * ratio
        # The logarithm of Phi, as exp(epsilon) alone overflows for a large epsilon.
        return float(ndtr(a - b) - np.exp(epsilon + log_ndtr(-a - b)) - delta)

    return sensitivity * math.exp(float(brentq(excess, -10.0, 20.0, xtol=1e-12)))
