"""Who holds how much of what, counted from a task's clients: a recipe need not tell it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.partitioning.heterogeneity import SAMPLES, PartitionSummary, describe

MOST_CLIENTS, MOST_CLASSES = 20_000, 1_000  # beyond which counting takes long, or shows nothing


@runtime_checkable
class CountsClasses(Protocol):
    """A population that can count a client's classes without reading its data, such as folders of pictures."""

    accepts_any_client: bool  # whether it stands for any client, so that it knows none by name

    def counts(self, name: ClientId) -> Mapping[str, int]:
        """The samples of a client by class."""


def count_held(population: Mapping[ClientId, Any]) -> PartitionSummary | None:
    """The samples of each client by class, or in all where they have none; None where that is not known here.

    Nothing is read that is not at hand: data that come from elsewhere, or are not `Samples`, are not counted.
    """
    from mutirao.training.samples import ClientData, Samples, VirtualClients  # late: it brings torch

    whole = population.population if isinstance(population, PopulationWithout) else population
    if not 1 < len(population) <= MOST_CLIENTS:
        return None
    if isinstance(whole, CountsClasses):
        try:
            return (
                None
                if whole.accepts_any_client
                else count_labels({name: spread(whole.counts(name)) for name in population})
            )
        except ConfigError:  # this party does not hold their pictures
            return None
    if not isinstance(whole, dict | VirtualClients):
        return None
    held = {name: population[name] for name in population}
    if not all(isinstance(data, Samples | ClientData) for data in held.values()):
        return None
    return count_labels({name: labels_of(Samples.of(data)) for name, data in held.items()})


def labels_of(samples: Any) -> Any:
    """The labels of a client's samples."""
    return samples.y.numpy() if samples.index is None else samples.y.numpy()[samples.index]


def spread(counts: Mapping[str, int]) -> Any:
    """Counts of classes as labels."""
    return np.repeat(np.array([*counts], str), np.array([*counts.values()], np.intp))


def count_labels(labels: Mapping[ClientId, Any]) -> PartitionSummary | None:
    """Labels counted by class where they are classes, of not too many kinds, and all together otherwise."""
    each = list(labels.values())
    sizes = np.array([len(y) for y in each])
    if not sizes.sum():
        return None
    ends = np.cumsum(sizes)
    parts = [np.arange(end - many, end) for end, many in zip(ends, sizes, strict=True)]
    classed = all(y.ndim == 1 and y.dtype.kind in "biuU" for y in each)
    y = np.concatenate(each) if classed else np.full(int(ends[-1]), SAMPLES)
    if classed and len(np.unique(y)) > MOST_CLASSES:
        y = np.full(len(y), SAMPLES)
    return replace(describe(y, parts), clients=tuple(labels))


def name_clients(summary: PartitionSummary, population: Mapping[ClientId, Any]) -> PartitionSummary:
    """The summary with its clients' names, which it lacks if a recipe counted parts."""
    whole = population.population if isinstance(population, PopulationWithout) else population
    fits = not summary.clients and len(whole) == len(summary.counts)
    return replace(summary, clients=tuple(whole)) if fits else summary
