"""How heterogeneous a partition is: samples and classes of each client, and the usual measures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.metrics import gini
from mutirao.partitioning.base import Counts, check_labels, count_of

SAMPLES = "samples"  # the one class of all samples where labels are no classes


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """How the classes are divided among clients: `counts` has a row for each client and a column for each class.

    `distances` are the total variation distances 1/2 sum_c |p_kc - p_c| between the labels of client k and
    those of the whole set: 0 if they are the same, towards 1 - 1/C if client k has one of C equal classes
    (NaN for a client without samples).

    >>> summary = describe([0, 0, 1, 1], [[0, 1, 2], [3]])
    >>> summary.counts, summary.classes_per_client, summary.size_ratio
    (array([[2, 1],
           [0, 1]]), array([2, 1]), 3.0)
    """

    classes: tuple[Any, ...]
    counts: Counts
    distances: npt.NDArray[np.float64]
    left_out: int
    clients: tuple[str, ...] = ()  # names of the clients; empty: their numbers

    @property
    def sizes(self) -> Counts:
        """Samples of each client."""
        return np.asarray(self.counts.sum(1), np.int64)

    @property
    def classes_per_client(self) -> Counts:
        """How many classes each client has at least one sample of."""
        return np.asarray((self.counts > 0).sum(1), np.int64)

    @property
    def heterogeneity(self) -> float:
        """The mean distance of the clients that have samples: 0 is i.i.d."""
        return mean_of_known(self.distances)

    @property
    def movers(self) -> npt.NDArray[np.float64]:
        """The earth mover's distances sum_c |p_kc - p_c|, twice the total variation.

        Zhao et al., "Federated Learning with Non-IID Data", 2018: what they quote as EMD for classes that are all
        equally far from each other.
        """
        return 2 * self.distances

    @property
    def entropies(self) -> npt.NDArray[np.float64]:
        """The label entropy -sum_c p_kc log2 p_kc of each client, in bits: 0 is one class, log2 C all equal."""
        shares = class_shares(self.counts)
        logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
        return np.asarray(0.0 - (shares * logs).sum(1))  # never -0

    @property
    def size_ratio(self) -> float:
        """The samples of the largest client by those of the smallest; infinite if that has none."""
        most = float(self.sizes.max())
        least = float(self.sizes.min())
        if least:
            return most / least
        return math.inf

    def figures(self) -> dict[str, Any]:
        """The usual measures of a partition, by name; an infinite ratio is None."""
        sizes = self.sizes
        kinds = self.classes_per_client
        return {
            "clients": len(sizes),
            "samples": int(sizes.sum()),
            "left_out": self.left_out,
            "classes": len(self.classes),
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "size_ratio": self.size_ratio if math.isfinite(self.size_ratio) else None,
            "gini": gini(sizes),
            "classes_fewest": int(kinds.min()),
            "classes_mean": float(kinds.mean()),
            "classes_most": int(kinds.max()),
            "label_entropy": mean_of_known(self.entropies),
            "label_entropy_most": math.log2(len(self.classes)),
            "emd": mean_of_known(self.movers),
            "emd_largest": float(np.nanmax(self.movers, initial=0.0)),
            "total_variation": self.heterogeneity,
        }

    def __str__(self) -> str:
        sizes = self.sizes
        kinds = self.classes_per_client
        total = len(self.classes)
        counts = f"{count_of(len(sizes), 'client')}, {count_of(int(sizes.sum()), 'sample')} of "
        counts += count_of(total, "class", "classes")
        if self.left_out:
            counts += f", {self.left_out:,} left out"
        samples = f"samples a client: {sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,g}"
        if empty := int(np.count_nonzero(sizes == 0)):
            samples += f", {count_of(empty, 'client')} with none"
        lines = [
            counts,
            samples,
            f"classes a client: {kinds.min():,} to {kinds.max():,}, median {np.median(kinds):,g}",
            f"label skew: {self.heterogeneity:.3f} (mean total variation distance; 0 is i.i.d., "
            f"{1 - 1 / total:.3f} is one class each)",
        ]
        return "\n".join(lines)


def describe(labels: npt.ArrayLike, parts: Sequence[npt.ArrayLike]) -> PartitionSummary:
    """Count the samples of each client and class, and compare them with the whole set.

    >>> print(describe([0, 0, 1, 1], [[0, 1], [2, 3]]))
    2 clients, 4 samples of 2 classes
    samples a client: 2 to 2, median 2
    classes a client: 1 to 1, median 1
    label skew: 0.500 (mean total variation distance; 0 is i.i.d., 0.500 is one class each)
    """
    names, y = np.unique(check_labels(labels, 1), return_inverse=True)
    if not parts:
        raise ConfigError("a partition without clients cannot be described")
    counts = np.stack([np.bincount(y[np.asarray(p, np.intp)], minlength=len(names)) for p in parts]).astype(np.int64)
    overall = np.bincount(y, minlength=len(names)) / len(y)
    distances = np.abs(class_shares(counts) - overall).sum(1) / 2
    return PartitionSummary(tuple(names.tolist()), counts, distances, len(y) - int(counts.sum()))


def class_shares(counts: Counts) -> npt.NDArray[np.float64]:
    """The share of each class at each client; NaN for a client without samples."""
    sizes = counts.sum(1, keepdims=True)
    return np.asarray(np.divide(counts, sizes, out=np.full(counts.shape, np.nan), where=sizes > 0))


def mean_of_known(values: npt.NDArray[np.float64]) -> float:
    """The mean of the values that are not NaN; 0 if there is none."""
    known = values[~np.isnan(values)]
    if len(known):
        return float(known.mean())
    return 0.0
