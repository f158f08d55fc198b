"""FedNova: updates are normalized by local steps, so that clients with more steps do not dominate."""

from dataclasses import dataclass

from mutirao.aggregation.base import (
    Checked,
    Replies,
    effective_steps_fault,
    move_by,
    reported_effective_steps,
    sample_shares,
    weigh_updates,
)
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedNova(Checked):
    """Updates are divided by each client's effective steps r_k: x' = x + lr tau sum_k p_k (x_k - x) / r_k.

    p_k = n_k / n, r_k are lr times |a_k|_1 (`mutirao.aggregation.base`) and tau = sum_k p_k r_k.

    Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020.

    Bia made ten times as many steps as ana, the other way; FedAvg would follow her to -4.5:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> short = Reply({"w": np.array([1.0])}, metrics={"reach": 1.0}, n=10)
    >>> long = Reply({"w": np.array([-10.0])}, metrics={"reach": 10.0}, n=10)
    >>> FedNova()({"w": np.array([0.0])}, {"ana": short, "bia": long}, {}).arrays["w"]  # one step each: 1 and -1
    array([0.])
    """

    lr: float = 1.0

    @property
    def needs(self) -> Needs:
        """Clients report their effective steps."""
        return Needs(metrics={"reach"})

    def fault(self, reply: Reply) -> Failure | None:
        """A reply without effective steps."""
        return effective_steps_fault(reply)

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the weights need not sum to one."""
        shares = sample_shares(replies)
        steps = reported_effective_steps(replies)
        # tau brings the mean of the normalized updates back to the length of an ordinary round.
        tau = sum(shares[c] * steps[c] for c in shares)
        weights = {c: self.lr * tau * shares[c] / steps[c] for c in shares}
        return Merged(move_by(current, replies, weigh_updates(current, replies, weights)), weights)
