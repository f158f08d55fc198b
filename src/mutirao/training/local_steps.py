"""Learning rate, number of steps and batches of a client's local training, as configured or as the server requests."""

from dataclasses import dataclass

import numpy as np

from mutirao.training.samples import Index


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
        return np.concatenate([rng.permutation(n)[: sum(epoch)] for _ in range(self._epochs(epoch))])

    def _epoch(self, n: int, at_least_two: bool) -> list[int]:
        if n == 0:
            raise ValueError("has no samples to train on")
        whole, rest = divmod(n, self.batch_size)
        if rest == 1 and at_least_two and whole:
            # Batch normalisation cannot train on a batch of one.
            rest = 0
        return [self.batch_size] * whole + ([rest] if rest else [])

    def _epochs(self, epoch: list[int]) -> int:
        if self.steps:
            return -(-self.steps // len(epoch))
        return self.epochs
