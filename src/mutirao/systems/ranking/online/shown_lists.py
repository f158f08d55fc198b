"""Lists of documents, one a query, the users they belong to, and the quality of the rankings shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mutirao.systems.ranking import query_partition
from mutirao.systems.ranking.online.click_models import Cascade
from mutirao.systems.ranking.ranking_data import RankingData

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class QueryLists:
    """Documents list after list: list q consists of sizes[q] rows, from begins[q] on."""

    x: npt.NDArray[np.float32]
    grades: Ints
    begins: Ints
    sizes: Ints
    best: Ints  # a row a list: the grades of its ideal ranking, as many as are shown, padded with 0

    @classmethod
    def of(cls, data: RankingData, parts: Sequence[Indices], shown: int) -> tuple["QueryLists", list[Ints]]:
        """The documents of each part by query, and the numbers of each part's lists; parts never share a list.

        A query in two parts becomes a list in each.
        """
        # With `shared` all users have the same rows, which are stored once.
        if all(part is parts[0] for part in parts):
            lists, owned = cls._of(data, parts[:1], shown)
            return lists, owned * len(parts)
        return cls._of(data, parts, shown)

    @classmethod
    def _of(cls, data: RankingData, parts: Sequence[Indices], shown: int) -> tuple["QueryLists", list[Ints]]:
        # Sorted by user and then by query, so that each list is a slice of one array.
        rows = [part[np.argsort(data.queries[part], kind="stable")] for part in parts]
        order = np.concatenate(rows)
        owner = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        query = data.queries[order]
        new = np.concatenate([[True], (np.diff(query) != 0) | (np.diff(owner) != 0)])
        begins = np.flatnonzero(new).astype(np.int64)
        sizes = np.diff(np.append(begins, len(order)))
        grades = data.grades[order]
        falling = grades[np.lexsort((-grades, np.cumsum(new)))]
        at = begins[:, None] + np.arange(shown)
        best = np.where(np.arange(shown) < sizes[:, None], falling[np.minimum(at, len(order) - 1)], 0)
        cuts = np.searchsorted(owner[begins], np.arange(len(rows) + 1))
        owned = [np.arange(a, b) for a, b in pairwise(cuts.tolist())]
        return cls(data.x[order], grades, begins, sizes, best), owned

    def __len__(self) -> int:
        return len(self.begins)

    def features(self, number: int) -> Floats:
        """The features of a list's documents."""
        begin = self.begins[number]
        return self.x[begin : begin + self.sizes[number]].astype(np.float64)

    def grades_of(self, number: int) -> Ints:
        """The grades of a list's documents."""
        begin = self.begins[number]
        return self.grades[begin : begin + self.sizes[number]]


def normalize_per_query(data: RankingData) -> RankingData:
    """Scale each feature to 0 .. 1 within each query: (x - min) / (max - min), 0 where all are equal.

    This needs no agreed moments: a user's own list is enough. LETOR's sets are published like this.
    """
    order = np.argsort(data.queries, kind="stable")
    begins = np.flatnonzero(np.append([True], np.diff(data.queries[order]) != 0))
    x = data.x[order]
    least = np.minimum.reduceat(x, begins, axis=0)
    most = np.maximum.reduceat(x, begins, axis=0)
    place = np.cumsum(np.isin(np.arange(len(order)), begins)) - 1
    spread = (most - least)[place]
    scaled = np.divide(x - least[place], spread, out=np.zeros_like(x), where=spread > 0)
    out = np.empty_like(scaled)
    out[order] = scaled
    return RankingData(out, data.grades, data.queries, data.query_ids)


def shown_ndcg(grades: Ints, ideal: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """nDCG of rankings shown, from their grades by place and those of the ideal rankings; and whether any is relevant.

    Places without a document have grade 0. A query without relevant documents has nDCG 0.
    """
    discount = 1 / np.log2(np.arange(grades.shape[1]) + 2.0)
    dcg = ((np.exp2(grades) - 1) * discount).sum(1)
    ideal_dcg = ((np.exp2(ideal) - 1) * discount).sum(1)
    has_relevant = ideal_dcg > 0
    return np.divide(dcg, ideal_dcg, out=np.zeros(len(dcg)), where=has_relevant), has_relevant


@dataclass(frozen=True, eq=False)
class User:
    """A client: its queries, as numbers of lists, and its click model; the queries of a log keep their order."""

    lists: QueryLists
    queries: Ints
    clicks: Cascade
    is_log: bool = False

    def __len__(self) -> int:
        return len(self.queries)


def shared(labels: npt.ArrayLike, clients: int) -> list[Indices]:
    """Every user may ask any of the training queries, as in the paper: users are IID.

    >>> [rows.tolist() for rows in shared([0, 1, 2], clients=2)]
    [[0, 1, 2], [0, 1, 2]]
    """
    everything = np.arange(len(np.asarray(labels)))
    return [everything] * clients


NAMES = {"shared": shared, **query_partition.NAMES}
