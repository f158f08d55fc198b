"""FCF: the user's vector is solved for, and the gradient of all item vectors is sent."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.systems.recsys.partially_local.base import Examples, Floats, Method, RoundSettings, TrainResult
from mutirao.systems.recsys.ratings import Taste

SPREAD = 0.1  # standard deviation of the first vectors


@dataclass(frozen=True)
class FCF(Method):
    """With p = 1 and c = 1 + alpha for items taken, p = 0 and c = 1 for all others:

        v = (sum_i c_i x_i x_i' + ridge I)^-1 sum_i c_i p_i x_i,   g_i = -2 c_i (p_i - v x_i) v + 2 decay x_i

    A user sends x - item_lr g of all items, so that neither rows nor counts reveal which it took. The server
    aggregates these as any updates: `aggregate=fedadam` is the authors' Adam on the sum of gradients. Ammad-ud-din,
    Ivannikova, Khan, Oyomno, Fu, Tan and Flanagan, "Federated Collaborative Filtering for Privacy-Preserving
    Personalized Recommendation System", 2019. Nothing is kept: the vector follows from the items and the positives.

    >>> items = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> FCF(ridge=0.1).vector(items, np.array([0])).round(2)  # of a user who took the first item
    array([0.98, 0.  ])
    """

    alpha: float = 4.0
    ridge: float = 1.0
    item_lr: float = 0.1
    decay: float = 0.0

    positive = ("ridge", "item_lr")
    non_negative = ("alpha", "decay")
    keeps_personal = False
    trains_all_items = True

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """Vectors from N(0, 0.1)."""
        return draw.normal(0, SPREAD, (items, dimension)).astype(np.float32)

    def vector(self, x: Floats, taken: npt.NDArray[np.integer]) -> Floats:
        """The user's vector, exactly."""
        mine = x[taken]
        # sum_i c_i x_i x_i': every item has the weight 1, and those taken have alpha more.
        gram = x.T @ x + self.alpha * mine.T @ mine + self.ridge * np.eye(x.shape[1])
        return np.asarray(np.linalg.solve(gram, (1 + self.alpha) * mine.sum(0)), np.float64)

    def train(
        self, x: Floats, personal: Arrays, examples: Examples, settings: RoundSettings, draw: np.random.Generator
    ) -> TrainResult:
        """`epochs` gradient steps of all items; the vector is solved for before each."""
        taken = examples.at[examples.y > 0]
        loss = 0.0
        weight = np.ones(len(x))
        weight[taken] += self.alpha
        for _ in range(settings.epochs):
            v = self.vector(x, taken)
            error = -(x @ v)
            error[taken] += 1
            loss = float(weight @ error**2 / weight.sum())
            slope = -2 * np.outer(weight * error, v) + 2 * self.decay * x
            x = x - settings.factor * self.item_lr * slope
        return TrainResult(x, {}, loss)

    def score(self, x: Floats, personal: Arrays, taste: Taste) -> Floats:
        """v x of all items."""
        return np.asarray(x @ self.vector(x, taste.items))
