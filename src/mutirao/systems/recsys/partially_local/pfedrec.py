"""PFedRec: a score function of one's own over item vectors that all share, and that each tunes before using them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
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
class PFedRec(Method):
    """p = sigmoid(w x + b), with w and b the user's; a batch of mean loss L = -mean(y ln p + (1 - y) ln(1 - p)) moves

        (w, b) <- (w, b) - lr dL/d(w, b),   then, with those,   x <- x - lr eta items dL/dx

    Before it ranks items, a user does the same to the rows as received, and ranks by what it made of them, which nobody
    else sees (dual personalisation); `tune`=false ranks by the rows as received. Zhang, Long, Zhou, Yan, Zhang, Zhang
    and Yang, "Dual Personalization on Federated Recommendation", IJCAI 2023; the authors join by `aggregate.over=all`.

    >>> own = PFedRec().begin(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in own.items()}  # what a user keeps: its own way to judge items
    {'weights': (8,), 'bias': (1,)}
    """

    lr: float = 0.1
    eta: float = 80.0
    decay: float = 0.0
    batch_size: int = 256
    tune: bool = True

    above_0 = ("lr", "eta", "batch_size")
    from_0 = ("decay",)

    @property
    def tunes(self) -> bool:  # type: ignore[override]
        """Whether a user fits item rows, too, before it uses them."""
        return self.tune

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 1), as torch begins an embedding."""
        return draw.normal(0, 1, (items, dimension)).astype(np.float32)

    def begin(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A linear layer with one output."""
        return linear(dimension, draw)

    def train(self, x: Floats, own: Arrays, work: Work, steps: Steps, draw: np.random.Generator) -> Trained:
        """A round's batches."""
        w, b, total, count = own["weights"].astype(np.float64), float(own["bias"][0]), 0.0, 0
        lr = steps.factor * self.lr
        item_lr = lr * self.eta * steps.items
        for at, y in batches(work, self.batch_size, steps.epochs, draw):
            features = x[at]
            slope = (sigmoid(features @ w + b) - y) / len(y)
            w, b = w - lr * (features.T @ slope + self.decay * w), b - lr * (slope.sum() + self.decay * b)
            s = features @ w + b
            pull = np.bincount(at, (sigmoid(s) - y) / len(y), len(x))
            moving = np.bincount(at, minlength=len(x)) > 0
            x = x - item_lr * (np.outer(pull, w) + self.decay * x * moving[:, None])
            total, count = total + log_loss(s, y), count + len(y)
        return Trained(x, {"weights": w.astype(np.float32), "bias": np.array([b], np.float32)}, total / count)

    def score(self, x: Floats, own: Arrays, taste: Taste) -> Floats:
        """w x + b of all items."""
        return np.asarray(x @ own["weights"].astype(np.float64) + float(own["bias"][0]))
