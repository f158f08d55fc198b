"""FedNova: clients that take more steps do not pull the model to their own optimum."""

from dataclasses import dataclass

from mutirao.aggregation.base import Checked, Replies, move_by, sample_shares, weigh_updates
from mutirao.aggregation.effective_steps import effective_steps_fault, reported_effective_steps
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply
from mutirao.core.parts import Merged


@dataclass(frozen=True)
class FedNova(Checked):
    """Updates are divided by how far each client's steps reach: x' = x + lr tau sum_k p_k (x_k - x) / r_k.

    p_k = n_k / n, r_k is the client's reach (`mutirao.aggregation.effective_steps`: lr times |a_k|_1) and tau = sum_k
    p_k r_k. Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
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
    def needs(self) -> frozenset[str]:
        """Clients tell how far their steps reach."""
        return frozenset({"metrics:reach"})

    def fault(self, reply: Reply) -> Failure | None:
        """A reply without its reach."""
        return effective_steps_fault(reply)

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the weights need not sum to one."""
        shares, reaches = sample_shares(replies), reported_effective_steps(replies)
        tau = sum(shares[c] * reaches[c] for c in shares)
        weights = {c: self.lr * tau * shares[c] / reaches[c] for c in shares}
        return Merged(move_by(current, replies, weigh_updates(current, replies, weights)), weights)
