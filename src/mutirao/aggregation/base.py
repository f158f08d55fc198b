"""What aggregators share: checked settings, and the mean of models by weights, with a step of one's own.

Clients are taken in the order of their names and sums run in float64, so the order of replies changes no bit.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays, average_arrays, blend, cast_to
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.parts import Merged
from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
Replies = Mapping[ClientId, Reply]
Move = Callable[[str, Floats], Floats]

TINY = 5e-324  # the least number above 0
# The least values of settings, 0 for the others, and what they must stay below.
LEAST = {"lr": TINY, "tau": TINY, "nu": TINY, "radius": TINY, "keep": 1, "iterations": 1, "population": 1}
LEAST |= {"alpha": TINY, "client_lr": TINY, "epsilon": TINY}
BELOW = {"momentum": 1, "beta1": 1, "beta2": 1, "beta": 0.5}
STATISTICS = ("running_mean", "running_var")  # torch's names for what no gradient moves: their mean is taken as it is


class Checked:
    """Refuses a setting outside its limits, by name."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = LEAST.get(name, 0), BELOW.get(name, math.inf)
            if not isinstance(value, str | None) and not low <= value < high:
                right = "above 0" if low == TINY else f"at least {low}"
                raise ValueError(
                    f"{name} is {value!r}, but must be {right}" + (f" and below {high}" if name in BELOW else "")
                )


class OfMean(Checked):
    """An aggregator that looks at nothing but the mean update."""

    mean_only = True


def sample_shares(replies: Replies) -> dict[ClientId, float]:
    """The share of each client in the samples of all, in the order of their names."""
    total = sum(r.n for r in replies.values())
    return {c: replies[c].n / total for c in sorted(replies)}


def equal_shares(replies: Replies) -> dict[ClientId, float]:
    """Every client counts the same."""
    return {c: 1 / len(replies) for c in sorted(replies)}


def apply_mean_update(current: Arrays, replies: Replies, move: Move | None = None) -> Merged:
    """x' = x + move(mean update); without `move`, and for what is not of floating point, the mean itself."""
    return merge_models(current, replies, sample_shares(replies), move)


def merge_models(current: Arrays, replies: Replies, weights: dict[ClientId, float], move: Move | None = None) -> Merged:
    """The mean of the models by these weights, which sum to one, in the order given."""
    shares = list(weights.values())

    def stepped(name: str, x: Array) -> Array:
        values = [replies[c].arrays[name] for c in weights]
        if move is None or x.dtype.kind != "f":
            return average_arrays(values, shares)
        return cast_to(x + move(name, blend(values, shares) - x), x.dtype)

    return Merged({name: stepped(name, x) for name, x in current.items()}, weights)


def is_moved(name: str, x: Array) -> bool:
    """Whether gradients move it: not a counter, nor what batch normalisation keeps of its batches."""
    return x.dtype.kind == "f" and name.rpartition(".")[2] not in STATISTICS


def weigh_updates(current: Arrays, replies: Replies, weights: Mapping[ClientId, float]) -> dict[str, Floats]:
    """sum_k weight_k (x_k - x) of all that gradients move, for weights that need not sum to one."""
    found = {}
    for name, x in current.items():
        if is_moved(name, x):
            ends = [replies[c].arrays[name] for c in weights]
            found[name] = blend(ends, list(weights.values())) - math.fsum(weights.values()) * x.astype(np.float64)
    return found


def move_by(current: Arrays, replies: Replies, moved: Mapping[str, Floats]) -> Arrays:
    """The model moved by these updates; what gradients do not move is the mean by samples."""
    mean = apply_mean_update(current, replies).arrays
    return {k: cast_to(x + moved[k], x.dtype) if k in moved else mean[k] for k, x in current.items()}


def squares_of(current: Arrays, replies: Replies) -> dict[ClientId, float]:
    """|x_k - x|^2 of each client, over all that gradients move."""
    found = {}
    for c in sorted(replies):
        gaps = (np.ravel(replies[c].arrays[k].astype(np.float64) - x) for k, x in current.items() if is_moved(k, x))
        found[c] = math.fsum(float(np.dot(gap, gap)) for gap in gaps)
    return found


def population_of(part: object, population: int | None) -> int:
    """How many clients there are in all; ConfigError if nobody has told the part."""
    if population is None:
        raise ConfigError(f"{type(part).__name__.lower()} has to know how many clients there are: set `population`")
    return population
