"""Base class of methods in which users keep personal parameters, and the examples that they train on."""

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


class Examples(NamedTuple):
    """Items in ascending order, and for each example the index of its item among them and its target."""

    rows: npt.NDArray[np.int32]
    at: Ints
    y: Floats


class RoundSettings(NamedTuple):
    """Number of all items, epochs, the learning rate schedule's factor and the round."""

    items: int
    epochs: int = 1
    factor: float = 1.0
    round: int = 1


class TrainResult(NamedTuple):
    """Item rows and personal parameters after training, and the mean loss during it."""

    x: Floats
    personal: Arrays
    loss: float


@dataclass(frozen=True)
class Method:
    """Base class of methods. `personal` are a user's own parameters, x are rows of the item matrix.

    With `spare`, items that a user is evaluated on are never sampled as negatives. This uses knowledge of the future.
    The authors' code of PFedRec and of FedRAP does it, so metrics with it are comparable only with theirs.
    """

    spare: bool = False

    positive: ClassVar[tuple[str, ...]] = ()  # settings that must be above 0
    non_negative: ClassVar[tuple[str, ...]] = ()
    implicit = True  # implicit feedback instead of ratings
    keeps_personal = True  # personal parameters are kept from round to round
    tunes = False  # item rows are fitted before they are used for ranking
    trains_all_items = False
    biases: ClassVar[bool] = False  # column 0 of the items holds their biases

    def __post_init__(self) -> None:
        for name in self.positive:
            check_setting(name, getattr(self, name) > 0, getattr(self, name), "above 0")
        for name in self.non_negative:
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "0 (none) or above")

    def initial(self, items: int, dimension: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
        """The initial item matrix."""
        raise NotImplementedError

    def initial_personal(self, items: int, dimension: int, draw: np.random.Generator) -> Arrays:
        """The initial personal parameters, the same for all users."""
        return {}

    def train(
        self, x: Floats, personal: Arrays, examples: Examples, settings: RoundSettings, draw: np.random.Generator
    ) -> TrainResult:
        """Train item rows and personal parameters for one round."""
        raise NotImplementedError

    def score(self, x: Floats, personal: Arrays, taste: Taste) -> Floats:
        """The user's scores of all items; x is the whole item matrix."""
        raise NotImplementedError


def with_negatives(
    taken: npt.NDArray[np.int32], items: int, negatives: int, draw: np.random.Generator, avoid: npt.ArrayLike = ()
) -> Examples:
    """Each positive with y = 1 and `negatives` others with y = 0, sampled uniformly with replacement."""
    known = np.union1d(taken, np.asarray(avoid, np.int64)).astype(np.int64)
    free = items - len(known)
    if free < 1:
        raise ValueError(f"has taken all {items} items; no item is left to sample as a negative")
    # Places among the free items are turned into rows as in `evaluation.sample_negatives`.
    places = draw.integers(0, free, negatives * len(taken))
    sampled = places + np.searchsorted(known - np.arange(len(known)), places, side="right")
    rows, at = np.unique(np.concatenate([taken.astype(np.int64), sampled]), return_inverse=True)
    y = np.repeat([1.0, 0.0], [len(taken), len(sampled)])
    return Examples(rows.astype(np.int32), at.astype(np.int64), y)


def batches(examples: Examples, size: int, epochs: int, draw: np.random.Generator) -> Iterator[tuple[Ints, Floats]]:
    """The examples in batches, in a new order each epoch."""
    for _ in range(epochs):
        order = draw.permutation(len(examples.y))
        for begin in range(0, len(order), size):
            some = order[begin : begin + size]
            yield examples.at[some], examples.y[some]


def sigmoid(s: Floats) -> Floats:
    """1 / (1 + e^-s), without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * s)))


def log_loss(s: Floats, y: Floats) -> float:
    """The sum of -ln sigmoid(s) over positives and of -ln sigmoid(-s) over negatives."""
    return float(np.logaddexp(0, np.where(y > 0, -s, s)).sum())


def linear(dimension: int, draw: np.random.Generator) -> Arrays:
    """A linear layer with one output, initialised as in torch: uniform within 1 / sqrt(dimension)."""
    bound = dimension**-0.5
    weights = draw.uniform(-bound, bound, dimension)
    bias = draw.uniform(-bound, bound, 1)
    return {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
