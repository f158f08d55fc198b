"""FedClust (Islam et al., "FedClust: Tackling Data Heterogeneity in Federated Learning through Weight-Driven Client
Clustering", ICPP 2024): groups clients whose last layers are similar after some local epochs.
"""

from dataclasses import dataclass

from mutirao.clustering.auto import Points, pairwise
from mutirao.clustering.hierarchical import HierarchicalGrouper
from mutirao.clustering.signatures import Weights


@dataclass(frozen=True)
class LastLayer(Weights):
    """The weights of the last layer, minus the initial ones; distances are the same."""

    directions = False


@dataclass(frozen=True)
class Fedclust(HierarchicalGrouper):
    """Merges clients by d_ij = |w_i - w_j|, w the weights of the last layer, up to a threshold (their lambda).

    >>> import numpy as np
    >>> Fedclust(threshold=1.0).measure(np.array([[0.0, 0.0], [3.0, 4.0]]))
    array([[0., 5.],
           [5., 0.]])
    """

    signature = LastLayer()

    def measure(self, points: Points) -> Points:
        """Euclidean."""
        return pairwise(points)
