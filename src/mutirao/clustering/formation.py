"""Form groups of similar clients from their signatures, with any clusterer, and admit clients that join late."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import Labels, Points, normalise
from mutirao.clustering.clusterers import Auto, run_clusterer
from mutirao.clustering.group_state import MAX_CLUSTERED, WAITING, Groups, group_name
from mutirao.core.fleet import ClientId
from mutirao.randomness import rng

FAR = 6.0  # robust deviations above the distances of initial clients
ROOM = 1.3  # the limit is at least this multiple of the typical distance of initial clients
SURE = 1 / 3  # share of the typical confidence of initial clients that a late joiner needs


@dataclass(frozen=True)
class Admission:
    """The group of a late joiner, or why it is in quarantine.

    `distance` is to the centre of the nearest group; `confidence` is (second - first) / (second + first) of the
    distances to the two nearest: 0 half way between them, towards 1 in the centre of the first.

    >>> Admission("g1", distance=0.2, confidence=0.9)
    Admission(group='g1', distance=0.2, confidence=0.9, quarantine='')
    """

    group: str
    distance: float
    confidence: float
    quarantine: str = ""


class Placement(NamedTuple):
    """For each signature: nearest group, distance, confidence, the farthest it may be, and whether it fits."""

    label: Labels
    distance: Points
    confidence: Points
    limit: Points
    inside: npt.NDArray[np.bool_]


def admit(groups: Groups, signatures: Mapping[ClientId, npt.ArrayLike]) -> dict[ClientId, Admission]:
    """The group of each late joiner, always an existing one; clients that fit no group are in quarantine.

    >>> from mutirao.clustering.formation import form
    >>> groups = form({c: [x, x / 2] for c, x in zip("abcdef", [0, 0.1, 0.2, 9, 9.1, 9.2])})
    >>> found = admit(groups, {"new": [9.05, 4.5], "odd": [50, 50]})
    >>> found["new"].group, found["odd"].group, found["odd"].quarantine
    ('g1', '', 'fits no group: 61.1 from g1, at most 0.22')
    """
    if not signatures:
        return {}
    names = sorted(signatures)
    found = place_clients(groups, np.stack([np.asarray(signatures[c], np.float64).ravel() for c in names]))
    out = {}
    for i, client in enumerate(names):
        name = group_name(int(found.label[i]), groups.count)
        distance = float(found.distance[i])
        why = ""
        if distance > found.limit[i]:
            why = f"fits no group: {distance:.3g} from {name}, at most {found.limit[i]:.2g}"
        elif not found.inside[i]:
            why = f"lies between groups, {distance:.3g} from {name}, the nearest"
        out[client] = Admission("" if why else name, distance, float(found.confidence[i]), why)
    return out


def place_clients(groups: Groups, signatures: Points) -> Placement:
    """The nearest group of each signature, and whether it is near enough compared with the initial clients.

    An initial client's distance is that to the centre of the others of its group, relative to the typical one there;
    the limit is the median plus six robust deviations (1.4826 MAD) over all groups. The confidence of a late joiner
    must also be at least a third of the typical one of initial clients.
    """
    from scipy.spatial.distance import cdist

    known = np.flatnonzero(groups.labels >= 0)
    labels = groups.labels[known]
    count = groups.count
    if not count:
        raise ValueError("there are no groups to admit clients to")
    origin = np.median(groups.signatures, axis=0) if groups.directions else None
    own, theirs = (normalise(s, groups.directions, origin) for s in (groups.signatures[known], signatures))
    centres = centroids(own, labels, count)
    sizes = np.bincount(labels, minlength=count)

    typical = np.full(count, 1e-12)
    room = ROOM
    sure = 0.0
    crowd = np.flatnonzero(sizes[labels] > 1)
    crowd = crowd[:: max(1, len(crowd) // MAX_CLUSTERED)]  # a sample of many clients is enough for typical distances
    if len(crowd):
        home = labels[crowd]
        away = cdist(own[crowd], centres)
        # c = x / n + c' (n - 1) / n, so |x - c'| = |x - c| n / (n - 1), with c' the centre of the others in the group.
        away[np.arange(len(crowd)), home] *= sizes[home] / (sizes[home] - 1)
        usual = away[np.arange(len(crowd)), home]
        by_group = [usual[home == g] for g in range(count)]
        typical = np.maximum([np.median(u if len(u) > 2 else usual) for u in by_group], 1e-12)
        relative = usual / typical[home]
        middle = float(np.median(relative))
        room = max(ROOM, middle + FAR * 1.4826 * float(np.median(np.abs(relative - middle))))
        if count > 1:
            sure = SURE * float(np.median(find_nearest(away)[2]))

    label, first, confidence = find_nearest(cdist(theirs, centres))
    limit = typical[label] * room
    return Placement(label, first, confidence, limit, (first <= limit) & (confidence >= sure))


def find_nearest(distances: Points) -> tuple[Labels, Points, Points]:
    """The nearest group, its distance, and how much nearer it is than the second; with one group, 1."""
    label = np.argmin(distances, axis=1)
    first = distances[np.arange(len(label)), label]
    if distances.shape[1] == 1:
        return label.astype(np.int64), first, np.ones(len(label))
    second = np.partition(distances, 1, axis=1)[:, 1]
    return label.astype(np.int64), first, (second - first) / np.maximum(second + first, 1e-300)


def centroids(points: Points, labels: Labels, count: int) -> Points:
    """The mean of each group."""
    totals = np.zeros((count, points.shape[1]))
    np.add.at(totals, labels, points)
    return np.asarray(totals / np.bincount(labels, minlength=count)[:, None])


def find_shared_keys(clients: list[ClientId], keys: Mapping[ClientId, str]) -> dict[ClientId, str]:
    """Clients to refuse because another client has the same key; the first by name stays."""
    owner: dict[str, ClientId] = {}
    refused = {}
    for client in sorted(clients):
        # Against Sybils: one party with several names would otherwise count several times in its group.
        if (key := keys.get(client)) is not None and owner.setdefault(key, client) != client:
            refused[client] = f"has the same key as {owner[key]}"
    return refused


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
    chosen = np.arange(len(names))
    if len(names) > most:
        chosen = np.sort(draw.choice(len(names), most, replace=False))
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
    elif len(lost) and noise == "nearest" and clustered.count:
        labels[lost] = place_clients(clustered, points[lost]).label
    elif len(lost) and noise == "nearest":
        # The clusterer found no group at all: all clients are in one.
        labels[lost] = 0
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
