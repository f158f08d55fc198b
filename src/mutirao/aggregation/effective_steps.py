"""Effective local steps: how far a client moves along a constant gradient, whatever its optimizer.

With learning rate lr, momentum m and proximal weight mu, K steps along a gradient of 1 move a weight by r (the metric
`reach`):

    r = lr sum_j a_j,
    sum_j a_j = K                                        (m = mu = 0)
    sum_j a_j = (K - m (1 - m^K) / (1 - m)) / (1 - m)    (mu = 0)
    sum_j a_j = (1 - (1 - lr mu)^K) / (lr mu)            (m = 0)

which is lr |a|_1 of Wang, Liu, Liang, Joshi and Poor, 2020 (FedNova). (x - x_k) / r is then the mean gradient that a
client has seen.
"""

import functools
from collections.abc import Mapping

import numpy as np

from mutirao.core.fleet import ClientId, Failure, Reply

EFFECTIVE_STEPS = "reach"
CAP = 100.0  # a client may report at most so many times the median, and at least 1 / CAP of it


@functools.lru_cache(maxsize=1024)
def effective_steps(lr: float, momentum: float, mu: float, steps: int) -> float:
    """How far `steps` steps along a gradient of 1 move a weight that starts at its anchor.

    >>> effective_steps(0.1, 0.0, 0.0, 5), round(effective_steps(1.0, 0.9, 0.0, 3), 3)
    (0.5, 5.61)
    """
    if not momentum and not mu:
        return lr * steps
    distance = 0.0
    velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - mu * distance
        distance += lr * velocity
    return distance


def effective_steps_fault(reply: Reply) -> Failure | None:
    """Why a reply cannot be used: its effective steps are missing or not above 0."""
    if not reply.metrics.get(EFFECTIVE_STEPS, 0.0) > 0.0:
        return Failure("missing_key", "sent no effective steps (metric `reach`) above 0")
    return None


def reported_effective_steps(replies: Mapping[ClientId, Reply]) -> dict[ClientId, float]:
    """The effective steps of each client, between 1 / CAP and CAP times the median, so that none outweighs all."""
    reported = {c: float(replies[c].metrics[EFFECTIVE_STEPS]) for c in sorted(replies)}
    middle = float(np.median(list(reported.values())))
    return {c: min(max(r, middle / CAP), middle * CAP) for c, r in reported.items()}
