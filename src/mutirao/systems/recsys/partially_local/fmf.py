"""FMF: matrix factorisation whose user vectors stay at home from round to round, moved by SGD as the items are."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.systems.recsys.partially_local.base import Floats, Method, Steps, Trained, Work, batches, log_loss, sigmoid
from mutirao.systems.recsys.ratings import Taste

SPREAD = 0.1  # standard deviation of the first vectors


@dataclass(frozen=True)
class FMF(Method):
    """With e = y - p for `squared`, e = y - sigmoid(p) for `logistic`, and p = v x; a batch of b samples moves

        v <- v + lr (sum e x / b - decay v),   x_i <- x_i + item_lr (sum of i's samples e v - decay x_i)

    both from what they were. `squared` is for ratings, less the middle of the scale, and wants smaller rates, such as
    0.2 and 0.05; `logistic` is for implicit feedback with items drawn. With `biases`, p = v_0 + x_0 + sum_{j>0} v_j
    x_j. Chai, Wang, Chen and Yang, "Secure Federated Matrix Factorization", 2019 (FedMF), without its encryption.

    >>> own = FMF().begin(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in own.items()}  # what a user keeps
    {'vector': (8,)}
    """

    lr: float = 10.0
    item_lr: float = 1.0
    decay: float = 0.0
    batch_size: int = 256
    loss: Literal["logistic", "squared"] = "logistic"
    biases: bool = True  # type: ignore[misc]  # a setting here, a constant of others

    above_0 = ("lr", "item_lr", "batch_size")
    from_0 = ("decay",)

    @property
    def implicit(self) -> bool:  # type: ignore[override]
        """Whether what counts is that an item was taken."""
        return self.loss == "logistic"

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 0.1), biases 0."""
        x = draw.normal(0, SPREAD, (items, dimension)).astype(np.float32)
        x[:, : int(self.biases)] = 0
        return x

    def begin(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A vector from N(0, 0.1), its bias 0."""
        return {"vector": self.initial(1, dimension, draw)[0]}

    def train(self, x: Floats, own: Arrays, work: Work, steps: Steps, draw: np.random.Generator) -> Trained:
        """A round's batches."""
        first, v, total, count = int(self.biases), own["vector"].astype(np.float64), 0.0, 0
        lr, item_lr = steps.factor * self.lr, steps.factor * self.item_lr
        for at, y in batches(work, self.batch_size, steps.epochs, draw):
            features, step = x[at], v.copy()
            p = features[:, :first].sum(1)
            features[:, :first], step[:first] = 1, 1  # dp/dv, and dp/dx
            p = p + features @ v
            wrong = y - (sigmoid(p) if self.implicit else p)
            pull = np.bincount(at, wrong, len(x))
            moving = np.bincount(at, minlength=len(x)) > 0
            v = v + lr * (features.T @ wrong / len(y) - self.decay * v)
            x = x + item_lr * (np.outer(pull, step) - self.decay * x * moving[:, None])
            total, count = total + (log_loss(p, y) if self.implicit else float(wrong @ wrong)), count + len(y)
        return Trained(x, {"vector": v.astype(np.float32)}, total / count)

    def score(self, x: Floats, own: Arrays, taste: Taste) -> Floats:
        """p of all items."""
        first, v = int(self.biases), own["vector"].astype(np.float64)
        return np.asarray(x[:, first:] @ v[first:] + x[:, :first].sum(1) + v[:first].sum())
