"""Ranking data: queries, their documents, and how relevant each document is."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankingData:
    """Documents by rows: features, grades, and the query of each as a number into `query_ids`.

    Queries are numbered as they first appear; their ids are whole numbers if all of them are, or else text.

    >>> data = RankingData(np.zeros((3, 2), np.float32), np.array([2, 0, 1]), np.array([0, 0, 1]), np.array([10, 20]))
    >>> len(data), data.features, data.take([0, 1]).query_ids
    (3, 2, array([10]))
    """

    x: Floats
    grades: Ints
    queries: Ints
    query_ids: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.grades)

    @property
    def features(self) -> int:
        """Number of features of a document."""
        return int(self.x.shape[1])

    def take(self, rows: npt.ArrayLike) -> "RankingData":
        """Only these documents, and only the queries they belong to.

        >>> data = RankingData(np.zeros((3, 2), np.float32), np.arange(3), np.array([0, 0, 1]), np.array([7, 9]))
        >>> data.take([2]).query_ids, data.take([2]).queries
        (array([9]), array([0]))
        """
        at = np.asarray(rows)
        used, queries = np.unique(self.queries[at], return_inverse=True)
        return RankingData(self.x[at], self.grades[at], queries.astype(np.int64), self.query_ids[used])
