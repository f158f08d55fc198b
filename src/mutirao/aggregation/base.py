"""What aggregators share: checks of settings, weighted means with an optional step, distances, staleness, local steps.

Clients are taken in the order of their names and sums run in float64, so the order of replies changes no bit.

Effective local steps say how far a client moves along a constant gradient, whatever its optimizer.

With learning rate lr, momentum m and proximal weight mu, K steps along a gradient of 1 move a weight by r (the metric
`reach`):

    r = lr sum_j a_j,
    sum_j a_j = K                                        (m = mu = 0)
    sum_j a_j = (K - m (1 - m^K) / (1 - m)) / (1 - m)    (mu = 0)
    sum_j a_j = (1 - (1 - lr mu)^K) / (lr mu)            (m = 0)

which is lr |a|_1 of Wang, Liu, Liang, Joshi and Poor, 2020 (FedNova). (x - x_k) / r is then the mean gradient that a
client has seen.
"""

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays, average_arrays, blend, cast_to
from mutirao.core.fleet import ClientId, Failure, Reply
from mutirao.core.parts import Merged
from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
Replies = Mapping[ClientId, Reply]
Move = Callable[[str, Floats], Floats]

BLOCK = 4096  # columns of the models that are compared at once: they stay in the cache
TINY = 5e-324  # the least number above 0
# The least value of each setting (0 for others), and the value it must stay below.
LEAST = {"lr": TINY, "tau": TINY, "nu": TINY, "radius": TINY, "keep": 1, "iterations": 1, "population": 1}
LEAST |= {"alpha": TINY, "client_lr": TINY, "epsilon": TINY}
BELOW = {"momentum": 1, "beta1": 1, "beta2": 1, "beta": 0.5}
# Torch's names for batch statistics, which no gradient moves: their mean is taken as it is.
STATISTICS = ("running_mean", "running_var")


def check_setting(name: str, is_valid: bool, value: object, wanted: str) -> None:
    """Refuse a setting with a wrong value."""
    if not is_valid:
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")


class Checked:
    """Refuses a setting outside its limits, by name."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low = LEAST.get(name, 0)
            high = BELOW.get(name, math.inf)
            least = "above 0" if low == TINY else f"at least {low}"
            below = f" and below {high}" if name in BELOW else ""
            if not isinstance(value, str | None):
                check_setting(name, low <= value < high, value, least + below)


class OfMean(Checked):
    """An aggregator that looks at nothing but the mean update."""

    mean_only = True


def sample_shares(replies: Replies) -> dict[ClientId, float]:
    """The share of each client in all samples, in the order of their names."""
    total = sum(r.n for r in replies.values())
    return {c: replies[c].n / total for c in sorted(replies)}


def equal_shares(replies: Replies) -> dict[ClientId, float]:
    """The same share for each client."""
    return {c: 1 / len(replies) for c in sorted(replies)}


def apply_mean_update(current: Arrays, replies: Replies, move: Move | None = None) -> Merged:
    """x' = x + move(mean update); the mean itself without `move`, and for integer arrays."""
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
    """Whether gradients change this array: no counter, and no statistics of batch normalization."""
    return x.dtype.kind == "f" and name.rpartition(".")[2] not in STATISTICS


def weigh_updates(current: Arrays, replies: Replies, weights: Mapping[ClientId, float]) -> dict[str, Floats]:
    """sum_k weight_k (x_k - x) of all arrays that gradients change; the weights need not sum to one."""
    found = {}
    # sum_k w_k x_k - (sum_k w_k) x, so that no update needs an array of its own.
    for name, x in current.items():
        if is_moved(name, x):
            ends = [replies[c].arrays[name] for c in weights]
            found[name] = blend(ends, list(weights.values())) - math.fsum(weights.values()) * x.astype(np.float64)
    return found


def move_by(current: Arrays, replies: Replies, moved: Mapping[str, Floats]) -> Arrays:
    """The model moved by these updates; the other arrays become their mean by samples."""
    mean = apply_mean_update(current, replies).arrays
    return {k: cast_to(x + moved[k], x.dtype) if k in moved else mean[k] for k, x in current.items()}


def squares_of(current: Arrays, replies: Replies) -> dict[ClientId, float]:
    """|x_k - x|^2 of each client, over all arrays that gradients change."""
    found = {}
    for c in sorted(replies):
        gaps = (np.ravel(replies[c].arrays[k].astype(np.float64) - x) for k, x in current.items() if is_moved(k, x))
        found[c] = math.fsum(float(np.dot(gap, gap)) for gap in gaps)
    return found


def population_of(part: object, population: int | None) -> int:
    """The number of all clients; ConfigError if it is not set."""
    if population is None:
        raise ConfigError(f"{type(part).__name__.lower()} needs the number of all clients: set `population`")
    return population


def staleness_of(reply: Reply) -> float:
    """How many models were made since the client began; 0 for a client that the server waited for."""
    return max(0.0, float(reply.metrics.get("staleness", 0.0)))


def squared_distances(current: Arrays, models: list[Arrays]) -> Floats:
    """||x_i - x_j||^2 from differences: ||x_i||^2 + ||x_j||^2 - 2 x_i x_j would cancel for similar models.

    Integer buffers are left out (unless there is nothing else): a counter of batches would outweigh all parameters.
    """
    names = [k for k, v in current.items() if v.dtype.kind == "f"] or list(current)
    out = np.zeros((len(models), len(models)))
    for name in sorted(names):
        rows = [np.ravel(m[name]) for m in models]
        for start in range(0, rows[0].size, BLOCK):
            block = np.array([row[start : start + BLOCK] for row in rows], np.float64)
            for i in range(len(models) - 1):
                gaps = block[i + 1 :] - block[i]
                out[i, i + 1 :] += np.einsum("ij,ij->i", gaps, gaps)
    return out + out.T


EFFECTIVE_STEPS = "reach"
CAP = 100.0  # a client may report at most so many times the median, and at least 1 / CAP of it


@functools.lru_cache(maxsize=1024)
def effective_steps(lr: float, momentum: float, mu: float, steps: int) -> float:
    """How far `steps` steps along a gradient of 1 move a weight that starts at its anchor.

    >>> effective_steps(0.1, 0.0, 0.0, 5), round(effective_steps(1.0, 0.9, 0.0, 3), 3)
    (0.5, 5.61)
    """
    if not momentum and not mu:
        return lr * steps
    # SGD with momentum on a gradient of 1, which mu pulls back to the anchor: v' = m v + 1 - mu d, d' = d + lr v'.
    distance = 0.0
    velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - mu * distance
        distance += lr * velocity
    return distance


def effective_steps_fault(reply: Reply) -> Failure | None:
    """Why a reply cannot be used: its effective steps are missing or not above 0."""
    if not reply.metrics.get(EFFECTIVE_STEPS, 0.0) > 0.0:
        return Failure("missing_key", "sent no effective steps (metric `reach`) above 0")
    return None


def reported_effective_steps(replies: Mapping[ClientId, Reply]) -> dict[ClientId, float]:
    """The effective steps of each client, between 1 / CAP and CAP times the median, so that none outweighs all."""
    reported = {c: float(replies[c].metrics[EFFECTIVE_STEPS]) for c in sorted(replies)}
    middle = float(np.median(list(reported.values())))
    return {c: min(max(r, middle / CAP), middle * CAP) for c, r in reported.items()}
