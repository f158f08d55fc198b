"""FedBuff: the server aggregates as soon as a buffer of updates has arrived, whenever their clients began."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from mutirao.aggregation.base import check_setting, staleness_of
from mutirao.core.arrays import Array, Arrays, average_arrays, blend, cast_to
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedBuff:
    """The mean of the first K updates to arrive, stale ones with less weight: x' = x + lr (1/K) sum_k s_k u_k.

    u_k = x_k - x_start,k is what client k changed of the model it began with, and s = (1 + staleness)^-exponent.
    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, 2022, with s = 1 / sqrt(1 + staleness); `per_round` clients
    train at once. Every client counts once, whatever its samples. The sum is divided by K, as in their algorithm, so
    that stale updates move the model less; FLSim's buffer adds them up, which is K times the rate. `buffer` 0 is half
    of the clients that train at once.

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> fresh, stale = (Reply({"w": np.array([1.0])}, metrics={"staleness": s}, n=10) for s in (0.0, 3.0))
    >>> merged = FedBuff()({"w": np.array([0.0])}, {"ana": fresh, "bia": stale}, {})
    >>> merged.weights, merged.arrays["w"]
    ({'ana': 0.5, 'bia': 0.25}, array([0.75]))
    """

    lr: float = 1.0
    buffer: int = 0
    exponent: float = 0.5

    needs = Needs(server={"staleness"})

    def __post_init__(self) -> None:
        check_setting("lr", 0 < self.lr < inf, self.lr, "above 0")
        check_setting("buffer", self.buffer >= 0, self.buffer, "at least 1, or 0 (half of the clients at work)")
        check_setting("exponent", 0 <= self.exponent < inf, self.exponent, "at least 0")

    def buffer_of(self, at_once: int) -> int:
        """The number of replies that make a model."""
        return self.buffer or (at_once + 1) // 2

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        clients = sorted(replies)
        weights = {c: (1 + staleness_of(replies[c])) ** -self.exponent / len(clients) for c in clients}
        shares = [self.lr * weights[c] for c in clients]

        def stepped(name: str, x: Array) -> Array:
            values = [replies[c].arrays[name] for c in clients]
            if x.dtype.kind != "f":
                return average_arrays(values, [1 / len(clients)] * len(clients))
            return cast_to(blend([x, *values], [1 - sum(shares), *shares]), x.dtype)

        return Merged({name: stepped(name, x) for name, x in current.items()}, weights)
