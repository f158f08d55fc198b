"""Optimizers on the server, whose gradient is the mean update: SGD, momentum, Adam, Yogi, Adagrad."""

# ruff: noqa: D102  # `__call__` is what the class says it is

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Floats, Move, OfMean, Replies, apply_mean_update
from mutirao.core.arrays import Array, Arrays
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedOpt(OfMean):
    """SGD on the server: x' = x + lr d, where d = sum_k (n_k / n) x_k - x is the mean update.

    Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, 2021.

    >>> from mutirao import Reply
    >>> replies = {"ana": Reply({"w": np.array([2.0])}, n=10)}
    >>> FedOpt(lr=0.5)({"w": np.array([0.0])}, replies, {}).arrays["w"]  # half of the way
    array([1.])
    """

    lr: float = 1.0

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return apply_mean_update(current, replies, lambda name, d: self.lr * d)


@dataclass(frozen=True)
class FedAvgM(OfMean):
    """Server momentum: v' = momentum v + d (at first v' = d), x' = x + lr v', where d is the mean update.

    Hsu, Qi and Brown, 2019.

    Two rounds with the same update of 1; the second goes further, because it adds 0.9 times the first:

    >>> from mutirao import Reply
    >>> model, memory = {"w": np.array([0.0])}, {}
    >>> for _ in range(2):
    ...     model = FedAvgM()(model, {"ana": Reply({"w": model["w"] + 1}, n=10)}, memory).arrays
    ...     print(model["w"])
    [1.]
    [2.9]
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        def move(name: str, d: Floats) -> Floats:
            key = f"fedavgm.v.{name}"
            if key in memory:
                d = np.asarray(self.momentum * memory[key] + d)
            memory[key] = d
            return self.lr * d

        return apply_mean_update(current, replies, move)


@dataclass(frozen=True)
class FedAdam(OfMean):
    """Adam on the server: x' = x + r m' / (sqrt(v') + tau), with the moments of the mean update d.

    m' = beta1 m + (1 - beta1) d, v' = beta2 v + (1 - beta2) d^2, both at first 0, and
    r = lr sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)) in step t = 1, 2, ...: the bias correction of
    Kingma and Ba, 2015, one step ahead, as in Flower. Reddi et al., 2021, have r = lr, and v begin at tau^2 or above.

    The first step has about the length `lr`, however long the update is:

    >>> from mutirao import Reply
    >>> small, large = ({"ana": Reply({"w": np.array([u])}, n=10)} for u in (1.0, 100.0))
    >>> [round(float(FedAdam(lr=0.1)({"w": np.array([0.0])}, r, {}).arrays["w"][0]), 3) for r in (small, large)]
    [0.074, 0.074]
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        t = int(memory.get("fedadam.step", 0)) + 1
        memory["fedadam.step"] = np.array(t, np.int64)
        rate = self.lr * math.sqrt(1 - self.beta2 ** (t + 1)) / (1 - self.beta1 ** (t + 1))

        def second_moment(v: Array, square: Floats) -> Array:
            return self.beta2 * v + (1 - self.beta2) * square

        move = adaptive_move("fedadam", memory, second_moment, rate, self.tau, self.beta1)
        return apply_mean_update(current, replies, move)


@dataclass(frozen=True)
class FedYogi(OfMean):
    """Yogi on the server: as FedAdam with r = lr and v' = v - (1 - beta2) d^2 sign(v - d^2), v at first 0.

    Reddi et al., 2021 (who let v begin at tau^2 or above).

    >>> from mutirao import Reply
    >>> model, memory = {"w": np.array([0.0])}, {}
    >>> merged = FedYogi(lr=0.01)(model, {"ana": Reply({"w": np.array([1.0])}, n=10)}, memory)
    >>> merged.arrays["w"].round(4), sorted(memory)  # the moments are kept for the next round
    (array([0.0099]), ['fedyogi.m.w', 'fedyogi.v.w'])
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        def second_moment(v: Array, square: Floats) -> Array:
            return v - (1 - self.beta2) * square * np.sign(v - square)

        move = adaptive_move("fedyogi", memory, second_moment, self.lr, self.tau, self.beta1)
        return apply_mean_update(current, replies, move)


@dataclass(frozen=True)
class FedAdagrad(OfMean):
    """Adagrad on the server: v' = v + d^2, x' = x + lr d / (sqrt(v') + tau), v at first 0.

    Reddi et al., 2021 (who let v begin at tau^2 or above).

    The same update again and again moves the model less and less:

    >>> from mutirao import Reply
    >>> model, memory = {"w": np.array([0.0])}, {}
    >>> for _ in range(3):
    ...     before = model["w"]
    ...     model = FedAdagrad()(model, {"ana": Reply({"w": before + 1}, n=10)}, memory).arrays
    ...     print((model["w"] - before).round(3))
    [0.1]
    [0.071]
    [0.058]
    """

    lr: float = 0.1
    tau: float = 1e-3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return apply_mean_update(current, replies, adaptive_move("fedadagrad", memory, np.add, self.lr, self.tau))


def adaptive_move(
    prefix: str,
    memory: Arrays,
    second_moment: Callable[[Array, Floats], Array],
    rate: float,
    tau: float,
    beta1: float = 0.0,
) -> Move:
    """The step that Adam, Yogi and Adagrad share: they differ in `second_moment`, the rule (v, d^2) -> v'."""

    def move(name: str, d: Floats) -> Floats:
        first = f"{prefix}.m.{name}"
        second = f"{prefix}.v.{name}"
        zero = np.zeros_like(d)
        # New arrays, nothing in place: if the round fails, the run keeps the old moments.
        memory[second] = np.asarray(second_moment(memory.get(second, zero), d * d))
        if beta1:
            d = np.asarray(beta1 * memory.get(first, zero) + (1 - beta1) * d)
            memory[first] = d
        return rate * d / (np.sqrt(memory[second]) + tau)

    return move
