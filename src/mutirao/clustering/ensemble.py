"""Several groups' models as one: an average of their probabilities over the union of their classes."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float64]
STEPS = 200


def combine(
    probabilities: Mapping[str, npt.ArrayLike],
    classes: Mapping[str, Sequence[int]],
    weights: Mapping[str, float] | None = None,
    total: int | None = None,
) -> Probabilities:
    """p(c | x) = sum_g w_g p_g(c | x) / sum_g w_g; a class that a group's model does not have gets nothing from it.

    `probabilities` has a row a sample and a column for each class of the group's class map. Without weights all
    groups count the same. The columns of the result are the classes 0 to `total` - 1.

    >>> combine({"g0": [[0.9, 0.1]], "g1": [[0.6, 0.4]]}, {"g0": [0, 2], "g1": [1, 2]}, {"g0": 3, "g1": 1})
    array([[0.675, 0.15 , 0.175]])
    """
    if not probabilities:
        raise ValueError("there are no groups to combine")
    spread_out = align(probabilities, classes, total)
    shares = {g: 1.0 if weights is None else float(weights.get(g, 0.0)) for g in probabilities}
    if min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise ValueError(f"weights must not be negative, and one must be above 0; these are {shares}")
    whole = sum(shares.values())
    return np.asarray(sum(shares[g] / whole * spread_out[g] for g in sorted(spread_out)))


def align(
    probabilities: Mapping[str, npt.ArrayLike], classes: Mapping[str, Sequence[int]], total: int | None = None
) -> dict[str, Probabilities]:
    """Each group's probabilities over the union of classes."""
    width = 1 + max(c for g in probabilities for c in classes[g]) if total is None else total
    out = {}
    for g, values in probabilities.items():
        p = np.asarray(values, np.float64)
        if p.ndim != 2 or p.shape[1] != len(classes[g]):
            raise ValueError(f"{g} has {len(classes[g])} classes, but its probabilities have shape {p.shape}")
        out[g] = np.zeros((len(p), width))
        out[g][:, list(classes[g])] = p
    return out


def weights_by_validation(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Each group is weighted by its accuracy on common validation data.

    >>> weights_by_validation({"g0": 0.9, "g1": 0.6})
    {'g0': 0.9, 'g1': 0.6}
    """
    return {g: max(0.0, float(a)) for g, a in accuracies.items()}


def weights_by_sample(
    probabilities: Mapping[str, npt.ArrayLike], classes: Mapping[str, Sequence[int]], labels: npt.ArrayLike
) -> dict[str, float]:
    """The weights under which a client's own small sample is most likely: max_w sum_i ln sum_g w_g p_g(y_i | x_i).

    Expectation maximisation for the weights of a fixed mixture; the problem is concave, so where it begins does not
    matter. Groups that never saw the client's classes end with weight zero.

    The client's two samples are of class 1, which the second group finds likelier:

    >>> predictions = {"g0": [[0.9, 0.1], [0.8, 0.2]], "g1": [[0.2, 0.8], [0.1, 0.9]]}
    >>> weights = weights_by_sample(predictions, {"g0": [0, 1], "g1": [0, 1]}, labels=[1, 1])
    >>> {group: round(weight, 2) for group, weight in weights.items()}
    {'g0': 0.0, 'g1': 1.0}
    """
    y = np.asarray(labels, np.int64)
    names = sorted(probabilities)
    spread_out = align(probabilities, classes, max(int(y.max()) + 1, 1 + max(c for g in names for c in classes[g])))
    likely = np.stack([spread_out[g][np.arange(len(y)), y] for g in names], axis=1) + 1e-12
    shares = np.full(len(names), 1 / len(names))
    # E step: how likely each group made each sample; M step: the weight of a group is its mean share.
    for _ in range(STEPS):
        owned = likely * shares
        shares = (owned / owned.sum(1, keepdims=True)).mean(0)
    return dict(zip(names, shares.tolist(), strict=True))


def weights_by_distance(distances: Mapping[str, float]) -> dict[str, float]:
    """A mixture by nearness: w_g = exp(-(d_g^2 - d^2) / 2 d^2), with d the distance to the nearest group's centre.

    `distances` are those of the client's signature to the groups. The nearest group weighs 1, one twice as far 0.22.

    >>> {group: round(weight, 2) for group, weight in weights_by_distance({"g0": 1.0, "g1": 2.0}).items()}
    {'g0': 1.0, 'g1': 0.22}
    """
    near = max(min(distances.values()), 1e-12)
    return {g: float(np.exp(-(d**2 - near**2) / (2 * near**2))) for g, d in distances.items()}
