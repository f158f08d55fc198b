"""Krum and Multi-Krum: the models that are nearest to their neighbours."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Replies, merge_models, squared_distances
from mutirao.core.arrays import Arrays
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class Krum(Checked):
    """The one model nearest to its neighbours: argmin_k of the sum of ||x_k - x_j||^2 over its k - f - 2 nearest j.

    f is `malicious`, the number of malicious clients; the guarantee holds for more than 2 f + 2 replies.
    Blanchard, El Mhamdi, Guerraoui and Stainer, 2017.

    The model of one client is taken as it is, and never the outlier:

    >>> from mutirao import Reply
    >>> values = {"ana": 1.0, "bia": 1.2, "caio": 1.3, "davi": 2.0, "eve": 90.0}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in values.items()}
    >>> Krum(malicious=1)({"w": np.array([0.0])}, replies, {}).arrays["w"]
    array([1.2])
    """

    malicious: int = 0

    @property
    def fewest(self) -> int:
        """More than 2 f + 2."""
        if self.malicious:
            return 2 * self.malicious + 3
        return 1

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return nearest_models(current, replies, self.malicious, keep=1)


@dataclass(frozen=True)
class MultiKrum(Checked):
    """The plain mean of the `keep` models with the best Krum scores; declaring more samples gains no weight.

    Blanchard, El Mhamdi, Guerraoui and Stainer, 2017.

    >>> from mutirao import Reply
    >>> values = {"ana": 1.0, "bia": 1.2, "caio": 1.3, "davi": 2.0, "eve": 90.0}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in values.items()}
    >>> merged = MultiKrum(malicious=1, keep=2)({"w": np.array([0.0])}, replies, {})
    >>> merged.arrays["w"].round(2), [c for c, weight in merged.weights.items() if weight]
    (array([1.25]), ['bia', 'caio'])
    """

    malicious: int = 0
    keep: int = 1

    @property
    def fewest(self) -> int:
        """As many as Krum, and as are kept."""
        return max(Krum(self.malicious).fewest, self.keep)

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return nearest_models(current, replies, self.malicious, self.keep)


def nearest_models(current: Arrays, replies: Replies, malicious: int, keep: int) -> Merged:
    """The mean of the `keep` models with the least Krum scores."""
    clients = sorted(replies)
    distances = squared_distances(current, [replies[c].arrays for c in clients])
    # A client is no neighbour of itself: infinity sorts behind all others.
    np.fill_diagonal(distances, np.inf)
    neighbours = min(max(1, len(clients) - malicious - 2), len(clients) - 1)
    scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
    # A stable sort, so that of equal scores the first name wins on every machine.
    kept = sorted(clients[i] for i in np.argsort(scores, kind="stable")[:keep])
    merged = merge_models(current, replies, dict.fromkeys(kept, 1 / len(kept)))
    figures = {c: {"krum_score": float(s)} for c, s in zip(clients, scores, strict=True)}
    return Merged(merged.arrays, dict.fromkeys(clients, 0.0) | merged.weights, figures)
