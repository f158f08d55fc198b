"""q-FedAvg: clients with a high loss count for more, so that losses become more alike."""

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Replies, move_by, squares_of, weigh_updates
from mutirao.config import handed_over
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply
from mutirao.core.parts import Merged
from mutirao.errors import ConfigError

CAP = 10.0  # times the median loss of a round that a client may claim: more would buy it more weight
LOSS = "start_loss"


@dataclass(frozen=True)
class QFedAvg(Checked):
    """Fairness: minimise sum_k F_k^(q+1) / (q + 1) by x' = x - sum_k F_k^q v_k / sum_k h_k, v_k = L (x - x_k).

    h_k = q F_k^(q-1) |v_k|^2 + L F_k^q, L = 1 / client_lr, F_k the loss of the model that client k received, on its own
    data; a loss counts up to ten times the median. q = 0 weighs all clients alike. Li, Sanjabi, Beirami and Smith,
    "Fair Resource Allocation in Federated Learning", ICLR 2020.

    The model does worse at bia's, so her update counts for more:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> well = Reply({"w": np.array([0.1])}, metrics={"start_loss": 0.5}, n=10)
    >>> badly = Reply({"w": np.array([-0.1])}, metrics={"start_loss": 2.0}, n=10)
    >>> merged = QFedAvg(q=1.0, client_lr=0.1)({"w": np.array([0.0])}, {"ana": well, "bia": badly}, {})
    >>> {c: round(w, 2) for c, w in merged.weights.items()}
    {'ana': 0.19, 'bia': 0.74}
    """

    q: float = 1.0
    client_lr: float | None = handed_over()  # who builds a run knows it

    @property
    def needs(self) -> frozenset[str]:
        """Clients tell how the model did before they trained it."""
        return frozenset({f"metrics:{LOSS}"})

    def fault(self, reply: Reply) -> Failure | None:
        """A reply without its loss, or with one that cannot be raised to a power."""
        loss = reply.metrics.get(LOSS)
        if loss is None or loss < 0:
            return Failure("missing_key", "did not tell its loss, which must be 0 or above, before training")
        return None

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the weights need not sum to one."""
        if self.client_lr is None:
            raise ConfigError("qfedavg has to know the clients' learning rate: set `client_lr`")
        steep, squares = 1 / self.client_lr, squares_of(current, replies)
        told = {c: float(replies[c].metrics[LOSS]) for c in sorted(replies)}
        middle = float(np.median(list(told.values())))
        losses = {c: min(f, CAP * middle) + 1e-10 for c, f in told.items()}  # as the authors' code, which divides by it
        power = {c: f**self.q for c, f in losses.items()}
        whole = sum(self.q * f ** (self.q - 1) * steep**2 * squares[c] + steep * power[c] for c, f in losses.items())
        weights = {c: steep * power[c] / whole for c in losses}
        return Merged(move_by(current, replies, weigh_updates(current, replies, weights)), weights)
