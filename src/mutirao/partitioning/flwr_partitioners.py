"""Partitioners of flwr-datasets as partitions: by a dotted path as a setting, or as an object from Python.

They divide a Hugging Face Dataset by one of its columns, with a seed of their own. Here that Dataset has the labels in
its column and the number of each row beside it, shuffled first, as FederatedDataset does. flwr-datasets need not be
installed: any object with the methods of a partitioner will do.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Indices = npt.NDArray[np.intp]

LABELS = ("label", "labels", "y", "target")  # possible names of the column of labels
# Arguments that the partition sets itself, by the names that partitioners give them.
HANDED_OVER = {
    "num_partitions": "clients",
    "partition_by": "labels",
    "seed": "rng",
}
ROW = "__row__"


def is_partitioner(thing: Any) -> bool:
    """Whether it is a partitioner of flwr-datasets, or the class of one."""
    kind = thing
    if not inspect.isclass(thing):
        # Looked up in the class: it is a property, which may fail while the partitioner has no data set.
        kind = type(thing)
    return callable(getattr(thing, "load_partition", None)) and hasattr(kind, "num_partitions")


def adapt(found: Any) -> Any:
    """The class of a partitioner as a partition with its settings; anything else as it is."""
    if not inspect.isclass(found) or not is_partitioner(found):
        return found
    takes = inspect.signature(found)
    own = [p for name, p in takes.parameters.items() if name not in HANDED_OVER]

    class Adapted:
        """A partition that calls a partitioner of flwr-datasets."""

        __signature__ = takes.replace(parameters=own, return_annotation=takes.empty)

        def __init__(self, **settings: Any) -> None:
            takes.bind_partial(**settings)
            self.settings = settings

        def __call__(self, labels: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Indices]:
            available = {"num_partitions": clients, "partition_by": LABELS[0], "seed": int(rng.integers(2**31))}
            given = {k: v for k, v in available.items() if k in takes.parameters} | self.settings
            parts = partition_by(make_partitioner(found, given), np.asarray(labels), rng)
            if len(parts) != clients:
                raise ConfigError(
                    f"partition={found.__name__}: it makes {len(parts)} clients; set clients={len(parts)}"
                )
            return parts

    names = {p.name for p in own}
    Adapted.__init__.__annotations__ = {k: v for k, v in found.__init__.__annotations__.items() if k in names}
    Adapted.__name__ = found.__name__
    Adapted.__module__ = found.__module__
    return Adapted


def make_partitioner(make: Callable[..., Any], given: dict[str, Any]) -> Any:
    """A partitioner; ConfigError with its own message if it refuses the settings."""
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"partition={make.__name__}: {' '.join(str(error).split())}") from error


def partition_by(partitioner: Any, labels: npt.NDArray[Any], rng: np.random.Generator) -> list[Indices]:
    """The rows of each client by a partitioner, which stays unchanged."""
    name = type(partitioner).__name__
    by = getattr(partitioner, "_partition_by", LABELS[0])
    if by not in LABELS:
        right = f"use partition_by={LABELS[0]!r}, or client= for a column with the client of each row"
        raise ConfigError(f"partition={name}: it divides by {by!r}, and there are only labels; {right}")
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ConfigError(f"partition={name}: it needs Hugging Face's datasets; install flwr-datasets") from error
    order = rng.permutation(len(labels))
    mine = copy.deepcopy(partitioner)  # a partitioner takes one data set only
    try:
        mine.dataset = Dataset.from_dict({by: labels[order], ROW: order})
        parts = [mine.load_partition(i) for i in range(mine.num_partitions)]
    except Exception as error:  # it may raise anything about the data or its settings
        raise ConfigError(f"partition={name}: {' '.join(str(error).split())[:300]}") from error
    if any(ROW not in part.column_names for part in parts):
        raise ConfigError(f"partition={name}: it divides columns, not samples")
    rows = [np.sort(np.asarray(part[ROW][:], np.intp)) for part in parts]
    if empty := [i for i, part in enumerate(rows) if not len(part)]:
        raise ConfigError(f"partition={name}: client {empty[0]} gets no samples; take fewer clients")
    return rows
