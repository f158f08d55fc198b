"""Byzantine-robust means: the median, the trimmed mean, the geometric median and centered clipping."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Floats, Replies, merge_models, squared_distances
from mutirao.core.arrays import Array, Arrays, blend, cast_to
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedMedian:
    """The median of each coordinate, every client counting once; with an even number, the mean of the middle two.

    Yin, Chen, Ramchandran and Bartlett, 2018.

    One malicious client moves the mean to 31, and does not move the median:

    >>> from mutirao import Reply
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in {"ana": 1.0, "bia": 2.0, "caio": 90.0}.items()}
    >>> from mutirao.aggregation import FedAvg
    >>> [merge({"w": np.array([0.0])}, replies, {}).arrays["w"] for merge in (FedAvg(), FedMedian())]
    [array([31.]), array([2.])]
    """

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        return trimmed_mean(current, replies, cut=(len(replies) - 1) // 2)


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
        return trimmed_mean(current, replies, cut=int(self.beta * len(replies)))


@dataclass(frozen=True)
class RFA(Checked):
    """The geometric median of the models, every client counting once: argmin_z of the sum of ||x_k - z||.

    From the plain mean on, z becomes the mean weighted by 1 / max(nu, ||x_k - z||), `iterations` times: the smoothed
    Weiszfeld algorithm of Pillutla, Kakade and Harchaoui, 2022. They weight by samples; here every client counts the
    same, since a client may declare a false number.

    >>> from mutirao import Reply
    >>> points = {"ana": [0.0, 0.0], "bia": [1.0, 0.0], "caio": [0.0, 1.0], "eve": [99.0, 99.0]}
    >>> replies = {c: Reply({"w": np.array(x)}, n=10) for c, x in points.items()}
    >>> RFA()({"w": np.zeros(2)}, replies, {}).arrays["w"].round(1)  # the mean is (25, 25)
    array([0.5, 0.5])
    """

    iterations: int = 32
    nu: float = 1e-6

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        clients = sorted(replies)
        squares = squared_distances(current, [replies[c].arrays for c in clients])
        # z is never computed: it is a mean of the models by `shares`, and its distances follow from theirs.
        shares = np.full(len(clients), 1 / len(clients))
        for _ in range(self.iterations):
            pull = 1 / np.maximum(self.nu, distances_to_mean(squares, shares))
            shares = pull / pull.sum()
        return merge_models(current, replies, dict(zip(clients, shares.tolist(), strict=True)))


@dataclass(frozen=True)
class CenteredClipping(Checked):
    """No client moves the model further than the median one: v <- v + mean_k clip(u_k - v, tau), `iterations` times.

    u_k = x_k - x are the updates, v begins as the update of the round before (at first 0), and x' = x + v. clip(d, tau)
    shortens d to the length tau, which is `radius` times the median of ||u_k - v||, so that it fits every task and
    round. Karimireddy, He and Jaggi, 2021, where u_k are the clients' momenta and tau is a constant.

    >>> from mutirao import Reply
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in {"ana": 1.0, "bia": 2.0, "eve": 90.0}.items()}
    >>> CenteredClipping()({"w": np.array([0.0])}, replies, {}).arrays["w"].round(1)  # the mean is 31
    array([1.9])
    """

    radius: float = 1.0
    iterations: int = 3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        clients = sorted(replies)
        floats = [k for k, x in current.items() if x.dtype.kind == "f"]
        start = current | {k: current[k] + memory.get(f"centeredclipping.v.{k}", 0.0) for k in floats}
        squares = squared_distances(current, [*(replies[c].arrays for c in clients), start])
        # x + v as a mean of the clients' models and of the point where v begins, which has the whole weight at first.
        shares = np.append(np.zeros(len(clients)), 1.0)
        for _ in range(self.iterations):
            away = distances_to_mean(squares, shares)[:-1]
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


def trimmed_mean(current: Arrays, replies: Replies, cut: int) -> Merged:
    """The plain mean of each coordinate without its `cut` least and `cut` greatest values."""
    clients = sorted(replies)

    def trimmed(name: str, x: Array) -> Array:
        ranked = np.sort(np.stack([replies[c].arrays[name] for c in clients]), axis=0)[cut : len(clients) - cut]
        mean = cast_to(ranked.mean(axis=0, dtype=np.float64), x.dtype)
        # Where all agree, the value keeps every bit, which a mean of large integers does not.
        return np.where(ranked[0] == ranked[-1], ranked[0], mean)

    return Merged({name: trimmed(name, x) for name, x in current.items()}, dict.fromkeys(clients, 1 / len(clients)))


def distances_to_mean(squares: Floats, shares: Floats) -> Floats:
    """||x_k - z|| for z = sum_j share_j x_j, shares that sum to one, from the squared distances between the x."""
    # |x_k - z|^2 = sum_j s_j |x_k - x_j|^2 - 1/2 sum_ij s_i s_j |x_i - x_j|^2, and rounding must not make it negative.
    towards = squares @ shares
    return np.asarray(np.sqrt(np.maximum(0.0, towards - shares @ towards / 2)))
