"""Means of the clients' models: weighted by samples (FedAvg, FedProx), or each client counting once (Mean)."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import (
    Checked,
    Floats,
    OfMean,
    Replies,
    apply_mean_update,
    equal_shares,
    merge_models,
)
from mutirao.core.arrays import Arrays
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedAvg(OfMean):
    """The mean of the models weighted by samples: x' = sum_k (n_k / n) x_k.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, 2017.

    >>> from mutirao import Reply
    >>> replies = {"ana": Reply({"w": np.array([0.0])}, n=30), "bia": Reply({"w": np.array([4.0])}, n=10)}
    >>> merged = FedAvg()({"w": np.array([9.0])}, replies, {})
    >>> merged.arrays["w"], merged.weights
    (array([1.]), {'ana': 0.75, 'bia': 0.25})
    """

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return apply_mean_update(current, replies)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg on the server; the clients add (mu / 2) ||x - x_global||^2 to their loss.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, 2020.

    The server aggregates as FedAvg does; clients are sent the weight of the proximal term:

    >>> FedProx(mu=0.01).needs.config
    {'mu': 0.01}
    """

    mu: float = 0.1

    @property
    def needs(self) -> Needs:
        """Clients must support the proximal term."""
        return Needs(config={"mu": self.mu})


@dataclass(frozen=True)
class Mean(Checked):
    """The unweighted mean of updates: v' = momentum v + d (at first v' = d), x' = x + lr v', d = 1/|S| sum_k (x_k - x).

    Every client counts once, whatever its number of samples. This is the control for methods that weigh clients:
    FedAvg and FedAvgM without n_k, and FedRisk with all risks 0.

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> replies = {"ana": Reply({"w": np.array([0.0])}, n=30), "bia": Reply({"w": np.array([4.0])}, n=10)}
    >>> Mean()({"w": np.array([9.0])}, replies, {}).arrays["w"]  # FedAvg gives 1, as ana has more samples
    array([2.])
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        def move(name: str, d: Floats) -> Floats:
            if self.momentum:
                key = f"mean.v.{name}"
                if key in memory:
                    d = np.asarray(self.momentum * memory[key] + d)
                memory[key] = d
            return self.lr * d

        return merge_models(current, replies, equal_shares(replies), move)
