"""FedRAP: item vectors are the sum of a shared part, which is sent, and a personal part, which stays."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.selection import check_setting
from mutirao.systems.recsys.partially_local.base import (
    Examples,
    Floats,
    Method,
    RoundSettings,
    TrainResult,
    batches,
    linear,
    log_loss,
    sigmoid,
)
from mutirao.systems.recsys.ratings import Taste


@dataclass(frozen=True)
class FedRAP(Method):
    """p = sigmoid(w (x + d) + b), with w, b and all d_i personal. Each batch takes a gradient step on

        -mean(y ln p + (1 - y) ln(1 - p)) - apart mean((d - x)^2) + sparse mean|x|

    at rate `lr` for w and b, `item_lr` for x and d, which after each step are multiplied by `fade`. Means are over the
    batch; `apart` and `sparse` grow with the round as tanh(round / 10). Li, Long and Zhou, "Federated Recommendation
    with Additive Personalization", ICLR 2024. A user keeps d of the items that it has trained.

    >>> personal = FedRAP().initial_personal(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in personal.items()}
    {'weights': (8,), 'bias': (1,), 'rows': (0,), 'values': (0, 8)}
    """

    lr: float = 0.5
    item_lr: float = 200.0
    decay: float = 1e-4
    apart: float = 0.1
    sparse: float = 0.1
    fade: float = 0.95
    batch_size: int = 2048

    positive = ("lr", "item_lr", "batch_size")
    non_negative = ("decay", "apart", "sparse")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("fade", 0 < self.fade <= 1, self.fade, "above 0 and at most 1 (none)")

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 1), as torch initialises an embedding."""
        return draw.normal(0, 1, (items, dimension)).astype(np.float32)

    def initial_personal(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A linear layer with one output, and no personal part of any item."""
        no_items = {"rows": np.zeros(0, np.int32), "values": np.zeros((0, dimension), np.float32)}
        return {**linear(dimension, draw), **no_items}

    def train(
        self, x: Floats, personal: Arrays, examples: Examples, settings: RoundSettings, draw: np.random.Generator
    ) -> TrainResult:
        """Train on the batches of a round."""
        w = personal["weights"].astype(np.float64)
        b = float(personal["bias"][0])
        d = personal_part(personal, examples.rows)
        growth = math.tanh(settings.round / 10)
        rate = settings.factor
        total = 0.0
        count = 0
        for at, y in batches(examples, self.batch_size, settings.epochs, draw):
            features = (x + d)[at]
            s = features @ w + b
            gradient = (sigmoid(s) - y) / len(y)
            times = np.bincount(at, minlength=len(x))[:, None]
            share = times / (len(y) * x.shape[1])
            pull = np.outer(np.bincount(at, gradient, len(x)), w)
            # The derivative of -apart mean((d - x)^2) by x; by d it has the opposite sign.
            away = 2 * growth * self.apart * share * (d - x)
            decay = self.decay * (times > 0)
            x_gradient = pull + away + growth * self.sparse * share * np.sign(x) + decay * x
            d_gradient = pull - away + decay * d
            w = w - rate * self.lr * (features.T @ gradient + self.decay * w)
            b = b - rate * self.lr * (gradient.sum() + self.decay * b)
            x = x - rate * self.item_lr * x_gradient
            d = d - rate * self.item_lr * d_gradient
            rate *= self.fade
            total += log_loss(s, y)
            count += len(y)
        layer = {"weights": w.astype(np.float32), "bias": np.array([b], np.float32)}
        return TrainResult(x, {**layer, **replace_part(personal, examples.rows, d)}, total / count)

    def score(self, x: Floats, personal: Arrays, taste: Taste) -> Floats:
        """w (x + d) + b of all items."""
        w = personal["weights"].astype(np.float64)
        scores = x @ w + float(personal["bias"][0])
        scores[personal["rows"]] += personal["values"].astype(np.float64) @ w
        return np.asarray(scores)


def personal_part(personal: Arrays, rows: npt.NDArray[np.int32]) -> Floats:
    """The personal part of these items; 0 for those that the user never trained."""
    d = np.zeros((len(rows), personal["values"].shape[1]))
    _, here, stored = np.intersect1d(rows, personal["rows"], assume_unique=True, return_indices=True)
    d[here] = personal["values"][stored]
    return d


def replace_part(personal: Arrays, rows: npt.NDArray[np.int32], d: Floats) -> Arrays:
    """The personal part with these items replaced, in ascending order."""
    kept = ~np.isin(personal["rows"], rows)
    every = np.concatenate([personal["rows"][kept], rows])
    order = np.argsort(every)
    values = np.concatenate([personal["values"][kept], d.astype(np.float32)])
    return {"rows": every[order].astype(np.int32), "values": values[order]}
