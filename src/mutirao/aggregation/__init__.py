"""How replies become the next model. Each aggregator is called as `(current, replies, memory) -> Merged`.

Clients are taken in the order of their names and sums run in float64, so the order of replies changes no bit.
Integer buffers take the rounded mean and are never stepped by an optimiser. What must outlive the round (momentum,
moments, a step counter) is written into `memory` under the aggregator's own prefix.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Floats, OfMean, Replies, apply_mean_update, merge_models
from mutirao.aggregation.fedasync import FedAsync
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.aggregation.feddyn import FedDyn
from mutirao.aggregation.fedexp import FedExP
from mutirao.aggregation.fednova import FedNova
from mutirao.aggregation.fedrisk import FedRisk
from mutirao.aggregation.mean import Mean
from mutirao.aggregation.qfedavg import QFedAvg
from mutirao.aggregation.scaffold import Scaffold
from mutirao.core.arrays import Array, Arrays, blend, cast_to
from mutirao.core.parts import Merged

BLOCK = 4096  # columns of the models compared at once by Krum: they stay in the cache


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

    The server joins as FedAvg does; what differs is told to the clients:

    >>> FedProx(mu=0.01).needs
    frozenset({'config:mu=0.01'})
    """

    mu: float = 0.1

    @property
    def needs(self) -> frozenset[str]:
        """The clients must know the weight of the proximal term."""
        return frozenset({f"config:mu={self.mu!r}"})


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
            memory[key] = np.asarray(self.momentum * memory[key] + d if key in memory else d)
            return self.lr * memory[key]

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

        second = lambda v, square: self.beta2 * v + (1 - self.beta2) * square  # noqa: E731
        return _adaptive("fedadam", current, replies, memory, second, rate, self.tau, self.beta1)


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
        second = lambda v, square: v - (1 - self.beta2) * square * np.sign(v - square)  # noqa: E731
        return _adaptive("fedyogi", current, replies, memory, second, self.lr, self.tau, self.beta1)


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
        return _adaptive("fedadagrad", current, replies, memory, np.add, self.lr, self.tau)


@dataclass(frozen=True)
class FedMedian:
    """The median of each coordinate, every client counting once; with an even number, the mean of the middle two.

    Yin, Chen, Ramchandran and Bartlett, 2018.

    One client far off moves the mean to 31, and the median not at all:

    >>> from mutirao import Reply
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in {"ana": 1.0, "bia": 2.0, "caio": 90.0}.items()}
    >>> [merge({"w": np.array([0.0])}, replies, {}).arrays["w"] for merge in (FedAvg(), FedMedian())]
    [array([31.]), array([2.])]
    """

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return _middle(current, replies, cut=(len(replies) - 1) // 2)


@dataclass(frozen=True)
class FedTrimmedAvg(Checked):
    """The plain mean of each coordinate without its floor(beta k) least and as many greatest values, of k clients.

    Yin, Chen, Ramchandran and Bartlett, 2018.

    Of five clients, `beta=0.2` leaves out the least value and the greatest:

    >>> from mutirao import Reply
    >>> replies = {f"c{i}": Reply({"w": np.array([x])}, n=10) for i, x in enumerate([-500.0, 1.0, 2.0, 3.0, 900.0])}
    >>> FedTrimmedAvg(beta=0.2)({"w": np.array([0.0])}, replies, {}).arrays["w"]
    array([2.])
    """

    beta: float = 0.2

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return _middle(current, replies, cut=int(self.beta * len(replies)))


@dataclass(frozen=True)
class Krum(Checked):
    """The one model nearest to its neighbours: argmin_k of the sum of ||x_k - x_j||^2 over its k - f - 2 nearest j.

    f is `malicious`, the clients that may lie; the promise holds for more than 2 f + 2 replies.
    Blanchard, El Mhamdi, Guerraoui and Stainer, 2017.

    The model of one client is taken as it is, and never that of the client far off:

    >>> from mutirao import Reply
    >>> told = {"ana": 1.0, "bia": 1.2, "caio": 1.3, "davi": 2.0, "liar": 90.0}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in told.items()}
    >>> Krum(malicious=1)({"w": np.array([0.0])}, replies, {}).arrays["w"]
    array([1.2])
    """

    malicious: int = 0

    @property
    def fewest(self) -> int:
        """More than 2 f + 2."""
        return 2 * self.malicious + 3 if self.malicious else 1

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return _nearest(current, replies, self.malicious, keep=1)


@dataclass(frozen=True)
class MultiKrum(Checked):
    """The plain mean of the `keep` models with the best Krum scores; declaring more samples gains no weight.

    Blanchard, El Mhamdi, Guerraoui and Stainer, 2017.

    >>> from mutirao import Reply
    >>> told = {"ana": 1.0, "bia": 1.2, "caio": 1.3, "davi": 2.0, "liar": 90.0}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in told.items()}
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
        return _nearest(current, replies, self.malicious, self.keep)


@dataclass(frozen=True)
class RFA(Checked):
    """The geometric median of the models, every client counting once: argmin_z of the sum of ||x_k - z||.

    From the plain mean on, z becomes the mean weighted by 1 / max(nu, ||x_k - z||), `iterations` times: the smoothed
    Weiszfeld algorithm of Pillutla, Kakade and Harchaoui, 2022, who weight by samples, which a client may lie about.

    >>> from mutirao import Reply
    >>> points = {"ana": [0.0, 0.0], "bia": [1.0, 0.0], "caio": [0.0, 1.0], "liar": [99.0, 99.0]}
    >>> replies = {c: Reply({"w": np.array(x)}, n=10) for c, x in points.items()}
    >>> RFA()({"w": np.zeros(2)}, replies, {}).arrays["w"].round(1)  # the mean is (25, 25)
    array([0.5, 0.5])
    """

    iterations: int = 32
    nu: float = 1e-6

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        clients = sorted(replies)
        squares = _distances(current, [replies[c].arrays for c in clients])
        shares = np.full(len(clients), 1 / len(clients))
        for _ in range(self.iterations):
            pull = 1 / np.maximum(self.nu, _lengths(squares, shares))
            shares = pull / pull.sum()
        return merge_models(current, replies, dict(zip(clients, shares.tolist(), strict=True)))


@dataclass(frozen=True)
class CenteredClipping(Checked):
    """No client moves the model further than the median one: v <- v + mean_k clip(u_k - v, tau), `iterations` times.

    u_k = x_k - x are the updates, v begins as the update of the round before (at first 0), and x' = x + v. clip(d, tau)
    shortens d to the length tau, which is `radius` times the median of ||u_k - v||, so that it fits every task and
    round. Karimireddy, He and Jaggi, 2021, where u_k are the clients' momenta and tau is a constant.

    >>> from mutirao import Reply
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in {"ana": 1.0, "bia": 2.0, "liar": 90.0}.items()}
    >>> CenteredClipping()({"w": np.array([0.0])}, replies, {}).arrays["w"].round(1)  # the mean is 31
    array([1.9])
    """

    radius: float = 1.0
    iterations: int = 3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        clients, floats = sorted(replies), [k for k, x in current.items() if x.dtype.kind == "f"]
        start = current | {k: current[k] + memory.get(f"centeredclipping.v.{k}", 0.0) for k in floats}
        squares = _distances(current, [*(replies[c].arrays for c in clients), start])
        shares = np.append(np.zeros(len(clients)), 1.0)  # of the clients' models, and of where v begins
        for _ in range(self.iterations):
            away = _lengths(squares, shares)[:-1]
            tau = self.radius * float(np.median(away))
            kept = np.divide(tau, away, out=np.ones_like(away), where=away > tau) / len(clients)
            shares = (1 - kept.sum()) * shares + np.append(kept, 0.0)
        weights = shares[:-1] / shares[:-1].sum()
        merged = merge_models(current, replies, dict(zip(clients, weights.tolist(), strict=True)))
        for name in floats:
            x = current[name]
            end = blend([*(replies[c].arrays[name] for c in clients), start[name]], shares.tolist())
            memory[f"centeredclipping.v.{name}"] = np.asarray(end - x)
            merged.arrays[name] = cast_to(end, x.dtype)
        return merged


OF_MEAN = (FedAvg, FedAvgM, FedProx, FedOpt, FedAdam, FedYogi, FedAdagrad)
ROBUST = (FedMedian, FedTrimmedAvg, Krum, MultiKrum, RFA, CenteredClipping)
STEERED = (Scaffold, FedDyn, FedNova, FedExP, QFedAvg)
STALE = (FedBuff, FedAsync)
NAMES = {part.__name__.lower(): part for part in (*OF_MEAN, Mean, *ROBUST, FedRisk, *STEERED, *STALE)}


def _adaptive(
    prefix: str,
    current: Arrays,
    replies: Replies,
    memory: Arrays,
    second: Callable[[Array, Floats], Array],
    rate: float,
    tau: float,
    beta1: float = 0.0,
) -> Merged:
    """What Adam, Yogi and Adagrad share: they differ in `second`, the rule (v, d^2) -> v'."""

    def move(name: str, d: Floats) -> Floats:
        first, spread = f"{prefix}.m.{name}", f"{prefix}.v.{name}"
        nothing = np.zeros_like(d)
        memory[spread] = np.asarray(second(memory.get(spread, nothing), d * d))
        if beta1:
            memory[first] = d = np.asarray(beta1 * memory.get(first, nothing) + (1 - beta1) * d)
        return rate * d / (np.sqrt(memory[spread]) + tau)

    return apply_mean_update(current, replies, move)


def _middle(current: Arrays, replies: Replies, cut: int) -> Merged:
    """The plain mean of each coordinate without its `cut` least and `cut` greatest values."""
    clients = sorted(replies)

    def middle(name: str, x: Array) -> Array:
        ranked = np.sort(np.stack([replies[c].arrays[name] for c in clients]), axis=0)[cut : len(clients) - cut]
        mean = cast_to(ranked.mean(axis=0, dtype=np.float64), x.dtype)
        return np.where(ranked[0] == ranked[-1], ranked[0], mean)  # what all agree on stays, to the bit

    return Merged({name: middle(name, x) for name, x in current.items()}, dict.fromkeys(clients, 1 / len(clients)))


def _nearest(current: Arrays, replies: Replies, malicious: int, keep: int) -> Merged:
    clients = sorted(replies)
    distances = _distances(current, [replies[c].arrays for c in clients])
    np.fill_diagonal(distances, np.inf)  # a client is no neighbour of itself
    neighbours = min(max(1, len(clients) - malicious - 2), len(clients) - 1)
    scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
    kept = sorted(clients[i] for i in np.argsort(scores, kind="stable")[:keep])  # ties: the first name
    merged = merge_models(current, replies, dict.fromkeys(kept, 1 / len(kept)))
    figures = {c: {"krum_score": float(s)} for c, s in zip(clients, scores, strict=True)}
    return Merged(merged.arrays, dict.fromkeys(clients, 0.0) | merged.weights, figures)


def _lengths(squares: Floats, shares: Floats) -> Floats:
    """||x_k - z|| for z = sum_j share_j x_j, shares that sum to one, from the squared distances between the x."""
    towards = squares @ shares
    return np.asarray(np.sqrt(np.maximum(0.0, towards - shares @ towards / 2)))


def _distances(current: Arrays, models: list[Arrays]) -> Floats:
    """||x_i - x_j||^2 from differences: ||x_i||^2 + ||x_j||^2 - 2 x_i x_j would cancel for models that are alike.

    Integer buffers are left out (unless there is nothing else): a counter of batches would outweigh all parameters.
    """
    names = [k for k, v in current.items() if v.dtype.kind == "f"] or list(current)
    out = np.zeros((len(models), len(models)))
    for name in sorted(names):
        rows = [np.ravel(m[name]) for m in models]
        for start in range(0, rows[0].size, BLOCK):
            block = np.array([row[start : start + BLOCK] for row in rows], np.float64)
            for i in range(len(models) - 1):
                gaps = block[i + 1 :] - block[i]
                out[i, i + 1 :] += np.einsum("ij,ij->i", gaps, gaps)
    return out + out.T
