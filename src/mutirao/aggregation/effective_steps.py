"""How far a client's steps reach: the sum of what each gradient counts for in the model at the end.

With SGD's rate lr, momentum m and proximal weight mu, K steps along a gradient of 1 move a weight by

    reach = lr sum_j a_j,    sum_j a_j = K                                        (m = mu = 0)
                             sum_j a_j = (K - m (1 - m^K) / (1 - m)) / (1 - m)    (mu = 0)
                             sum_j a_j = (1 - (1 - lr mu)^K) / (lr mu)            (m = 0)

which is lr |a|_1 of Wang, Liu, Liang, Joshi and Poor, 2020 (FedNova). (x - x_k) / reach is then the mean gradient that
a client has seen, whatever its optimiser does with it.
"""

import functools
from collections.abc import Mapping

import numpy as np

from mutirao.core.fleet import ClientId, Failure, Reply

EFFECTIVE_STEPS = "reach"
CAP = 100.0  # times the median that a client may claim, or one part in so many of it


@functools.lru_cache(maxsize=1024)
def effective_steps(lr: float, momentum: float, mu: float, steps: int) -> float:
    """How far so many steps along a gradient of 1 move a weight that begins at its anchor.

    >>> effective_steps(0.1, 0.0, 0.0, 5), round(effective_steps(1.0, 0.9, 0.0, 3), 3)
    (0.5, 5.61)
    """
    if not momentum and not mu:
        return lr * steps
    away = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1.0 - mu * away
        away += lr * speed
    return away


def effective_steps_fault(reply: Reply) -> Failure | None:
    """What is wrong with what a client says of its reach."""
    if not reply.metrics.get(EFFECTIVE_STEPS, 0.0) > 0.0:
        return Failure("missing_key", "did not say how far its steps reach, or that they do not at all")
    return None


def reported_effective_steps(replies: Mapping[ClientId, Reply]) -> dict[ClientId, float]:
    """The reach of each client, held to a hundred times the median and a hundredth of it: nobody outweighs all."""
    told = {c: float(replies[c].metrics[EFFECTIVE_STEPS]) for c in sorted(replies)}
    middle = float(np.median(list(told.values())))
    return {c: min(max(r, middle / CAP), middle * CAP) for c, r in told.items()}
