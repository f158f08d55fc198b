"""The clusterers by name, each called as `(signatures, directions, rng) -> (labels, divisions examined)`.

-1 is a client in no group. Anything of scikit-learn with `fit_predict` may stand in their place.
"""

# ruff: noqa: D102  # `__call__` is documented by the class

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutirao.clustering.auto import NOISE, Division, Labels, Points, divide, divide_again, normalise

Clustered = tuple[Labels, list[Division]]


@dataclass(frozen=True)
class Auto:
    """DBSCAN with eps chosen by stability in the components that matter, then within each group again (see `auto`).

    >>> from mutirao.clustering import form
    >>> form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]}, Auto()).members()
    {'g0': ['ana', 'bia'], 'g1': ['eva', 'ivo']}
    """

    noise: float = NOISE  # largest share left over
    min_samples: int = 0  # as in DBSCAN: also the smallest group there can be (0: by the number of clients)

    def __post_init__(self) -> None:
        if self.min_samples < 0 or self.min_samples == 1:
            raise ValueError(f"min_samples is {self.min_samples}, but must be 0 or at least 2")

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        return divide_again(signatures, directions, self.noise, self.min_samples)


@dataclass(frozen=True)
class One:
    """All clients in one group: ordinary federated learning.

    >>> from mutirao.clustering import form
    >>> form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]}, One()).members()
    {'g0': ['ana', 'bia', 'eva', 'ivo']}
    """

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        return np.zeros(len(signatures), np.int64), []


@dataclass(frozen=True)
class Dbscan:
    """scikit-learn's DBSCAN with a fixed eps; the paper's 0.0279 fits the paper's model only.

    Points that are at most `eps` apart are together; with too small an eps none are, and the `noise` rule decides:

    >>> from mutirao.clustering import form
    >>> points = {"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]}
    >>> form(points, Dbscan(eps=0.5)).count, form(points, Dbscan(eps=0.01), noise="own").count
    (2, 4)
    """

    eps: float = 0.0279
    min_samples: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import DBSCAN

        return run_clusterer(DBSCAN(eps=self.eps, min_samples=self.min_samples), signatures, directions, rng)


@dataclass(frozen=True)
class Optics:
    """scikit-learn's OPTICS, as in the paper.

    >>> from mutirao.clustering import form
    >>> points = {"ana": [0.0], "bia": [0.1], "rui": [0.2], "eva": [9.0], "ivo": [9.1], "leo": [9.2]}
    >>> form(points, Optics(min_samples=2)).members()
    {'g0': ['ana', 'bia', 'rui'], 'g1': ['eva', 'ivo', 'leo']}
    """

    min_samples: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import OPTICS

        if len(signatures) < max(2, self.min_samples):
            return np.zeros(len(signatures), np.int64), []
        with np.errstate(divide="ignore", invalid="ignore"):  # it divides by the distances of equal points
            return run_clusterer(OPTICS(min_samples=self.min_samples), signatures, directions, rng)


@dataclass(frozen=True)
class Hdbscan:
    """scikit-learn's HDBSCAN, which may also find a single group.

    >>> from mutirao.clustering import form
    >>> points = {"ana": [0.0], "bia": [0.1], "rui": [0.2], "eva": [9.0], "ivo": [9.1], "leo": [9.2]}
    >>> form(points, Hdbscan(min_cluster_size=3)).members()
    {'g0': ['ana', 'bia', 'rui'], 'g1': ['eva', 'ivo', 'leo']}
    """

    min_cluster_size: int = 2

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import HDBSCAN

        if len(signatures) < self.min_cluster_size:
            return np.zeros(len(signatures), np.int64), []
        part = HDBSCAN(min_cluster_size=self.min_cluster_size, allow_single_cluster=True, copy=True)
        return run_clusterer(part, signatures, directions, rng)


@dataclass(frozen=True)
class Kmeans:
    """scikit-learn's K-Means; with 0 groups it takes the number that is most stable and best separated.

    >>> from mutirao.clustering import form
    >>> form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]}, Kmeans(groups=2)).members()
    {'g0': ['ana', 'bia'], 'g1': ['eva', 'ivo']}
    """

    groups: int = 0

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import KMeans

        seed = int(rng.integers(2**31))
        return choose_count(lambda k: KMeans(k, n_init=5, random_state=seed), self.groups, signatures, directions, rng)


@dataclass(frozen=True)
class Agglomerative:
    """scikit-learn's agglomerative clustering by average distance; groups = 0 as in K-Means.

    >>> from mutirao.clustering import form
    >>> form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]}, Agglomerative(groups=2)).members()
    {'g0': ['ana', 'bia'], 'g1': ['eva', 'ivo']}
    """

    groups: int = 0

    def __call__(self, signatures: Points, directions: bool, rng: np.random.Generator) -> Clustered:
        from sklearn.cluster import AgglomerativeClustering

        make = lambda k: AgglomerativeClustering(k, linkage="average")  # noqa: E731
        return choose_count(make, self.groups, signatures, directions, rng)


PARTS = (Auto, One, Dbscan, Optics, Hdbscan, Kmeans, Agglomerative)
NAMES: dict[str, type] = {part.__name__.lower(): part for part in PARTS}

MOST_GROUPS = 20
TRIALS = 5


def choose_count(
    make: Callable[[int], Any], groups: int, signatures: Points, directions: bool, rng: np.random.Generator
) -> Clustered:
    """The labels of a clusterer that needs the number of groups; 0 chooses it.

    Whether there is more than one is decided as by `auto`; then the number is the one with the largest product of
    silhouette and stability, the mean adjusted Rand index between clusterings of random four fifths and of all.
    """
    from sklearn.metrics import adjusted_rand_score, silhouette_score
    from threadpoolctl import threadpool_limits

    points = normalise(signatures, directions)
    n = len(signatures)
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


def run_clusterer(cluster: Any, points: Points, directions: bool, draw: np.random.Generator) -> Clustered:
    """The clusterer's labels; one of scikit-learn is used as it is."""
    if not hasattr(cluster, "fit_predict"):
        labels, examined = cluster(points, directions, draw)
        return np.asarray(labels, np.int64), examined
    from sklearn.base import clone

    return np.asarray(clone(cluster).fit_predict(normalise(points, directions)), np.int64), []
