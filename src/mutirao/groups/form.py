"""Forming groups of clients that are alike: signatures in, groups out, by any clusterer there is.

A clusterer here is called as `(signatures, directions, rng) -> (labels, what it looked at)`; -1 is a client in no
group. Anything of scikit-learn with `fit_predict` may stand in its place.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.fleet import ClientId
from mutirao.groups.auto import NOISE, Division, Labels, Points, divide, prepared, split
from mutirao.randomness import rng

Clustered = tuple[Labels, list[Division]]
Clusterer = Callable[[Points, bool, np.random.Generator], Clustered]
NoiseRule = Literal["nearest", "own", "wait"]

MOST = 2000  # clients among whom groups are sought; of more, so many are drawn, and the others are admitted
WAITS = -1


@dataclass(frozen=True)
class Groups:
    """Who is in which group: the clients it was formed of, with their signatures, and those admitted later.

    A label is the number of a group; -1 is a client that waits.
    """

    clients: tuple[ClientId, ...]
    labels: Labels
    signatures: Points
    directions: bool = False
    later: Mapping[ClientId, int] = field(default_factory=dict)
    looked: tuple[Division, ...] = ()

    @cached_property
    def labelled(self) -> dict[ClientId, int]:
        """The label of each client, founders and others."""
        return dict(zip(self.clients, self.labels.tolist(), strict=True)) | dict(self.later)

    @property
    def names(self) -> list[str]:
        """The names of the groups: g0, g1, ..."""
        return [name_of(i, self.count) for i in range(self.count)]

    @property
    def count(self) -> int:
        """How many groups there are."""
        return int(self.labels.max(initial=WAITS)) + 1

    def group_of(self, client: ClientId) -> str:
        """The group of a client; empty for one that waits or is not known."""
        label = self.labelled.get(client, WAITS)
        return name_of(label, self.count) if label >= 0 else ""

    def members(self) -> dict[str, list[ClientId]]:
        """The clients of each group, sorted."""
        table: dict[str, list[ClientId]] = {name: [] for name in self.names}
        for client in sorted(self.labelled):
            if name := self.group_of(client):
                table[name].append(client)
        return table

    def waiting(self) -> list[ClientId]:
        """The clients in no group."""
        return sorted(c for c, label in self.labelled.items() if label < 0)

    def with_later(self, labels: Mapping[ClientId, int]) -> "Groups":
        """The same groups with more clients in them; where the groups lie is left to those who formed them."""
        return replace(self, later={**self.later, **labels})


def name_of(label: int, count: int) -> str:
    """g0, g1, ...; as many digits as the last needs, so that names sort."""
    return f"g{label:0{len(str(max(0, count - 1)))}d}"


def form(
    signatures: Mapping[ClientId, npt.ArrayLike],
    cluster: Any = None,
    noise: NoiseRule = "nearest",
    directions: bool = False,
    seed: int = 0,
    most: int = MOST,
) -> Groups:
    """Group clients by their signatures; `cluster` is `Auto()` by default.

    With `directions` only the directions in which signatures leave the middle of all are compared. A client that the
    clusterer leaves out joins the `nearest` group, gets its `own`, or has to `wait`. Groups are numbered in the order
    of their first clients' names. Of more than `most` clients so many are drawn, and the rest is admitted.

    >>> near, far = {"ana": [0, 0], "bia": [0, 0.1], "rui": [0.1, 0]}, {"eva": [9, 9], "ivo": [9.1, 9], "leo": [9, 9.1]}
    >>> groups = form(near | far)
    >>> groups.members()
    {'g0': ['ana', 'bia', 'rui'], 'g1': ['eva', 'ivo', 'leo']}
    """
    from mutirao.groups.admit import place  # it is written in terms of the groups formed here

    names = tuple(sorted(signatures))
    if not names:
        raise ValueError("there is nobody to group")
    points = np.stack([np.asarray(signatures[c], np.float64).ravel() for c in names])
    draw = rng(seed, 0, "groups")
    chosen = np.arange(len(names)) if len(names) <= most else np.sort(draw.choice(len(names), most, replace=False))
    labels = np.full(len(names), WAITS, np.int64)
    labels[chosen], looked = clustered(cluster or Auto(), points[chosen], directions, draw)
    founders = Groups(names, labels, points, directions, looked=tuple(looked))
    rest = np.setdiff1d(np.arange(len(names)), chosen)
    if len(rest) and founders.count:
        found = place(founders, points[rest])
        labels[rest] = np.where(found.inside, found.label, WAITS)
    lost = np.flatnonzero(labels == WAITS)
    if len(lost) and noise == "own":
        labels[lost] = labels.max(initial=WAITS) + 1 + np.arange(len(lost))
    elif len(lost) and noise == "nearest":
        labels[lost] = place(founders, points[lost]).label if founders.count else 0
    return Groups(names, in_order(labels), points, directions, looked=tuple(looked))


def clustered(cluster: Any, points: Points, directions: bool, draw: np.random.Generator) -> Clustered:
    """The clusterer's labels; one of scikit-learn is used as it is."""
    if not hasattr(cluster, "fit_predict"):
        labels, looked = cluster(points, directions, draw)
        return np.asarray(labels, np.int64), looked
    from sklearn.base import clone

    return np.asarray(clone(cluster).fit_predict(prepared(points, directions)), np.int64), []


def in_order(labels: Labels) -> Labels:
    """The same groups, numbered as they appear."""
    kinds, first = np.unique(labels[labels >= 0], return_index=True)
    new = np.full(int(labels.max(initial=WAITS)) + 2, WAITS, np.int64)
    new[kinds[np.argsort(first)]] = np.arange(len(kinds))
    return np.asarray(new[labels], np.int64)  # the last place, -1, is for those who wait


@dataclass(frozen=True)
class Auto:
    """DBSCAN with eps chosen by stability in the components that matter, then within each group again (see `auto`)."""

    noise: float = NOISE

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        return split(signatures, directions, self.noise)


@dataclass(frozen=True)
class One:
    """Everybody in one group: ordinary federated learning."""

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        return np.zeros(len(signatures), np.int64), []


@dataclass(frozen=True)
class Dbscan:
    """scikit-learn's DBSCAN with a fixed eps; the paper's 0.0279 fits the paper's model only."""

    eps: float = 0.0279
    min_samples: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import DBSCAN

        return clustered(DBSCAN(eps=self.eps, min_samples=self.min_samples), signatures, directions, rng)


@dataclass(frozen=True)
class Optics:
    """scikit-learn's OPTICS, as in the paper."""

    min_samples: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import OPTICS

        if len(signatures) < max(2, self.min_samples):
            return np.zeros(len(signatures), np.int64), []
        with np.errstate(divide="ignore", invalid="ignore"):  # it divides by the distances of equal points
            return clustered(OPTICS(min_samples=self.min_samples), signatures, directions, rng)


@dataclass(frozen=True)
class Hdbscan:
    """scikit-learn's HDBSCAN, which may also say one group."""

    min_cluster_size: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import HDBSCAN

        if len(signatures) < self.min_cluster_size:
            return np.zeros(len(signatures), np.int64), []
        part = HDBSCAN(min_cluster_size=self.min_cluster_size, allow_single_cluster=True, copy=True)
        return clustered(part, signatures, directions, rng)


@dataclass(frozen=True)
class Kmeans:
    """scikit-learn's K-Means; without a number of groups (0) the one that is most stable and best apart."""

    groups: int = 0

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import KMeans

        seed = int(rng.integers(2**31))
        return counted(lambda k: KMeans(k, n_init=5, random_state=seed), self.groups, signatures, directions, rng)


@dataclass(frozen=True)
class Agglomerative:
    """scikit-learn's agglomerative clustering by average distance; groups = 0 as in K-Means."""

    groups: int = 0

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import AgglomerativeClustering

        make = lambda k: AgglomerativeClustering(k, linkage="average")  # noqa: E731
        return counted(make, self.groups, signatures, directions, rng)


NAMES: dict[str, type] = {
    "auto": Auto,
    "one": One,
    "dbscan": Dbscan,
    "optics": Optics,
    "hdbscan": Hdbscan,
    "kmeans": Kmeans,
    "agglomerative": Agglomerative,
}

MOST_GROUPS, TRIALS = 20, 5


def counted(
    make: Callable[[int], Any], groups: int, signatures: Points, directions: bool, rng: np.random.Generator
) -> Clustered:
    """The labels of a clusterer that must be told how many groups; 0 asks for one group unless there is more.

    Whether there is more than one is decided as by `auto`; then the number is the one with the largest product of
    silhouette and stability, the mean adjusted Rand index between clusterings of random four fifths and of all.
    """
    from sklearn.metrics import adjusted_rand_score, silhouette_score
    from threadpoolctl import threadpool_limits

    points, n = prepared(signatures, directions), len(signatures)
    if groups > n:
        raise ValueError(f"groups is {groups}, but there are only {n} clients")
    if groups:
        return np.asarray(make(groups).fit_predict(points), np.int64), []
    found, _ = divide(points)
    if not found.holds:
        return np.zeros(n, np.int64), [found]
    best: tuple[float, Labels] = (-np.inf, np.zeros(n, np.int64))
    with threadpool_limits(1):  # threads cost more than they bring for so few clients
        for k in range(2, min(MOST_GROUPS, n // 2) + 1):
            labels = np.asarray(make(k).fit_predict(points), np.int64)
            some = [np.sort(rng.choice(n, max(k + 1, (4 * n) // 5), replace=False)) for _ in range(TRIALS)]
            agreed = np.mean([adjusted_rand_score(labels[rows], make(k).fit_predict(points[rows])) for rows in some])
            score = float(agreed) * float(silhouette_score(points, labels))
            if score > best[0]:
                best = score, labels
    return best[1], [found]


def quality(groups: Groups, truth: Mapping[ClientId, int] | None = None) -> dict[str, float]:
    """How many groups, the share that waits, how well apart they are, and the adjusted Rand index if it is known.

    Silhouette (Rousseeuw, 1987): 1 if groups are tight and far apart, 0 if they touch. `within` is the mean distance
    of a client to the middle of its group, `between` the smallest between the middles of two groups.
    """
    from scipy.spatial.distance import pdist
    from sklearn.metrics import adjusted_rand_score, silhouette_score

    from mutirao.groups.admit import middles

    known = groups.labels >= 0
    points, labels = prepared(groups.signatures, groups.directions)[known], groups.labels[known]
    out = {"groups": float(groups.count), "waiting": float(np.mean(~known))}
    if 1 < groups.count < len(labels):
        most = {"sample_size": MOST, "random_state": 0} if len(labels) > MOST else {}
        out["silhouette"] = float(silhouette_score(points, labels, **most))
    if groups.count:
        centres = middles(points, labels, groups.count)
        out["within"] = float(np.linalg.norm(points - centres[labels], axis=1).mean())
        if 1 < groups.count <= MOST:
            out["between"] = float(pdist(centres).min())
    if truth is not None:
        who = [c for c in groups.labelled if c in truth]
        out["rand"] = float(adjusted_rand_score([truth[c] for c in who], [groups.labelled[c] for c in who]))
    return out
