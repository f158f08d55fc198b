"""FedRisk: clients weighted by the risk of their errors, and a memory of the previous global model."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mutirao.aggregation.base import Replies
from mutirao.config import handed_over
from mutirao.core.arrays import Array, Arrays, average_arrays, blend, cast_to
from mutirao.core.fleet import Failure, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged
from mutirao.errors import MutiraoError
from mutirao.risk import batch_risks

NOTHING = np.zeros(0, np.uint8), np.zeros(0, np.int32)  # errors and batch sizes of a client that sent none


@dataclass(frozen=True)
class FedRisk:
    """Weighs client k by 1 - risk_k, with risk_k the median over its batches of GeoRisk(Z) - GeoRisk(k).

    `sign` is `published` (that formula, which raises the weight of clients with large errors) or `described`
    (GeoRisk(k) - GeoRisk(Z), which lowers it). `form` says what is weighted, S being the clients of the round:
    `updates`:    x' = beta x + alpha / |S| sum_k (1 - risk_k) (x_k - x)
    `parameters`: x' = beta x + alpha / |S| sum_k (1 - risk_k) x_k, the literal reading, which grows without bound
    `normalised`: x' = (beta x + alpha sum_k w_k x_k) / (alpha + beta), with w_k = (1 - risk_k) / sum_j (1 - risk_j)
    `memory`, for updates only: `previous` as above, or `momentum`, where the mean weighted update d is gathered in
    v' = momentum v + d (at first v' = d) and x' = beta x + alpha v'.

    With `clamp` no weight is negative: max(0, 1 - risk_k) replaces 1 - risk_k, which the paper lets become negative.
    With `classes` classes no squared error is above (classes - 1)^2, and a reply with a larger one is refused. Still a
    client may report the largest possible errors: this is no defence against malicious clients.

    Two clients send the squared errors of two samples each. As published, the one with larger errors counts for more;
    as described, for less:

    >>> from mutirao import Reply
    >>> def reply(w: float, *errors: int) -> Reply:
    ...     extras = {"squared_errors": np.array(errors, np.uint8), "batch_sizes": np.array([len(errors)], np.int32)}
    ...     return Reply({"w": np.array([w])}, extras, n=10)
    >>> replies = {"good": reply(1.0, 0, 1), "bad": reply(-1.0, 4, 9)}
    >>> for sign in ("published", "described"):
    ...     figures = FedRisk(sign=sign)({"w": np.array([0.0])}, replies, {}).weights
    ...     print(sign, {c: round(w, 2) for c, w in figures.items()})
    published {'bad': 0.8, 'good': 0.11}
    described {'bad': 0.2, 'good': 0.89}
    """

    alpha: float = 1.0
    beta: float = 1.0
    aversion: float = 2.0
    sign: Literal["published", "described"] = "published"
    form: Literal["updates", "parameters", "normalised"] = "updates"
    memory: Literal["previous", "momentum"] = "previous"
    momentum: float = 0.9
    classes: int | None = handed_over()  # None: any byte is an error
    clamp: bool = True

    needs = Needs(extras={"squared_errors"})

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta, self.aversion) < 0 or self.alpha + self.beta == 0:
            raise ValueError("alpha, beta and aversion must not be negative, nor alpha and beta both 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, but must be at least 0 and below 1")
        if self.memory == "momentum" and self.form != "updates":
            raise ValueError("memory=momentum goes with form=updates only")

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the weights are the shares of the clients."""
        clients = sorted(replies)
        risks = dict(zip(clients, self.risks([replies[c] for c in clients]), strict=True))
        trust = {c: 1.0 - r for c, r in risks.items()}
        if self.clamp:
            trust = {c: max(0.0, t) for c, t in trust.items()}
        total = sum(trust.values())
        if self.form == "normalised" and total <= 0:
            if not self.clamp:
                raise MutiraoError("fedrisk: the weights of this round's clients sum to 0 or less; lower the aversion")
            # With every weight clamped to 0 all clients are equally risky.
            trust = dict.fromkeys(clients, 1.0)
            total = float(len(clients))
        divisor = total if self.form == "normalised" else len(clients)
        share = {c: t / divisor for c, t in trust.items()}
        even = [1 / len(clients)] * len(clients)

        def merged(name: str, x: Array) -> Array:
            models = [replies[c].arrays[name] for c in clients]
            if x.dtype.kind != "f":
                return average_arrays(models, even)
            pull = blend(models, list(share.values()))
            if self.form == "parameters":
                return cast_to(self.alpha * pull + self.beta * x, x.dtype)
            if self.form == "normalised":
                return cast_to((self.alpha * pull + self.beta * x) / (self.alpha + self.beta), x.dtype)
            update = pull - sum(share.values()) * x.astype(np.float64)
            if self.memory == "momentum":
                key = f"fedrisk.v.{name}"
                if key in memory:
                    update = np.asarray(self.momentum * memory[key] + update)
                memory[key] = update
            return cast_to(self.beta * x + self.alpha * update, x.dtype)

        # form=parameters, the literal reading, grows until it overflows, which the round reports as a divergence.
        with np.errstate(over="ignore", invalid="ignore"):
            arrays = {name: merged(name, x) for name, x in current.items()}
        return Merged(arrays, share, {c: {"risk": float(r)} for c, r in risks.items()})

    @property
    def largest(self) -> int:
        """The largest possible squared error: between the first class and the last."""
        if self.classes is None:
            return 255
        return min(255, (self.classes - 1) ** 2)

    def fault(self, reply: Reply) -> Failure | None:
        """A reply with an error that no sample can have."""
        errors = reply.extras.get("squared_errors")
        if errors is None or not errors.size or float(errors.max()) <= self.largest:
            return None
        why = f"between {self.classes} classes at most {self.largest} is possible"
        return Failure("too_large", f"sent a squared error of {float(errors.max()):g}; {why}")

    def risks(self, replies: list[Reply]) -> list[float]:
        """The risk of each client, from the errors it sent; invalid errors count as none."""
        errors = [usable(r) if self.fault(r) is None else NOTHING for r in replies]
        found = batch_risks([e for e, _ in errors], [s for _, s in errors], self.aversion)
        if self.sign != "published":
            found = -found
        return [float(r) for r in found]


def usable(reply: Reply) -> tuple[Array, Array]:
    """The errors and batch sizes of a reply, or none if they do not fit together, as a client may send anything."""
    errors = reply.extras.get("squared_errors")
    sizes = reply.extras.get("batch_sizes")
    if errors is None or sizes is None or errors.dtype != np.uint8 or sizes.dtype != np.int32:
        return NOTHING
    if errors.ndim != 1 or sizes.ndim != 1 or (sizes < 1).any() or int(sizes.sum(dtype=np.int64)) != len(errors):
        return NOTHING
    return errors, sizes
