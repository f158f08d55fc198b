"""What a server can read out of an update: samples by a model crafted for it, and whether a sample was among them.

In a dense layer with ReLU the update of a unit is sum_k g_k x_k over the samples that activate it, and that of its
bias sum_k g_k. Where only one sample does, the quotient of the two is that sample (Phong et al., 2018). A server
chooses the weights so that this is often so: many thresholds along one direction (Fowl et al., 2022), or units that
few samples reach at all (Boenisch et al., 2023), or only the one it asks about (Nguyen et al., 2023).
"""

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
RECOVERED = 0.1  # |found - x| / |x| below which a sample counts as recovered


def dense_pair(arrays: Arrays, features: int) -> tuple[str, str, str, str]:
    """The names of both layers' weights and biases, of a model of two dense layers on so many features."""
    shapes = [(name, array.shape) for name, array in arrays.items()]
    if [len(shape) for _, shape in shapes] == [2, 1, 2, 1]:
        (w1, (units, wide)), (b1, _), (w2, (_, deep)), (b2, _) = shapes
        if wide == features and deep == units:
            return w1, b1, w2, b2
    raise ConfigError("this attack is on models of two dense layers and flat samples, such as the quickstart's")


def craft(arrays: Arrays, directions: Floats, thresholds: Floats, steepness: float, weight: float) -> Arrays:
    """The model whose hidden unit i is steepness * relu(directions_i x - thresholds_i), and moves as all others do."""
    w1, b1, w2, b2 = dense_pair(arrays, directions.shape[1])
    outputs, units = arrays[w2].shape
    spread = weight * np.linspace(-1.0, 1.0, outputs)  # no class leaves the mean where it is
    made = {w1: steepness * directions, b1: -steepness * thresholds, w2: np.tile(spread[:, None], (1, units))}
    made[b2] = np.zeros(outputs)
    return {k: made[k].astype(v.dtype) for k, v in arrays.items()}


def craft_thresholds(arrays: Arrays, known: Floats, draw: np.random.Generator) -> Arrays:
    """One direction for all units, and thresholds where samples like the `known` ones are expected."""
    units = next(iter(arrays.values())).shape[0]
    direction = unit_vectors(draw.normal(size=(1, known.shape[1])))
    along = known @ direction[0]
    levels = quantiles((np.arange(units) + 0.5) / units, along.mean(), 1.1 * along.std())
    return craft(arrays, np.repeat(direction, units, 0), levels, 1e-4, 1.0)


def craft_rare(arrays: Arrays, known: Floats, samples: int, draw: np.random.Generator) -> Arrays:
    """A direction for each unit, and a threshold that about one of so many samples passes."""
    units = next(iter(arrays.values())).shape[0]
    directions = unit_vectors(draw.normal(size=(units, known.shape[1])))
    along = known @ directions.T
    return craft(arrays, directions, quantiles(1 - 2 / samples, along.mean(0), along.std(0)), 10.0, 1.0)


def craft_question(arrays: Arrays, known: Floats, candidates: Floats) -> Arrays:
    """A unit for each candidate that it alone activates: far out along its own direction, in whitened coordinates."""
    units, centre = next(iter(arrays.values())).shape[0], known.mean(0)
    spread = np.cov(known.T) + 0.01 * np.eye(known.shape[1])
    directions = unit_vectors(np.linalg.solve(spread, (candidates - centre).T).T)
    own, middle = (directions * candidates).sum(1), directions @ centre
    thresholds = middle + 0.95 * (own - middle)
    spare = units - len(candidates)  # units that nothing activates
    far = np.full(spare, 1e6)
    directions = np.vstack([directions, np.zeros((spare, known.shape[1]))])
    return craft(arrays, directions, np.concatenate([thresholds, far]), 10.0, 0.1)


def first_layer(before: Arrays, after: Arrays, features: int) -> tuple[Floats, Floats]:
    """How far the weights and biases of the hidden units moved."""
    w1, b1, *_ = dense_pair(before, features)
    return after[w1].astype(np.float64) - before[w1], after[b1].astype(np.float64) - before[b1]


def read_thresholds(before: Arrays, after: Arrays, features: int) -> Floats:
    """The quotients of neighbouring units' differences: what lies between two thresholds; NaN where nothing does."""
    weights, biases = first_layer(before, after, features)
    return quotients(weights - np.vstack([weights[1:], 0 * weights[:1]]), biases - np.append(biases[1:], 0.0))


def read_rare(before: Arrays, after: Arrays, features: int) -> Floats:
    """The quotients of the units themselves; NaN for those that did not move."""
    return quotients(*first_layer(before, after, features))


def read_answer(before: Arrays, after: Arrays, candidates: Floats) -> Floats:
    """How far the unit of each candidate moved along it: not at all if the candidate was not there."""
    weights, biases = first_layer(before, after, candidates.shape[1])
    count = len(candidates)
    return np.asarray(np.abs((weights[:count] * candidates).sum(1) + biases[:count]), np.float64)


def quotients(weights: Floats, biases: Floats) -> Floats:
    """weights / biases a row, NaN where the bias hardly moved."""
    moved = np.abs(biases) > 1e-9 * np.abs(biases).max(initial=0.0)
    out = np.full(weights.shape, np.nan)
    out[moved] = weights[moved] / biases[moved, None]
    return out


def match(found: Floats, samples: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """For each thing found the sample it is nearest to, and |found - x| / |x|; infinite where nothing was found."""
    there = np.isfinite(found).all(1)
    squares = (found[there] ** 2).sum(1)[:, None] - 2 * found[there] @ samples.T + (samples**2).sum(1)
    errors = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(np.linalg.norm(samples, axis=1), 1e-12)
    nearest, error = np.zeros(len(found), np.intp), np.full(len(found), np.inf)
    nearest[there], error[there] = errors.argmin(1), errors.min(1, initial=np.inf)
    return nearest, error


def count_recovered(found: Floats, samples: Floats) -> int:
    """How many different samples were recovered."""
    nearest, error = match(found, samples)
    return len(set(nearest[error < RECOVERED].tolist()))


def unit_vectors(rows: Floats) -> Floats:
    """The rows, each of length one."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12), np.float64)


def quantiles(levels: Floats | float, mean: Floats | float, deviation: Floats | float) -> Floats:
    """Of a normal distribution: what a server assumes that has seen a few samples of its own."""
    from scipy.special import ndtri

    return np.asarray(mean + deviation * ndtri(levels), np.float64)
