"""Lists of documents, one a query, and whose queries are whose."""

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
class Lists:
    """Documents list after list: list q is the rows from begins[q] on, sizes[q] of them."""

    x: npt.NDArray[np.float32]
    grades: Ints
    begins: Ints
    sizes: Ints
    best: Ints  # a row a list: its highest grades, as many as are shown, 0 where there is no document

    @classmethod
    def of(cls, data: RankingData, parts: Sequence[Indices], shown: int) -> tuple["Lists", list[Ints]]:
        """The documents of each part by query, and which lists are whose; of a query in two parts each has its own."""
        if all(part is parts[0] for part in parts):  # everybody has everything: it is kept once
            lists, owned = cls._of(data, parts[:1], shown)
            return lists, owned * len(parts)
        return cls._of(data, parts, shown)

    @classmethod
    def _of(cls, data: RankingData, parts: Sequence[Indices], shown: int) -> tuple["Lists", list[Ints]]:
        rows = [part[np.argsort(data.queries[part], kind="stable")] for part in parts]
        order = np.concatenate(rows)
        owner = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        query = data.queries[order]
        new = np.concatenate([[True], (np.diff(query) != 0) | (np.diff(owner) != 0)])
        begins = np.flatnonzero(new).astype(np.int64)
        sizes, grades = np.diff(np.append(begins, len(order))), data.grades[order]
        falling = grades[np.lexsort((-grades, np.cumsum(new)))]
        at = begins[:, None] + np.arange(shown)
        best = np.where(np.arange(shown) < sizes[:, None], falling[np.minimum(at, len(order) - 1)], 0)
        cuts = np.searchsorted(owner[begins], np.arange(len(rows) + 1))
        owned = [np.arange(a, b) for a, b in pairwise(cuts.tolist())]
        return cls(data.x[order], grades, begins, sizes, best), owned

    def __len__(self) -> int:
        return len(self.begins)

    def features(self, number: int) -> Floats:
        """The documents of a list."""
        begin = self.begins[number]
        return self.x[begin : begin + self.sizes[number]].astype(np.float64)

    def grades_of(self, number: int) -> Ints:
        """Their grades."""
        begin = self.begins[number]
        return self.grades[begin : begin + self.sizes[number]]


def normalise(data: RankingData) -> RankingData:
    """Each feature of each query brought to 0 .. 1: (x - min) / (max - min), 0 where all are equal.

    So no moments have to be agreed on: a user's own list is enough. LETOR's sets are published like that.
    """
    order = np.argsort(data.queries, kind="stable")
    begins = np.flatnonzero(np.append([True], np.diff(data.queries[order]) != 0))
    x = data.x[order]
    least, most = (f.reduceat(x, begins, axis=0) for f in (np.minimum, np.maximum))
    place = np.cumsum(np.isin(np.arange(len(order)), begins)) - 1
    spread = (most - least)[place]
    scaled = np.divide(x - least[place], spread, out=np.zeros_like(x), where=spread > 0)
    out = np.empty_like(scaled)
    out[order] = scaled
    return RankingData(out, data.grades, data.queries, data.query_ids)


def judge_shown(grades: Ints, ideal: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """nDCG of rankings shown, and whether there was anything to find: grades by place beside the best there could be.

    Places without a document have grade 0. A query without relevant documents has 0.
    """
    discount = 1 / np.log2(np.arange(grades.shape[1]) + 2.0)
    got, best = (((np.exp2(g) - 1) * discount).sum(1) for g in (grades, ideal))
    return np.divide(got, best, out=np.zeros(len(got)), where=best > 0), best > 0


@dataclass(frozen=True, eq=False)
class User:
    """A client: the queries it may ask, as numbers of lists, and how it clicks; a `log` is asked in its order."""

    lists: Lists
    queries: Ints
    clicks: Cascade
    log: bool = False

    def __len__(self) -> int:
        return len(self.queries)


def shared(labels: npt.ArrayLike, clients: int) -> list[Indices]:
    """Every user may ask any of the training queries: users are alike, as in the paper (IID).

    >>> [rows.tolist() for rows in shared([0, 1, 2], clients=2)]
    [[0, 1, 2], [0, 1, 2]]
    """
    everything = np.arange(len(np.asarray(labels)))
    return [everything] * clients


NAMES = {"shared": shared, **query_partition.NAMES}
