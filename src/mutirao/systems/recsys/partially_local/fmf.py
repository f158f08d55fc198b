"""FMF: matrix factorisation with user vectors that stay at the client, trained by SGD as the items are."""

from dataclasses import dataclass
from typing import Literal

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
    log_loss,
    sigmoid,
)
from mutirao.systems.recsys.ratings import Taste

SPREAD = 0.1  # standard deviation of the initial vectors


@dataclass(frozen=True)
class FMF(Method):
    """With e = y - p for `squared`, e = y - sigmoid(p) for `logistic`, and p = v x; a batch of b samples moves

        v <- v + lr (sum e x / b - decay v),   x_i <- x_i + item_lr (sum of i's samples e v - decay x_i)

    both from their values before the batch. `squared` is for ratings relative to the middle of the scale, and needs
    smaller rates, such as 0.2 and 0.05; `logistic` is for implicit feedback with sampled negatives. With `biases`,
    p = v_0 + x_0 + sum_{j>0} v_j x_j. Chai, Wang, Chen and Yang, "Secure Federated Matrix Factorization", 2019 (FedMF),
    without its encryption.

    >>> personal = FMF().initial_personal(items=100, dimension=8, draw=np.random.default_rng(0))
    >>> {name: array.shape for name, array in personal.items()}  # what a user keeps
    {'vector': (8,)}
    """

    lr: float = 10.0
    item_lr: float = 1.0
    decay: float = 0.0
    batch_size: int = 256
    loss: Literal["logistic", "squared"] = "logistic"
    biases: bool = True  # type: ignore[misc]  # a setting here, a constant in other methods

    positive = ("lr", "item_lr", "batch_size")
    non_negative = ("decay",)

    @property
    def implicit(self) -> bool:  # type: ignore[override]
        """Whether the data is implicit feedback."""
        return self.loss == "logistic"

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 0.1), biases 0."""
        x = draw.normal(0, SPREAD, (items, dimension)).astype(np.float32)
        x[:, : int(self.biases)] = 0
        return x

    def initial_personal(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A vector from N(0, 0.1), its bias 0."""
        return {"vector": self.initial(1, dimension, draw)[0]}

    def train(
        self, x: Floats, personal: Arrays, examples: Examples, settings: RoundSettings, draw: np.random.Generator
    ) -> TrainResult:
        """Train on the batches of a round."""
        first = int(self.biases)
        v = personal["vector"].astype(np.float64)
        lr = settings.factor * self.lr
        item_lr = settings.factor * self.item_lr
        total = 0.0
        count = 0
        for at, y in batches(examples, self.batch_size, settings.epochs, draw):
            features = x[at]  # dp/dv
            slope = v.copy()  # dp/dx
            item_bias = features[:, :first].sum(1)
            features[:, :first] = 1
            slope[:first] = 1
            p = item_bias + features @ v
            if self.implicit:
                error = y - sigmoid(p)
                total += log_loss(p, y)
            else:
                error = y - p
                total += float(error @ error)
            pull = np.bincount(at, error, len(x))
            in_batch = np.bincount(at, minlength=len(x)) > 0
            # Users and items move at once: `slope` is a copy of the vector from before the batch.
            v = v + lr * (features.T @ error / len(y) - self.decay * v)
            x = x + item_lr * (np.outer(pull, slope) - self.decay * x * in_batch[:, None])
            count += len(y)
        return TrainResult(x, {"vector": v.astype(np.float32)}, total / count)

    def score(self, x: Floats, personal: Arrays, taste: Taste) -> Floats:
        """p of all items."""
        first = int(self.biases)
        v = personal["vector"].astype(np.float64)
        return np.asarray(x[:, first:] @ v[first:] + x[:, :first].sum(1) + v[:first].sum())
