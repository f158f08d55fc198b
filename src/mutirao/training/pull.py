"""What is added to the gradient of a local step: w <- w - lr (g + b + mu (w - a)).

The correction b and the anchor a are arrays of the request, `correction.NAME` and `anchor.NAME`; methods with client
state add them (`mutirao.training.corrections`). Without an anchor, a is the received model, as in FedProx. Arrays that
are not named are not corrected.

`LocalHyperparameters` are the learning rate, steps and batches of local training: as configured, or as the server
requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mutirao.core.arrays import Array, Arrays, is_finite
from mutirao.core.fleet import Request
from mutirao.training.samples import Index

CORRECTION = "correction."
ANCHOR = "anchor."


@dataclass(frozen=True, eq=False)
class Pull:
    """Correction and anchor by the names of the model's arrays; empty if there are none."""

    correction: Arrays
    anchor: Arrays

    @classmethod
    def of(cls, request: Request) -> "Pull":
        """The pull of a request; ValueError if it does not match the request's model."""
        if not request.extras:
            return NOTHING
        correction, anchor = (extras_under(request, prefix) for prefix in (CORRECTION, ANCHOR))
        if correction or anchor:
            return cls(correction, anchor)
        return NOTHING

    def anchors(self, names: Iterable[str], model: Arrays) -> list[Array]:
        """The anchor of each of these arrays, the model's own array where there is none."""
        return [self.anchor.get(name, model[name]) for name in names]

    def corrections(self, names: Iterable[str], model: Arrays) -> list[Array]:
        """The correction of each of these arrays, 0 where there is none."""
        return [self.correction.get(name, np.zeros_like(model[name])) for name in names]


def extras_under(request: Request, prefix: str) -> Arrays:
    """The extras of a request with this prefix, by the names of their arrays."""
    found = {k.removeprefix(prefix): v for k, v in request.extras.items() if k.startswith(prefix)}
    for name, value in found.items():
        mine = request.arrays.get(name)
        if mine is None or mine.shape != value.shape or mine.dtype != value.dtype:
            raise ValueError(f"{prefix}{name[:80]} is not of the shape and type of an array of the model")
    if found and not is_finite(found):
        raise ValueError(f"an array among {prefix}... holds NaN or infinity")
    return found


NOTHING = Pull({}, {})


@dataclass(frozen=True)
class LocalHyperparameters:
    """The learning rate, number and size of local steps in a round, and FedProx's mu."""

    lr: float
    epochs: int
    steps: int  # 0: whole epochs
    batch_size: int
    mu: float

    def plan(self, rng: np.random.Generator, n: int, at_least_two: bool = False) -> list[Index]:
        """The sample indices of each step: shuffled epochs cut into batches, the same for every engine."""
        order = self.order(rng, n, at_least_two)
        ends = np.cumsum(self.lengths(n, at_least_two)).tolist()
        return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def lengths(self, n: int, at_least_two: bool = False) -> list[int]:
        """The number of samples of each step: whole batches and a remainder, epoch by epoch."""
        epoch = self._epoch(n, at_least_two)
        return (epoch * self._epochs(epoch))[: self.steps or None]

    def order(self, rng: np.random.Generator, n: int, at_least_two: bool = False) -> Index:
        """The sample indices of all steps, concatenated."""
        epoch = self._epoch(n, at_least_two)
        # Whole permutations, even if `steps` ends within an epoch: all engines then consume the same random numbers.
        return np.concatenate([rng.permutation(n)[: sum(epoch)] for _ in range(self._epochs(epoch))])

    def _epoch(self, n: int, at_least_two: bool) -> list[int]:
        if n == 0:
            raise ValueError("has no samples to train on")
        whole, rest = divmod(n, self.batch_size)
        if rest == 1 and at_least_two and whole:
            # Batch normalisation cannot train on a batch of one.
            rest = 0
        lengths = [self.batch_size] * whole
        if rest:
            lengths.append(rest)
        return lengths

    def _epochs(self, epoch: list[int]) -> int:
        if self.steps:
            return -(-self.steps // len(epoch))
        return self.epochs
