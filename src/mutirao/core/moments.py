"""Standardization of features without pooling data: clients send counts, sums and squared deviations, once."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.validation import FEWEST, SIZE_CAP, lower_median
from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
Transform = Literal["none", "log"]

ROWS_AT_ONCE = 4096
FAR = 1000.0  # times the scale of the others: moments beyond are taken for wrong
CONSTANT = 1e-13  # a standard deviation below this share of the mean is rounding: the feature is constant


def transform_features(x: npt.ArrayLike, transform: Transform = "none") -> Floats:
    """The values in float64, or sign(x) log(1 + |x|) of them, which tames the heavy tails of MSLR's features.

    >>> transform_features([-1.0, 0.0, 1e6], "log").round(3)
    array([-0.693,  0.   , 13.816])
    """
    values = np.asarray(x, np.float64)
    if transform == "none":
        return values
    if transform != "log":
        raise ConfigError(f"transform: {transform!r} is not one of none, log")
    return np.copysign(np.log1p(np.abs(values)), values)


def measure_moments(x: npt.ArrayLike, transform: Transform = "none") -> Arrays:
    """What a client sends once so that all can standardise in the same way: only `count`, `sum` and `squares`.

    `squares` is the sum of (x - mean of the client)^2 by feature. It is equivalent to the sum of x^2 =
    squares + sum^2 / count, and keeps the digits which that sum would lose for a large mean.

    >>> measure_moments([[1.0, 5.0], [3.0, 5.0]])
    {'count': array(2), 'sum': array([ 4., 10.]), 'squares': array([2., 0.])}
    """
    rows = np.asarray(x)
    if rows.ndim != 2:
        raise ConfigError(f"moments: expected a table with one row a sample, got shape {rows.shape}")
    total, missed, squares = np.zeros((3, rows.shape[1]))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        total += transform_features(rows[start : start + ROWS_AT_ONCE], transform).sum(0)
    mean = total / max(1, len(rows))
    # The second pass is sum (x - m)^2 - (sum (x - m))^2 / n: the second term corrects for the rounding of the mean m.
    for start in range(0, len(rows), ROWS_AT_ONCE):
        apart = transform_features(rows[start : start + ROWS_AT_ONCE], transform) - mean
        missed += apart.sum(0)  # what the sum has lost by rounding
        squares += np.square(apart).sum(0)
    total += missed
    squares = np.maximum(0, squares - missed**2 / max(1, len(rows)))
    return {"count": np.array(len(rows), np.int64), "sum": total, "squares": squares}


def combine_moments(sent: Sequence[Arrays]) -> tuple[Floats, Floats]:
    """Mean and standard deviation by feature over all clients, from their moments alone; constant features get 1.

    mean = sum_k s_k / n and n var = sum_k q_k + sum_k n_k (s_k / n_k - mean)^2 (Chan, Golub and LeVeque,
    "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), each sum rounded only once,
    so that the order of the clients does not matter.

    >>> mean, std = combine_moments([measure_moments([[1.0, 5.0]]), measure_moments([[3.0, 5.0], [5.0, 5.0]])])
    >>> mean, std.round(3)
    (array([3., 5.]), array([1.633, 1.   ]))
    """
    used = [m for m in sent if int(m["count"]) > 0]
    if not used:
        raise ConfigError("no client has samples to take means from")
    if len({m[key].shape for m in used for key in ("sum", "squares")}) > 1:
        raise ConfigError("clients sent moments of different numbers of features")
    n = np.array([int(m["count"]) for m in used], np.float64)[:, None]
    sums = np.stack([m["sum"] for m in used])
    squares = np.stack([m["squares"] for m in used])
    if not (np.isfinite(sums).all() and np.isfinite(squares).all() and (squares >= 0).all()):
        raise ConfigError("a client sent moments that are not finite, or negative squares")
    total = float(n.sum())
    mean = _sum(sums) / total
    std = np.sqrt(_sum(np.concatenate([squares, n * np.square(sums / n - mean)])) / total)
    return mean, np.where(std > CONSTANT * np.abs(mean), std, 1.0)


def bound_moments(sent: Sequence[Arrays], far: float = FAR, cap: float = SIZE_CAP) -> list[Arrays]:
    """Moments that one client cannot distort: those far from the others are left out, and counts are bounded.

    Far is a mean or deviation of `far` times the scale of the others: median deviation + median |mean - median|. A
    count is bounded by `cap` times the median, as numbers of samples are in a round. Fewer than three clients are not
    checked, since there is no majority.
    """
    if len(sent) < FEWEST:
        return list(sent)
    counts = np.array([int(m["count"]) for m in sent])
    means = np.array([float(m["sum"][0]) for m in sent]) / counts
    variances = np.array([float(m["squares"][0]) for m in sent]) / counts
    deviations = np.sqrt(variances)
    middle = np.median(means)
    scale = float(np.median(deviations) + np.median(np.abs(means - middle)))
    apart = np.maximum(np.abs(means - middle), deviations)
    # A scale of 0 means that most clients report the same constant, which says nothing of the others.
    is_far = (apart > far * scale) & (scale > 0)
    limit = int(cap * lower_median(counts))
    kept = []
    for i, moments in enumerate(sent):
        if is_far[i]:
            continue
        if counts[i] > limit:
            n = np.array(limit)
            moments = {"count": n, "sum": np.array([means[i] * n]), "squares": np.array([variances[i] * n])}
        kept.append(moments)
    return kept


def _sum(values: Floats) -> Floats:
    return np.array([math.fsum(column) for column in values.T.tolist()])


def standardise(
    x: npt.ArrayLike,
    mean: Floats,
    std: Floats,
    transform: Transform = "none",
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """(features - mean) / std as float32, row by row the same however many there are; `out` may be x itself.

    >>> x = np.array([[1.0], [3.0]])
    >>> standardise(x, *combine_moments([measure_moments(x)]))
    array([[-1.],
           [ 1.]], dtype=float32)
    """
    rows = np.asarray(x)
    scaled = np.empty(rows.shape, np.float32) if out is None else out
    for start in range(0, len(rows), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        scaled[here] = (transform_features(rows[here], transform) - mean) / std
    return scaled
