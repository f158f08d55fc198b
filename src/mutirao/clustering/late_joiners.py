"""Newcomers: a client that comes late trains the test model and joins the group it is nearest to, or none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import Labels, Points, normalise
from mutirao.clustering.membership import MAX_CLUSTERED, Groups, group_name
from mutirao.core.fleet import ClientId

FAR = 6.0  # robust deviations above the founders' own distances
ROOM = 1.3  # a newcomer may always be so much farther away than a founder typically is
SURE = 1 / 3  # part of the founders' typical confidence that a newcomer needs


@dataclass(frozen=True)
class Admission:
    """Where a newcomer belongs: its group, or why it is in quarantine.

    `distance` is to the middle of the nearest group; `confidence` is (second - first) / (second + first) of the
    distances to the two nearest: 0 half way between them, towards 1 in the middle of the first.

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
    """The group of each newcomer, always an existing one; who fits nowhere is in quarantine.

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
        name, distance, why = group_name(int(found.label[i]), groups.count), float(found.distance[i]), ""
        if distance > found.limit[i]:
            why = f"fits no group: {distance:.3g} from {name}, at most {found.limit[i]:.2g}"
        elif not found.inside[i]:
            why = f"lies between groups, {distance:.3g} from {name}, the nearest"
        out[client] = Admission("" if why else name, distance, float(found.confidence[i]), why)
    return out


def place_clients(groups: Groups, signatures: Points) -> Placement:
    """The nearest group of each signature, judged by those who formed the groups.

    A founder's distance is taken to the middle of the others of its group, and compared with the typical one there;
    the limit is the median plus six robust deviations (1.4826 MAD) over all groups. A newcomer also has to be
    surer of its group than a third of what founders typically are.
    """
    from scipy.spatial.distance import cdist

    known = np.flatnonzero(groups.labels >= 0)
    labels, count = groups.labels[known], groups.count
    if not count:
        raise ValueError("there are no groups to be admitted to")
    origin = np.median(groups.signatures, axis=0) if groups.directions else None
    own, theirs = (normalise(s, groups.directions, origin) for s in (groups.signatures[known], signatures))
    centres, sizes = centroids(own, labels, count), np.bincount(labels, minlength=count)

    typical, room, sure = np.full(count, 1e-12), ROOM, 0.0
    crowd = np.flatnonzero(sizes[labels] > 1)
    crowd = crowd[:: max(1, len(crowd) // MAX_CLUSTERED)]  # of many founders some are enough to know what is typical
    if len(crowd):
        home = labels[crowd]
        away = cdist(own[crowd], centres)
        away[np.arange(len(crowd)), home] *= sizes[home] / (sizes[home] - 1)  # as seen by the others of its group
        usual = away[np.arange(len(crowd)), home]
        by_group = [usual[home == g] for g in range(count)]
        typical = np.maximum([np.median(u if len(u) > 2 else usual) for u in by_group], 1e-12)
        relative = usual / typical[home]
        middle = float(np.median(relative))
        room = max(ROOM, middle + FAR * 1.4826 * float(np.median(np.abs(relative - middle))))
        sure = SURE * float(np.median(find_nearest(away)[2])) if count > 1 else 0.0

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
    """Whom to refuse because another client holds the same key: one key, one client; the first by name stays."""
    holder: dict[str, ClientId] = {}
    refused = {}
    for client in sorted(clients):
        if (key := keys.get(client)) is not None and holder.setdefault(key, client) != client:
            refused[client] = f"has the same key as {holder[key]}"
    return refused
