"""FedRAP: item vectors are a common part, which is sent, plus a part of each user's own, which stays."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.selection import check_setting
from mutirao.systems.recsys.partially_local.base import (
    Floats,
    Method,
    Steps,
    Trained,
    Work,
    batches,
    linear,
    log_loss,
    sigmoid,
)
from mutirao.systems.recsys.ratings import Taste


@dataclass(frozen=True)
class FedRAP(Method):
    """p = sigmoid(w (x + d) + b), with w, b and all d_i the user's. A batch makes a step down the slope of

        -mean(y ln p + (1 - y) ln(1 - p)) - apart mean((d - x)^2) + sparse mean|x|

    at rate `lr` for w and b, `item_lr` for x and d, which after each step are `fade` times as large. Means are over the
    batch; `apart` and `sparse` grow with the round as tanh(round / 10). Li, Long and Zhou, "Federated Recommendation
    with Additive Personalization", ICLR 2024. A user keeps d of the items it has ever worked on.

    >>> own = FedRAP().begin(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in own.items()}
    {'weights': (8,), 'bias': (1,), 'rows': (0,), 'values': (0, 8)}
    """

    lr: float = 0.5
    item_lr: float = 200.0
    decay: float = 1e-4
    apart: float = 0.1
    sparse: float = 0.1
    fade: float = 0.95
    batch_size: int = 2048

    above_0 = ("lr", "item_lr", "batch_size")
    from_0 = ("decay", "apart", "sparse")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("fade", 0 < self.fade <= 1, self.fade, "above 0 and at most 1 (none)")

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 1), as torch begins an embedding."""
        return draw.normal(0, 1, (items, dimension)).astype(np.float32)

    def begin(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A linear layer with one output; no item has a part of the user's own yet."""
        none = {"rows": np.zeros(0, np.int32), "values": np.zeros((0, dimension), np.float32)}
        return {**linear(dimension, draw), **none}

    def train(self, x: Floats, own: Arrays, work: Work, steps: Steps, draw: np.random.Generator) -> Trained:
        """A round's batches."""
        w, b, total, count = own["weights"].astype(np.float64), float(own["bias"][0]), 0.0, 0
        d, width = pick(own, work.rows), x.shape[1]
        grown = math.tanh(steps.round / 10)
        rate = steps.factor
        for at, y in batches(work, self.batch_size, steps.epochs, draw):
            features = (x + d)[at]
            s = features @ w + b
            slope = (sigmoid(s) - y) / len(y)
            times = np.bincount(at, minlength=len(x))[:, None]
            pull, share = np.outer(np.bincount(at, slope, len(x)), w), times / (len(y) * width)
            away = 2 * grown * self.apart * share * (d - x)
            held = self.decay * (times > 0)
            down_x = pull + away + grown * self.sparse * share * np.sign(x) + held * x
            down_d = pull - away + held * d
            w = w - rate * self.lr * (features.T @ slope + self.decay * w)
            b = b - rate * self.lr * (slope.sum() + self.decay * b)
            x, d = x - rate * self.item_lr * down_x, d - rate * self.item_lr * down_d
            rate *= self.fade
            total, count = total + log_loss(s, y), count + len(y)
        layer = {"weights": w.astype(np.float32), "bias": np.array([b], np.float32)}
        return Trained(x, {**layer, **put(own, work.rows, d)}, total / count)

    def score(self, x: Floats, own: Arrays, taste: Taste) -> Floats:
        """w (x + d) + b of all items."""
        w = own["weights"].astype(np.float64)
        scores = x @ w + float(own["bias"][0])
        scores[own["rows"]] += own["values"].astype(np.float64) @ w
        return np.asarray(scores)


def pick(own: Arrays, rows: npt.NDArray[np.int32]) -> Floats:
    """The user's part of these rows, 0 of those it never worked on."""
    d = np.zeros((len(rows), own["values"].shape[1]))
    _, mine, there = np.intersect1d(rows, own["rows"], assume_unique=True, return_indices=True)
    d[mine] = own["values"][there]
    return d


def put(own: Arrays, rows: npt.NDArray[np.int32], d: Floats) -> Arrays:
    """The user's part with these rows replaced, in rising order."""
    kept = ~np.isin(own["rows"], rows)
    every = np.concatenate([own["rows"][kept], rows])
    order = np.argsort(every)
    values = np.concatenate([own["values"][kept], d.astype(np.float32)])
    return {"rows": every[order].astype(np.int32), "values": values[order]}
