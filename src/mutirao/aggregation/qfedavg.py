"""q-FedAvg: clients with a high loss count for more, so that losses become more equal."""

from dataclasses import dataclass

import numpy as np

from mutirao.aggregation.base import Checked, Replies, move_by, squares_of, weigh_updates
from mutirao.config import handed_over
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged
from mutirao.errors import ConfigError

CAP = 10.0  # times the median loss of a round: a client cannot gain weight by reporting more
LOSS = "start_loss"


@dataclass(frozen=True)
class QFedAvg(Checked):
    """Fairness: minimise sum_k F_k^(q+1) / (q + 1) by x' = x - sum_k F_k^q v_k / sum_k h_k, v_k = L (x - x_k).

    h_k = q F_k^(q-1) |v_k|^2 + L F_k^q, L = 1 / client_lr, F_k the loss of the model that client k received, on its own
    data; a loss counts up to ten times the median. q = 0 gives all clients the same weight.

    Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020.

    The model has a higher loss at bia's, so her update counts for more:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> well = Reply({"w": np.array([0.1])}, metrics={"start_loss": 0.5}, n=10)
    >>> badly = Reply({"w": np.array([-0.1])}, metrics={"start_loss": 2.0}, n=10)
    >>> merged = QFedAvg(q=1.0, client_lr=0.1)({"w": np.array([0.0])}, {"ana": well, "bia": badly}, {})
    >>> {c: round(w, 2) for c, w in merged.weights.items()}
    {'ana': 0.19, 'bia': 0.74}
    """

    q: float = 1.0
    client_lr: float | None = handed_over()  # set by the run

    @property
    def needs(self) -> Needs:
        """Clients report the loss of the model before they train it."""
        return Needs(metrics={LOSS})

    def fault(self, reply: Reply) -> Failure | None:
        """A reply without its loss, or with one that cannot be raised to a power."""
        loss = reply.metrics.get(LOSS)
        if loss is None or loss < 0:
            return Failure("missing_key", "sent no loss of 0 or above from before training (metric `start_loss`)")
        return None

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the weights need not sum to one."""
        if self.client_lr is None:
            raise ConfigError("qfedavg needs the learning rate of the clients: set `client_lr`")
        lipschitz = 1 / self.client_lr
        squares = squares_of(current, replies)
        reported = {c: float(replies[c].metrics[LOSS]) for c in sorted(replies)}
        middle = float(np.median(list(reported.values())))
        # 1e-10 as in the authors' code, which divides by the loss.
        losses = {c: min(f, CAP * middle) + 1e-10 for c, f in reported.items()}
        # With v_k = L (x - x_k), h_k is q F^(q-1) L^2 |x - x_k|^2 + L F^q, and L F^q / sum_k h_k the weight of x_k - x.
        power = {c: f**self.q for c, f in losses.items()}
        total = sum(
            self.q * f ** (self.q - 1) * lipschitz**2 * squares[c] + lipschitz * power[c] for c, f in losses.items()
        )
        weights = {c: lipschitz * power[c] / total for c in losses}
        return Merged(move_by(current, replies, weigh_updates(current, replies, weights)), weights)
