"""PFedRec: a personal score function over shared item vectors, which each user tunes before ranking."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
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
class PFedRec(Method):
    """p = sigmoid(w x + b), with w and b the user's; a batch of mean loss L = -mean(y ln p + (1 - y) ln(1 - p)) moves

        (w, b) <- (w, b) - lr dL/d(w, b),   then, with those,   x <- x - lr eta items dL/dx

    Before ranking, a user trains the received rows in the same way and ranks by the result, which is not sent (dual
    personalisation); `tune`=false ranks by the rows as received. Zhang, Long, Zhou, Yan, Zhang, Zhang
    and Yang, "Dual Personalization on Federated Recommendation", IJCAI 2023. The authors aggregate with
    `aggregate.over=all`.

    >>> personal = PFedRec().initial_personal(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in personal.items()}  # what a user keeps: its score function
    {'weights': (8,), 'bias': (1,)}
    """

    lr: float = 0.1
    eta: float = 80.0
    decay: float = 0.0
    batch_size: int = 256
    tune: bool = True

    positive = ("lr", "eta", "batch_size")
    non_negative = ("decay",)

    @property
    def tunes(self) -> bool:  # type: ignore[override]
        """Whether a user trains item rows before ranking by them."""
        return self.tune

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 1), as torch initialises an embedding."""
        return draw.normal(0, 1, (items, dimension)).astype(np.float32)

    def initial_personal(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A linear layer with one output."""
        return linear(dimension, draw)

    def train(
        self, x: Floats, personal: Arrays, examples: Examples, settings: RoundSettings, draw: np.random.Generator
    ) -> TrainResult:
        """Train on the batches of a round."""
        w = personal["weights"].astype(np.float64)
        b = float(personal["bias"][0])
        lr = settings.factor * self.lr
        item_lr = lr * self.eta * settings.items
        total = 0.0
        count = 0
        for at, y in batches(examples, self.batch_size, settings.epochs, draw):
            features = x[at]
            gradient = (sigmoid(features @ w + b) - y) / len(y)
            w = w - lr * (features.T @ gradient + self.decay * w)
            b = b - lr * (gradient.sum() + self.decay * b)
            s = features @ w + b
            pull = np.bincount(at, (sigmoid(s) - y) / len(y), len(x))
            in_batch = np.bincount(at, minlength=len(x)) > 0
            x = x - item_lr * (np.outer(pull, w) + self.decay * x * in_batch[:, None])
            total += log_loss(s, y)
            count += len(y)
        return TrainResult(x, {"weights": w.astype(np.float32), "bias": np.array([b], np.float32)}, total / count)

    def score(self, x: Floats, personal: Arrays, taste: Taste) -> Floats:
        """w x + b of all items."""
        return np.asarray(x @ personal["weights"].astype(np.float64) + float(personal["bias"][0]))
