"""What a server can see of a round: replies, and how the models that it may make of them do on its own queries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao import Trainer
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.systems.ranking.scorers import score

Floats = npt.NDArray[np.float64]
CUT = 10  # what the server looks at: nDCG@10
MOMENTUM = 0.9


class Queries:
    """Documents by query, and how a model does on each query."""

    def __init__(self, x: npt.NDArray[np.float32], grades: npt.ArrayLike, queries: npt.ArrayLike) -> None:
        order = np.argsort(queries, kind="stable")
        self.x, self.gains = np.ascontiguousarray(x[order]), np.exp2(np.asarray(grades, np.float64)[order]) - 1
        _, self.query, counts = np.unique(np.asarray(queries)[order], return_inverse=True, return_counts=True)
        self.rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.ideal = {k: self.gather(np.lexsort((-self.gains, self.query)), k) for k in (5, 10)}

    def gather(self, order: npt.NDArray[np.intp], k: int) -> Floats:
        """DCG@k of each query, with its documents in this order."""
        discount = np.where(self.rank < k, 1 / np.log2(self.rank + 2.0), 0.0)
        return np.bincount(self.query, self.gains[order] * discount)

    def ndcg(self, trainer: Trainer, arrays: Arrays, k: int = CUT) -> Floats:
        """nDCG@k of each query; 0 where nothing is relevant."""
        scores = score(trainer.fill(arrays), self.x)
        ideal = self.ideal[k]
        return self.gather(np.lexsort((-scores, self.query)), k) / np.where(ideal > 0, ideal, 1.0)


@dataclass
class Scene:
    """One fold and seed: what clients hold, and the queries that the server and the judge look at."""

    trainer: Trainer
    clients: Mapping[ClientId, Any]
    lists: Mapping[ClientId, Queries | None]  # each client's own, None if none of them can be ordered wrongly
    server: Queries
    judge: Queries
    shared: float  # queries that judge, for one of training
    seed: int


@dataclass
class Joining:
    """What can be known of a round's clients: their replies, and how models made of them do on the server's queries."""

    scene: Scene
    current: Arrays
    replies: Mapping[ClientId, Reply]
    velocity: Arrays
    memory: dict[ClientId, float]  # of the whole run
    clients: list[ClientId] = field(init=False)
    updates: Arrays = field(init=False)

    def __post_init__(self) -> None:
        self.clients = sorted(self.replies)
        ends = {k: np.stack([self.replies[c].arrays[k] for c in self.clients]) for k in self.current}
        self.updates = {k: v - self.current[k].astype(np.float64) for k, v in ends.items()}

    @property
    def even(self) -> Floats:
        return np.full(len(self.clients), 1 / len(self.clients))

    def lengths(self, weights: npt.ArrayLike) -> Floats:
        """|sum_k w_k (x_k - x)| for each row of weights."""
        rows = np.atleast_2d(weights)
        moved = [np.tensordot(rows, v, 1).reshape(len(rows), -1) for v in self.updates.values()]
        return np.asarray(np.linalg.norm(np.concatenate(moved, 1), axis=1))

    def losses(self) -> Floats:
        """What each client tells of its loss."""
        return np.array([self.replies[c].metrics["loss"] for c in self.clients])

    def model(self, weights: npt.ArrayLike, ahead: bool) -> Arrays:
        """x + sum_k w_k (x_k - x), and if `ahead` the momentum of the rounds before."""
        before = self.velocity if ahead and self.velocity else dict.fromkeys(self.current, 0.0)
        parts = (
            (k, x, MOMENTUM * before[k] + np.tensordot(weights, self.updates[k], 1)) for k, x in self.current.items()
        )
        return {k: (x + moved).astype(np.float32) for k, x, moved in parts}

    def look(self, weights: npt.ArrayLike, ahead: bool) -> Floats:
        """nDCG of the server's queries: a row for each row of weights."""
        rows = [self.model(w, ahead) for w in np.atleast_2d(weights)]
        return np.stack([self.scene.server.ndcg(self.scene.trainer, arrays) for arrays in rows])
