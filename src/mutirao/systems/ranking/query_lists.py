"""A client's documents as lists, one a query: all of a query's, however many, filled up to the client's longest."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mutirao.systems.ranking.losses import PAD
from mutirao.training.lazy_samples import Lazy
from mutirao.training.samples import Index, Samples

Rows = npt.NDArray[np.float32]
KEPT = 1 << 22  # bytes of a client's lists that stay put together


def lists_of(x: Rows, grades: npt.ArrayLike, queries: npt.ArrayLike, rows: Index | None = None) -> Samples:
    """The documents, or these rows of them, as samples of one list each: features and which places hold a document.

    Features stay where they are and are put together batch by batch, so that filling up costs little memory. The labels
    are the grades, PAD where there is no document.

    >>> lists = lists_of(np.eye(3, dtype=np.float32), [2, 0, 1], [7, 8, 7])
    >>> len(lists), lists.y
    (2, tensor([[ 2.,  1.],
            [ 0., -1.]]))
    """
    found, asked = np.asarray(grades), np.asarray(queries)
    rows = np.arange(len(found)) if rows is None else rows
    own = by_query(asked, rows)
    longest = max(map(len, own), default=1)
    y = np.full((len(own), longest), PAD, np.float32)
    for i, r in enumerate(own):
        y[i, : len(r)] = found[r]

    def read(i: int) -> tuple[Tensor, Tensor]:
        features = torch.zeros(longest, x.shape[1])
        features[: len(own[i])] = torch.from_numpy(x[own[i]])
        return features, torch.arange(longest) < len(own[i])

    example = torch.zeros(1, longest, x.shape[1]), torch.zeros(1, longest, dtype=torch.bool)
    return Samples(Lazy(read, len(own), example, KEPT), y)


def by_query(queries: npt.NDArray[np.generic], rows: Index) -> list[Index]:
    """The rows of each query, in the order in which queries are numbered."""
    ordered = rows[np.argsort(queries[rows], kind="stable")]
    cuts = np.flatnonzero(queries[ordered][1:] != queries[ordered][:-1]) + 1
    return [piece for piece in np.split(ordered, cuts) if len(piece)]


def most_of(samples: Samples, most: int, seed: int) -> Samples:
    """At most so many of the samples, drawn once; 0: all."""
    if not most or len(samples) <= most:
        return samples
    draw = np.random.default_rng(seed)
    return samples.rows(np.sort(draw.choice(len(samples), most, replace=False)))


def flat_lists(outputs: npt.ArrayLike, grades: npt.ArrayLike) -> tuple[Rows, Rows, Index]:
    """Scores, grades and list numbers of the documents alone, as metrics take them."""
    there = np.asarray(grades) > PAD
    return np.asarray(outputs)[there], np.asarray(grades)[there], np.nonzero(there)[0]
