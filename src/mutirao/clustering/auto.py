"""The number of groups and the groups themselves: DBSCAN with the eps whose result is most stable.

For a fixed `min_samples` what DBSCAN finds changes only where a client becomes a core point, where two core points are
joined by an edge of the minimum spanning tree of mutual reachability (Campello, Moulavi and Sander, 2013), and where a
core point first reaches a client at the border; so one tree gives the results of all values of eps exactly. Two
figures support a division, both logarithms of a volume in the d dimensions that matter:

- stability, d ln(high / low): how much the ball around a client may grow before two groups touch, which is what the
  worst placed clients decide;
- clearness, d times the lower quartile of ln(b / a), with a and b a client's mean distances to its own and to the
  nearest other group: the silhouette (Rousseeuw, 1987) on a logarithmic scale, which one loose client does not spoil.

In a cloud without groups both stay small whatever the number of clients and dimensions: among n clients a division
needs a stability of MIN_STABILITY + 8 / n or a clearness of MIN_CLEARNESS + 10 / n, which fewer than one in a hundred
such clouds have.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

# Thresholds of random clouds: a constant, and a term that is divided by the number of clients.
MIN_STABILITY = 1.6
STABILITY_TERM = 8.0
MIN_CLEARNESS = 2.0
CLEARNESS_TERM = 10.0
INNER_FACTOR = 1.25  # a division within a group has to be this much stronger, since many are tried
MOST_COMPONENTS = 16
NOISE = 0.1  # largest share of clients that a division may leave without a group
SAME = 1e-9  # distances below this part of the typical one count as none


@dataclass(frozen=True)
class Range:
    """From `low` to `high` DBSCAN finds the same groups, with this share of clients in none."""

    low: float
    high: float
    groups: int
    noise: float


@dataclass(frozen=True)
class Division:
    """A choice of eps: number of components, bounds, groups found, and the evidence for them."""

    clients: int
    components: int
    min_samples: int
    low: float
    high: float
    groups: int
    noise: float
    stability: float
    clearness: float
    knee: float  # the eps that the k-distances suggest
    inner: bool = False  # whether it divides a group again

    @property
    def eps(self) -> float:
        """The middle of the range, on a logarithmic scale."""
        return float(np.sqrt(self.low * self.high))

    @property
    def strength(self) -> float:
        """The larger of stability and clearness, each as a multiple of what is needed among so many clients."""
        return max(
            self.stability / (MIN_STABILITY + STABILITY_TERM / self.clients),
            self.clearness / (MIN_CLEARNESS + CLEARNESS_TERM / self.clients),
        )

    @property
    def holds(self) -> bool:
        """Whether the division is stronger than in random clouds."""
        needed = 1.0
        if self.inner:
            needed = INNER_FACTOR
        return self.groups > 1 and self.strength > needed


def min_samples_for(clients: int) -> int:
    """How many neighbours make a client the core of a group: two among few clients, a few more among many."""
    return max(2, round(math.log2(max(2, clients)) / 2))


def scan(points: Points, min_samples: int) -> list[Range]:
    """How many groups DBSCAN finds, and what noise it leaves, for every eps there is, from the first group on.

    A client is a core point from its core distance on, the one to its `min_samples`-th neighbour; core points are in
    one group from the edge of the tree on that joins them, so there are as many groups as core points less edges.
    Client i is in a group, if only at its border, as soon as a core point reaches it: from min_j max(d_ij, core_j) on.
    """
    n = len(points)
    if n < max(2, min_samples):
        return []  # no client has that many neighbours, at any eps
    # A result can change only at core distances, edges of the tree, and where a border client is first touched.
    distances = pairwise(points)
    core = k_distances(distances, min_samples)
    joins = merge_nearest(distances, min_samples)[:, 2]
    reached = np.sort(np.maximum(distances, core).min(axis=1))
    lows = np.unique(np.concatenate([core, joins, reached]))
    groups = np.searchsorted(np.sort(core), lows, "right") - np.searchsorted(joins, lows, "right")
    noise = 1 - np.searchsorted(reached, lows, "right") / n
    new = np.append(True, (np.diff(groups) != 0) | (np.diff(noise) != 0))  # a border point may become a core point
    lows = lows[new]
    groups = groups[new]
    noise = noise[new]
    rows = zip(lows.tolist(), [*lows[1:].tolist(), np.inf], groups.tolist(), noise.tolist(), strict=True)
    return [Range(*row) for row in rows]


def merge_nearest(distances: Points, min_samples: int) -> Points:
    """Clients joined by single linkage of their mutual reachability, the nearest first, in scipy's four columns.

    Mutual reachability of two clients is the largest of their distance and the distances of each to its
    `min_samples`-th neighbour, counting itself.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    core = k_distances(distances, min_samples)
    reachability = np.maximum(distances, np.maximum.outer(core, core))
    return np.asarray(linkage(squareform(reachability, checks=False), "single"), np.float64)


def pairwise(points: Points) -> Points:
    """All distances; a client is at no distance from itself."""
    from scipy.spatial.distance import pdist, squareform

    return np.asarray(squareform(pdist(points)), np.float64)


def k_distances(distances: Points, min_samples: int) -> Points:
    """The distance of each client to its `min_samples`-th neighbour, counting itself."""
    k = min(min_samples, len(distances)) - 1
    return np.asarray(np.partition(distances, k, axis=1)[:, k])


def knee(points: Points, min_samples: int) -> float:
    """Where the sorted k-distances turn upwards: the point farthest below the line from the first to the last.

    Ester et al., "A Density-Based Algorithm for Discovering Clusters", KDD 1996, read this off by eye.
    """
    heights = np.sort(k_distances(pairwise(points), min_samples))
    line = np.linspace(heights[0], heights[-1], len(heights))
    return float(heights[int(np.argmax(line - heights))])


def divide(points: Points, noise: float = NOISE, min_samples: int = 0) -> tuple[Division, Points]:
    """The strongest division, and the points in its components; if it does not hold, there is one group.

    G groups differ in G - 1 directions and all others hold noise, so eps is sought among the first principal
    components, as many as give the strongest division, and among all.
    """
    n = len(points)
    k = min_samples or min_samples_for(n)
    u, s, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    least = SAME * float(s[0])
    best = Division(n, len(s), k, 0.0, np.inf, 1, 0.0, 0.0, 0.0, 0.0)
    where = u * s
    if n < 2 * k or least == 0:  # two groups of that size are the least there can be
        return best, where
    for components in sorted({*range(1, min(MOST_COMPONENTS, n // 2 - 1, len(s)) + 1), len(s)}):
        within = u[:, :components] * s[:components]
        able = [replace(r, low=max(r.low, least)) for r in scan(within, k) if r.groups > 1 and r.noise <= noise]
        widest = max(able, key=lambda r: r.high / r.low, default=None)
        if widest is None or widest.high <= widest.low:
            continue
        low = widest.low
        high = widest.high
        labels = run_dbscan(within, float(np.sqrt(low * high)), k)
        matter = max(dimensions(within), dimensions(centre(within, labels)))
        stability = matter * math.log(high / low)
        clearness = matter * margin(within, labels)
        found = Division(n, components, k, low, high, widest.groups, widest.noise, stability, clearness, 0.0)
        if found.strength > best.strength:
            best = found
            where = within
    return replace(best, knee=knee(where, k)), where


def dimensions(points: Points) -> float:
    """How many dimensions matter: (sum of variances)^2 / sum of squared variances along the principal components."""
    power = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    return float(power.sum() ** 2 / max((power**2).sum(), 1e-300))


def margin(points: Points, labels: Labels) -> float:
    """How much farther the nearest other group is than the own: the lower quartile of ln(b / a) in groups.

    With s the silhouette of a client, b / a is 1 / (1 - s) where b is larger, else 1 + s.
    """
    from sklearn.metrics import silhouette_samples

    inside = labels >= 0
    if labels.max(initial=-1) < 1:
        return 0.0
    s = np.clip(silhouette_samples(points[inside], labels[inside]), SAME - 1, 1 - SAME)
    return float(np.quantile(np.sign(s) * -np.log1p(-np.abs(s)), 0.25))


def run_dbscan(points: Points, eps: float, min_samples: int) -> Labels:
    """The labels of DBSCAN."""
    from sklearn.cluster import DBSCAN

    return np.asarray(DBSCAN(eps=eps, min_samples=min_samples).fit_predict(points), np.int64)


def centre(points: Points, labels: Labels) -> Points:
    """The clients of groups relative to the centre of their own group."""
    parts = [points[labels == g] for g in range(labels.max() + 1)]
    return np.concatenate([part - part.mean(0) for part in parts])


def divide_again(
    signatures: Points, directions: bool, noise: float = NOISE, min_samples: int = 0
) -> tuple[Labels, list[Division]]:
    """Divide the clients, then each group again, until no division holds; -1 is a client in no group.

    Dividing groups again finds what is hidden by larger differences. All divisions examined are returned, in order.
    """
    examined: list[Division] = []

    def parts(rows: npt.NDArray[np.intp]) -> Iterator[npt.NDArray[np.intp]]:
        found, points = divide(normalise(signatures[rows], directions), noise, min_samples)
        found = replace(found, inner=len(rows) < len(signatures))
        examined.append(found)
        if not found.holds:
            yield rows
            return
        labels = run_dbscan(points, found.eps, found.min_samples)
        for label in range(labels.max() + 1):
            yield from parts(rows[labels == label])

    out = np.full(len(signatures), -1, np.int64)
    for number, rows in enumerate(parts(np.arange(len(signatures)))):
        out[rows] = number
    return out, examined


def normalise(signatures: Points, directions: bool, origin: Points | None = None) -> Points:
    """The points whose distances count: the signatures, or their directions from the median."""
    if not directions:
        return signatures
    away = signatures - (np.median(signatures, axis=0) if origin is None else origin)
    lengths = np.linalg.norm(away, axis=1, keepdims=True)
    return np.asarray(away / np.where(lengths > 0, lengths, 1.0))
