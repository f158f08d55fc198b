"""FedExP: the less the clients' updates agree, the larger the server's step."""

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Replies, move_by, sample_shares, squares_of, weigh_updates
from mutirao.core.arrays import Arrays
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedExP(Checked):
    """Extrapolation: x' = x + s d, s = max(1, sum_k p_k |x_k - x|^2 / (2 (|d|^2 + epsilon))), d = sum_k p_k (x_k - x).

    Jhunjhunwala, Wang and Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023, where all p_k
    are equal and the mean of the last two models is evaluated; here p_k = n_k / n, and each model is evaluated itself.

    Four clients each move another weight by 4, so that their mean is short; the server goes twice as far:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> replies = {c: Reply({"w": row}, n=10) for c, row in zip("abcd", 4 * np.eye(4), strict=True)}
    >>> merged = FedExP()({"w": np.zeros(4)}, replies, {})
    >>> merged.arrays["w"].round(2), round(merged.figures["a"]["server_step"], 2)  # FedAvg: 1 everywhere
    (array([2., 2., 2., 2.]), 2.0)
    """

    epsilon: float = 1e-3

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; each client's figure is the step s."""
        shares = sample_shares(replies)
        squares = squares_of(current, replies)
        mean = weigh_updates(current, replies, shares)
        length = sum(float(np.vdot(d, d)) for d in mean.values())
        # At least 1, so that no round goes a shorter way than FedAvg; epsilon bounds the step where updates cancel.
        step = max(1.0, sum(shares[c] * squares[c] for c in shares) / (2 * (length + self.epsilon)))
        arrays = move_by(current, replies, {k: step * d for k, d in mean.items()})
        return Merged(arrays, {c: step * p for c, p in shares.items()}, {c: {"server_step": step} for c in shares})
