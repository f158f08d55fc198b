"""FedDyn: dynamic regularization moves the optimum of each client's loss towards that of the global loss.

Client k keeps h_k, at first 0, and from the server's model x takes steps y <- y - lr (g(y) - h_k + alpha (y - x)); then
h_k' = h_k - alpha (y - x), which at an optimum of the regularized loss is the gradient there. The server keeps h: with
N clients of which those in S answered,

    h' = h - alpha / N sum_S (y_k - x),    x' = 1 / |S| sum_S y_k - h' / alpha

Acar, Zhao, Navarro, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021.
"""

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import (
    Checked,
    Replies,
    equal_shares,
    is_moved,
    merge_models,
    population_of,
    weigh_updates,
)
from mutirao.config import handed_over
from mutirao.core.arrays import Arrays, cast_to
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged

MEMORY = "feddyn.h."


@dataclass(frozen=True)
class FedDyn(Checked):
    """Clients add -<h_k, y> + (alpha / 2) |y - x|^2 to their loss; the server corrects their mean drift.

    Acar, Zhao, Navarro, Mattina, Whatmough and Saligrama, 2021.

    Two of four clients answer; to their mean, 1, the server adds half of it for those that did not:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> replies = {"ana": Reply({"w": np.array([0.0])}, n=10), "bia": Reply({"w": np.array([2.0])}, n=10)}
    >>> FedDyn(alpha=0.1, population=4)({"w": np.array([0.0])}, replies, {}).arrays["w"]
    array([1.5])
    """

    alpha: float = 0.1
    population: int | None = handed_over()  # N, the number of all clients; set by the run

    @property
    def needs(self) -> Needs:
        """Clients must support the correction, which keeps h_k, and the weight alpha."""
        return Needs(config={"correct": "feddyn", "mu": self.alpha})

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; h goes into the memory."""
        shares = equal_shares(replies)
        merged = merge_models(current, replies, shares)
        part = len(replies) / max(len(replies), population_of(self, self.population))
        arrays = dict(merged.arrays)
        for name, update in weigh_updates(current, replies, shares).items():
            key = MEMORY + name
            x = current[name]
            # h' = h - alpha / N sum_S (y_k - x): `update` is the mean over S, and `part` is |S| / N.
            memory[key] = np.asarray(memory.get(key, np.zeros_like(update)) - self.alpha * part * update)
            # x' = 1 / |S| sum_S y_k - h' / alpha.
            arrays[name] = cast_to(x + update - memory[key] / self.alpha, x.dtype)
        return Merged(arrays, merged.weights)


def correction(model: Arrays, kept: Arrays) -> Arrays:
    """The correction of a client's steps, -h_k; empty while it is 0."""
    return {k: -kept[k] for k, x in model.items() if k in kept and kept[k].shape == x.shape}


def update_gradient(start: Arrays, end: Arrays, kept: Arrays, alpha: float) -> Arrays:
    """h_k' = h_k - alpha (y - x)."""
    updated = {}
    for name, x in start.items():
        if is_moved(name, x):
            old = kept[name] if name in kept and kept[name].shape == x.shape else np.zeros_like(x)
            updated[name] = (old - alpha * (end[name] - x)).astype(x.dtype)
    return updated
