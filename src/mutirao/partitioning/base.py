"""What all partitions share: checks of labels, and the rows of each client."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Indices = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]


def check_labels(labels: npt.ArrayLike, clients: int, what: str = "labels") -> npt.NDArray[Any]:
    """Labels as a vector; ConfigError if there are none, or no client."""
    values = np.asarray(labels)
    if values.ndim != 1 or not len(values):
        raise ConfigError(f"partition: {what} must be a list with one value a sample, this has shape {values.shape}")
    check_least("clients", clients, 1)
    return values


def check_least(name: str, value: int, least: int) -> None:
    """Refuse, by name, a number that is too small."""
    if value < least:
        raise ConfigError(f"{name}: {value!r} is too small, at least {least} is needed")


def rows_by_owner(samples: Indices, owners: npt.NDArray[np.integer[Any]], clients: int) -> list[Indices]:
    """The samples of each client, sorted, given the owner of each; samples with a negative owner belong to none."""
    owner = np.empty(len(samples), np.intp)
    owner[samples] = owners
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner + 1, minlength=clients + 1))
    return [order[a:b] for a, b in pairwise(ends)]


def order_by_class(y: npt.NDArray[Any], rng: np.random.Generator) -> tuple[Indices, Counts]:
    """Samples ordered by class, shuffled within each class, and the size of each class."""
    _, codes, per_class = np.unique(y, return_inverse=True, return_counts=True)
    shuffled = rng.permutation(len(y))
    return shuffled[np.argsort(codes[shuffled], kind="stable")], per_class.astype(np.int64)


def count_of(count: int, one: str, more: str = "") -> str:
    """`1 client`, `2 clients`."""
    if count == 1:
        return f"{count:,} {one}"
    return f"{count:,} {more or one + 's'}"
