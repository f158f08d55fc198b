"""The plain mean: every client counts once, whatever its samples. What a method that weighs clients must beat."""

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Floats, Replies, equal_shares, merge_models
from mutirao.core.arrays import Arrays
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class Mean(Checked):
    """The unweighted mean of updates: v' = momentum v + d (at first v' = d), x' = x + lr v', d = 1/|S| sum_k (x_k - x).

    FedAvg and FedAvgM without the numbers of samples n_k, and FedRisk with all risks 0: the control of both.

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> replies = {"ana": Reply({"w": np.array([0.0])}, n=30), "bia": Reply({"w": np.array([4.0])}, n=10)}
    >>> Mean()({"w": np.array([9.0])}, replies, {}).arrays["w"]  # FedAvg gives 1, as ana has more samples
    array([2.])
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; v is kept in `memory` if there is momentum."""

        def move(name: str, d: Floats) -> Floats:
            if self.momentum:
                key = f"mean.v.{name}"
                memory[key] = d = np.asarray(self.momentum * memory[key] + d if key in memory else d)
            return self.lr * d

        return merge_models(current, replies, equal_shares(replies), move)
