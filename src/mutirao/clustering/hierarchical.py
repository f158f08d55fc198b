"""Hierarchical clustering up to a distance threshold, as in PACFL and FedClust."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mutirao.clustering.auto import Labels, Points
from mutirao.clustering.base import Grouper
from mutirao.clustering.context import GroupContext
from mutirao.clustering.formation import Admission, in_order
from mutirao.clustering.group_state import Grouping, Groups, group_name
from mutirao.core.fleet import ClientId, Reply

# The linkage in scipy's names. PACFL's authors call `average` what scipy calls `weighted`: both merged groups count the
# same, whatever their sizes (WPGMA).
LINKAGES: dict[str, Literal["weighted", "complete", "single"]] = {
    "average": "weighted",
    "complete": "complete",
    "single": "single",
}


@dataclass(frozen=True)
class HierarchicalGrouper(Grouper):
    """Groups by the distances between signatures, merged up to `threshold` or, if a number is given, to so many."""

    threshold: float = 1.0
    groups: int = 0  # number of groups, instead of a threshold (0: by the threshold)
    linkage: str = "average"

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if self.threshold <= 0:
            raise ValueError(f"threshold is {self.threshold!r}, but must be above 0")
        if self.groups < 0:
            raise ValueError(f"groups is {self.groups!r}, but must be at least 0")
        if self.linkage not in LINKAGES:
            raise ValueError(f"linkage is {self.linkage!r}, but must be one of {', '.join(LINKAGES)}")

    def measure(self, points: Points) -> Points:
        """The distance between each two signatures."""
        raise NotImplementedError

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        """The groups after merging."""
        names = tuple(sorted(replies))
        points = np.stack([replies[c].extras["signature"].astype(np.float64) for c in names])
        return Groups(names, merge(self.measure(points), self.threshold, self.groups, self.linkage), points)

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        """The group with the smallest mean distance to its clients."""
        groups = state.groups
        out = {}
        for client in sorted(replies):
            own = replies[client].extras["signature"].astype(np.float64)
            away = self.measure(np.vstack([own, groups.signatures]))[0, 1:]
            means = [away[groups.labels == g].mean() for g in range(groups.count)]
            label = int(np.argmin(means))
            out[client] = Admission(group_name(label, groups.count), float(means[label]), 1.0)
        return out


def merge(distances: Points, threshold: float, groups: int = 0, linkage: str = "average") -> Labels:
    """The group of each client: the two nearest are merged while they are no farther apart than the threshold.

    >>> merge(np.array([[0, 1, 9], [1, 0, 7], [9, 7, 0.0]]), threshold=7.5).tolist()  # (9 + 7) / 2 is farther
    [0, 0, 1]
    """
    from scipy.cluster.hierarchy import fcluster
    from scipy.cluster.hierarchy import linkage as link
    from scipy.spatial.distance import squareform

    if len(distances) == 1:
        return np.zeros(1, np.int64)
    tree = link(squareform(distances, checks=False), LINKAGES[linkage])
    found = fcluster(tree, threshold, "distance")
    if groups:
        found = fcluster(tree, groups, "maxclust")
    # scipy numbers clusters from 1, in no useful order.
    return in_order(np.asarray(found, np.int64) - 1)
