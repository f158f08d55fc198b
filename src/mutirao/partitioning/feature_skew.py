"""Feature skew: clients have the same label distribution, and inputs with more noise from the first to the last.

A partition assigns rows, and noise changes their contents. So `noise` assigns the rows, and the recipe that reads the
inputs adds the noise with `disturb_rows`. Recipes that cannot do that refuse this partition by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.partitioning.base import Indices, check_labels, rows_by_owner
from mutirao.randomness import rng as stream

Floats = npt.NDArray[np.float64]
Form = Literal["paper", "code"]
WHITE = 255.0  # images of bytes are numbers from 0 to 1, times this


def noise(
    labels: npt.ArrayLike, clients: int, rng: np.random.Generator, sigma: float = 0.1, form: Form = "paper"
) -> list[Indices]:
    """Assign samples i.i.d. by label; client i of N then has Gaussian noise of variance sigma i / N on its inputs.

    Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos", ICDE 2022: noise-based feature imbalance. Their
    code has noise of *deviation* sigma (i - 1) / (N - 1) instead, which is much less: `form="code"`.

    >>> [len(p) for p in noise([0, 0, 0, 1, 1, 1, 1], 3, np.random.default_rng(0))]
    [3, 2, 2]
    """
    y = check_labels(labels, clients)
    deviations(clients, sigma, form)  # this checks sigma
    if clients > len(y):
        raise ConfigError(
            f"partition=noise: {len(y)} samples are not enough for {clients} clients; take at most {len(y)}"
        )
    return rows_by_owner(rng.permutation(len(y)), np.arange(len(y)) % clients, clients)


def deviations(clients: int, sigma: float = 0.1, form: Form = "paper") -> Floats:
    """The standard deviation of the noise at each client: sqrt(sigma i / N), or sigma (i - 1) / (N - 1).

    >>> deviations(4, 1.0).round(3).tolist(), deviations(3, 1.0, "code").tolist()
    ([0.5, 0.707, 0.866, 1.0], [0.0, 0.5, 1.0])
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"partition.sigma: {sigma!r} is not a number of 0 or above")
    if form == "code":
        return np.asarray(sigma * np.arange(clients) / max(1, clients - 1))
    return np.asarray(np.sqrt(sigma * np.arange(1, clients + 1) / clients))


def noise_levels(name: str, settings: Mapping[str, Any], clients: int) -> tuple[float, ...]:
    """The standard deviations of the noise on the clients' inputs; empty for other partitions than `noise`."""
    if name == "noise":
        return tuple(deviations(clients, **settings).tolist())
    return ()


def disturb(x: npt.NDArray[Any], deviation: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """x + deviation z with z ~ N(0, 1), as float32; for images of bytes on a scale from 0 to 1, without clipping."""
    if x.dtype.kind != "f" and x.dtype != np.uint8:
        raise ConfigError(
            f"partition=noise: inputs are {x.dtype}; noise needs floating-point numbers or images of bytes"
        )
    if x.dtype == np.uint8:
        deviation = deviation * WHITE
    return x.astype(np.float32) + np.float32(deviation) * rng.standard_normal(x.shape, np.float32)


def disturb_rows(levels: Sequence[float], seed: int, parts: Sequence[Indices], x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """All inputs with each client's noise on its own rows: one copy for all clients, as no row belongs to two.

    Without levels they are unchanged.
    """
    if not levels:
        return x
    out = np.asarray(x).astype(np.float32)
    for i, (part, level) in enumerate(zip(parts, levels, strict=True)):
        # A generator for each client, so that its noise does not depend on the sizes of the others.
        if len(part):
            out[part] = disturb(x[part], level, stream(seed, 0, "noise", str(i)))
    return out


def disturb_test(levels: Sequence[float], seed: int, client: int, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The test inputs of a client with noise of its own level; unchanged without levels."""
    if levels:
        return disturb(x, levels[client], stream(seed, 0, "noise of test", str(client)))
    return x
