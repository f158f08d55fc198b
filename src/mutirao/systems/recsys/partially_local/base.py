"""What a user works on in a round, and what a method has to say of itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.selection import check_setting
from mutirao.systems.recsys.ratings import Taste

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Work(NamedTuple):
    """The items worked on, in rising order; of each sample which of these it is about, and what is to be predicted."""

    rows: npt.NDArray[np.int32]
    at: Ints
    y: Floats


class Steps(NamedTuple):
    """How a user's training goes on in a round: over so many items in all, at rates times a schedule's `factor`."""

    items: int
    epochs: int = 1
    factor: float = 1.0
    round: int = 1


class Trained(NamedTuple):
    """The rows and the user's own part after it, and the mean loss on the way."""

    x: Floats
    own: Arrays
    loss: float


@dataclass(frozen=True)
class Method:
    """What all methods have in common. A user's `own` part is a dict of arrays; x are rows of the item matrix.

    With `spare` no item is drawn as a negative that is a target of the user's evaluation. Nobody who does not know the
    future can do so; but the authors' own code of PFedRec and of FedRAP does, and figures with it are not comparable.
    """

    spare: bool = False

    above_0: ClassVar[tuple[str, ...]] = ()  # the settings that must be
    from_0: ClassVar[tuple[str, ...]] = ()
    implicit = True  # whether what counts is that an item was taken
    keeps = True  # whether a user has a part of its own from round to round
    tunes = False  # whether a user fits item rows, too, before it uses them
    whole = False  # whether a user works on all items
    biases: ClassVar[bool] = False  # whether column 0 of the items holds their biases

    def __post_init__(self) -> None:
        for name in self.above_0:
            check_setting(name, getattr(self, name) > 0, getattr(self, name), "above 0")
        for name in self.from_0:
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "0 (none) or above")

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """The first item matrix."""
        raise NotImplementedError

    def begin(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """A user's own part at first, the same for all."""
        return {}

    def train(self, x: Floats, own: Arrays, work: Work, steps: Steps, draw: np.random.Generator) -> Trained:
        """What a round makes of the rows and of the user's own part."""
        raise NotImplementedError

    def score(self, x: Floats, own: Arrays, taste: Taste) -> Floats:
        """The user's scores of all items, of which x are all rows."""
        raise NotImplementedError


def with_others(
    taken: npt.NDArray[np.int32], items: int, negatives: int, draw: np.random.Generator, avoid: npt.ArrayLike = ()
) -> Work:
    """Each item taken as a sample with y = 1, and `negatives` others with y = 0, drawn evenly, some perhaps twice."""
    known = np.union1d(taken, np.asarray(avoid, np.int64)).astype(np.int64)
    free = items - len(known)
    if free < 1:
        raise ValueError(f"has taken all {items} items; there is nothing left to tell them from")
    places = draw.integers(0, free, negatives * len(taken))
    others = places + np.searchsorted(known - np.arange(len(known)), places, side="right")
    rows, at = np.unique(np.concatenate([taken.astype(np.int64), others]), return_inverse=True)
    y = np.repeat([1.0, 0.0], [len(taken), len(others)])
    return Work(rows.astype(np.int32), at.astype(np.int64), y)


def batches(work: Work, size: int, epochs: int, draw: np.random.Generator) -> Iterator[tuple[Ints, Floats]]:
    """The samples in batches, in another order each epoch."""
    for _ in range(epochs):
        order = draw.permutation(len(work.y))
        for begin in range(0, len(order), size):
            some = order[begin : begin + size]
            yield work.at[some], work.y[some]


def sigmoid(s: Floats) -> Floats:
    """1 / (1 + e^-s), without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * s)))


def log_loss(s: Floats, y: Floats) -> float:
    """The sum of -ln sigmoid(s) of samples taken and of -ln sigmoid(-s) of the others."""
    return float(np.logaddexp(0, np.where(y > 0, -s, s)).sum())


def linear(dimension: int, draw: np.random.Generator) -> Arrays:
    """A layer with one output as torch begins it: uniform within 1 / sqrt(dimension)."""
    bound = dimension**-0.5
    weights, bias = draw.uniform(-bound, bound, dimension), draw.uniform(-bound, bound, 1)
    return {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
