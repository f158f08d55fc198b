"""A Gaussian process over clients: how the changes of their losses go together, learnt from changes seen together.

Each client is a point x_i in few dimensions; the covariance of two clients' changes is x_i . x_j, plus noise^2 of one.
"""

import numpy as np

from mutirao.selection.scores import Floats, Rows

NOISE = 0.01  # the authors'
RATE, BETA1, BETA2, TINY = 0.01, 0.9, 0.999, 1e-8  # Adam's


def covariance(points: Floats) -> Floats:
    """x_i . x_j + noise^2 where i = j, of points in columns."""
    return np.asarray(points.T @ points + NOISE**2 * np.eye(points.shape[1]))


def slope(points: Floats, changes: Floats) -> Floats:
    """How the log-likelihood of the changes, one a point and 0 on average, moves with the points.

    With S the covariance and a = S^-1 y, it is X (a a' - S^-1); by the points' few dimensions, without S.
    """
    inner = np.linalg.solve(NOISE**2 * np.eye(len(points)) + points @ points.T, points)  # X S^-1
    a = (changes - points.T @ (inner @ changes)) / NOISE**2
    return np.asarray(np.outer(points @ a, a) - inner)


def fit(points: Floats, changes: Floats, weights: Floats, steps: int) -> Floats:
    """Points under which the rows of changes, weighted, are likelier, by so many steps of Adam; NaN was not seen."""
    seen = [(np.flatnonzero(~np.isnan(row)), row, w) for row, w in zip(changes, weights, strict=True)]
    mean, square = np.zeros_like(points), np.zeros_like(points)
    for t in range(1, steps + 1):
        up = np.zeros_like(points)
        for known, row, weight in seen:
            up[:, known] += weight * slope(points[:, known], row[known])
        mean, square = BETA1 * mean + (1 - BETA1) * up, BETA2 * square + (1 - BETA2) * up**2
        points = points + RATE * (mean / (1 - BETA1**t)) / (np.sqrt(square / (1 - BETA2**t)) + TINY)
    return points


def most_telling(sigma: Floats, weights: Floats, discount: Floats, allowed: Rows, count: int) -> Rows:
    """The clients that, selected one by one, make the weighted losses of all fall most, as far as they go together.

    k with the highest discount_k sum_i weight_i S_ik / sqrt(S_kk); then S becomes S - S_k S_k' / S_kk: what is left
    to learn once k is known.
    """
    chosen, left = list[int](), allowed
    for _ in range(count):
        spread = np.sqrt(np.maximum(sigma[left, left], 1e-300))
        gain = discount[left] * (weights @ sigma[:, left]) / spread
        k = int(left[gain.argmax()])
        chosen.append(k)
        left = left[left != k]
        sigma = sigma - np.outer(sigma[:, k], sigma[k]) / max(sigma[k, k], 1e-300)
    return np.array(chosen, np.intp)
