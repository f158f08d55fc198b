"""FedAsync: each model is mixed into the current one as soon as it arrives, stale ones with less weight."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from mutirao.aggregation.base import check_setting, staleness_of
from mutirao.core.arrays import Arrays, average_arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged

Decay = Literal["constant", "hinge", "polynomial"]


@dataclass(frozen=True)
class FedAsync:
    """Each model is mixed in as it arrives, stale ones less: x' = (1 - m) x + m x_k with m = mixing s(staleness).

    s is 1 (`constant`), (staleness + 1)^-a (`polynomial`), or 1 up to a staleness of b and then
    1 / (a (staleness - b) + 1) (`hinge`; the paper has a = 10 there). With `mu` above 0 clients add
    (mu / 2) ||x - x_start||^2 to their loss. Xie, Koyejo and Gupta, 2019. A model trained on the current one has
    staleness 0. `per_round` clients train at once.

    A model that was trained on an older one has less weight:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> fresh, stale = (Reply({"w": np.array([1.0])}, metrics={"staleness": s}, n=10) for s in (0.0, 3.0))
    >>> [FedAsync()({"w": np.array([0.0])}, {"ana": r}, {}).arrays["w"] for r in (fresh, stale)]
    [array([0.6]), array([0.3])]
    """

    mixing: float = 0.6
    decay: Decay = "polynomial"
    a: float = 0.5
    b: int = 4
    mu: float = 0.0

    def __post_init__(self) -> None:
        check_setting("mixing", 0 < self.mixing <= 1, self.mixing, "above 0 and at most 1")
        check_setting(
            "decay", self.decay in ("constant", "hinge", "polynomial"), self.decay, "constant, hinge or polynomial"
        )
        check_setting("a", 0 <= self.a < inf, self.a, "at least 0")
        check_setting("b", self.b >= 0, self.b, "at least 0")
        check_setting("mu", 0 <= self.mu < inf, self.mu, "at least 0")

    @property
    def needs(self) -> Needs:
        """The staleness of replies, and models as they were trained; if `mu` is set, clients must support it."""
        needs = Needs(server={"staleness", "models"})
        if self.mu:
            return needs | Needs(config={"mu": self.mu})
        return needs

    def buffer_of(self, at_once: int) -> int:
        """Every reply makes a model."""
        return 1

    def scale(self, staleness: float) -> float:
        """s(staleness)."""
        if self.decay == "hinge":
            if staleness <= self.b:
                return 1.0
            return 1 / (self.a * (staleness - self.b) + 1)
        if self.decay == "polynomial":
            return float((staleness + 1) ** -self.a)
        return 1.0

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        model = current
        weights: dict[ClientId, float] = {}
        # There is one reply as a rule; of several, the stalest comes first.
        for client in sorted(replies, key=lambda c: (-staleness_of(replies[c]), c)):
            share = self.mixing * self.scale(staleness_of(replies[client]))
            weights[client] = share
            theirs = replies[client].arrays
            model = {name: average_arrays([x, theirs[name]], [1 - share, share]) for name, x in model.items()}
        return Merged(model, weights)
