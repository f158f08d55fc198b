"""Forming groups of similar clients from their signatures, with any clusterer."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import Labels, normalise
from mutirao.clustering.clusterers import Auto, run_clusterer
from mutirao.clustering.late_joiners import centroids, place_clients
from mutirao.clustering.membership import MAX_CLUSTERED, WAITING, Groups
from mutirao.core.fleet import ClientId
from mutirao.randomness import rng

NoiseRule = Literal["nearest", "own", "wait"]


def form(
    signatures: Mapping[ClientId, npt.ArrayLike],
    cluster: Any = None,
    noise: NoiseRule = "nearest",
    directions: bool = False,
    seed: int = 0,
    most: int = MAX_CLUSTERED,
) -> Groups:
    """Group clients by their signatures; `cluster` is `Auto()` by default.

    With `directions` only the directions of signatures from their median are compared. A client that the clusterer
    leaves out joins the `nearest` group, gets its `own`, or has to `wait`. Groups are numbered in the order of their
    first clients' names. Of more than `most` clients that many are sampled and clustered, and the rest is admitted.

    >>> near, far = {"ana": [0, 0], "bia": [0, 0.1], "rui": [0.1, 0]}, {"eva": [9, 9], "ivo": [9.1, 9], "leo": [9, 9.1]}
    >>> groups = form(near | far)
    >>> groups.members()
    {'g0': ['ana', 'bia', 'rui'], 'g1': ['eva', 'ivo', 'leo']}
    """
    names = tuple(sorted(signatures))
    if not names:
        raise ValueError("there are no clients to group")
    points = np.stack([np.asarray(signatures[c], np.float64).ravel() for c in names])
    draw = rng(seed, 0, "groups")
    chosen = np.arange(len(names)) if len(names) <= most else np.sort(draw.choice(len(names), most, replace=False))
    labels = np.full(len(names), WAITING, np.int64)
    labels[chosen], divisions = run_clusterer(cluster or Auto(), points[chosen], directions, draw)
    clustered = Groups(names, labels, points, directions, divisions=tuple(divisions))
    rest = np.setdiff1d(np.arange(len(names)), chosen)
    if len(rest) and clustered.count:
        found = place_clients(clustered, points[rest])
        labels[rest] = np.where(found.inside, found.label, WAITING)
    lost = np.flatnonzero(labels == WAITING)
    if len(lost) and noise == "own":
        labels[lost] = labels.max(initial=WAITING) + 1 + np.arange(len(lost))
    elif len(lost) and noise == "nearest":
        labels[lost] = place_clients(clustered, points[lost]).label if clustered.count else 0
    return Groups(names, in_order(labels), points, directions, divisions=tuple(divisions))


def in_order(labels: Labels) -> Labels:
    """The same groups, numbered as they appear."""
    kinds, first = np.unique(labels[labels >= 0], return_index=True)
    new = np.full(int(labels.max(initial=WAITING)) + 2, WAITING, np.int64)
    new[kinds[np.argsort(first)]] = np.arange(len(kinds))
    return np.asarray(new[labels], np.int64)  # the last element, -1, is for clients that wait


def quality(groups: Groups, truth: Mapping[ClientId, int] | None = None) -> dict[str, float]:
    """The number of groups, the share of waiting clients, their separation, and the adjusted Rand index if known.

    Silhouette (Rousseeuw, 1987): 1 if groups are tight and far apart, 0 if they touch. `within` is the mean distance
    of a client to the centre of its group, `between` the smallest between the centres of two groups.

    >>> groups = form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]})
    >>> found = quality(groups, truth={"ana": 0, "bia": 0, "eva": 1, "ivo": 1})
    >>> found["groups"], round(found["silhouette"], 2), found["rand"]
    (2.0, 0.99, 1.0)
    """
    from scipy.spatial.distance import pdist
    from sklearn.metrics import adjusted_rand_score, silhouette_score

    known = groups.labels >= 0
    points = normalise(groups.signatures, groups.directions)[known]
    labels = groups.labels[known]
    out = {"groups": float(groups.count), "waiting": float(np.mean(~known))}
    if 1 < groups.count < len(labels) and groups.has_signatures:
        most = {"sample_size": MAX_CLUSTERED, "random_state": 0} if len(labels) > MAX_CLUSTERED else {}
        out["silhouette"] = float(silhouette_score(points, labels, **most))
    if groups.count and groups.has_signatures:
        centres = centroids(points, labels, groups.count)
        out["within"] = float(np.linalg.norm(points - centres[labels], axis=1).mean())
        if 1 < groups.count <= MAX_CLUSTERED:
            out["between"] = float(pdist(centres).min())
    if truth is not None:
        who = [c for c in groups.labelled if c in truth]
        out["rand"] = float(adjusted_rand_score([truth[c] for c in who], [groups.labelled[c] for c in who]))
    return out
