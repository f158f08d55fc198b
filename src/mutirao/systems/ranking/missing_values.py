"""What ranking files leave open: features without a value, documents nobody judged, orders in place of grades.

LETOR's files of the NULL kind and its semi-supervised and listwise sets are read like all others after this.
"""

import logging
from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_parsing import MOST_GRADE, UNJUDGED, Floats, Ints
from mutirao.systems.ranking.ranking_data import RankingData

log = logging.getLogger("mutirao")

LONG = 32  # documents of a query that all have different numbers: these are places in an order, no grades
STEPS = 5  # grades that an order is cut into


def settle(data: RankingData, file: Path) -> RankingData:
    """Data with a number for every feature and a grade for every document, ready to be learnt from."""
    fill_missing(data.x, data.queries)
    data = leave_out_unjudged(data, file)
    if is_order(data.grades, data.queries):
        log.warning("%s has an order of each query's documents; %d grades are made of it", file, STEPS)
        return RankingData(data.x, grade_order(data.grades, data.queries), data.queries, data.query_ids)
    if (most := int(data.grades.max())) > MOST_GRADE:
        raise ConfigError(
            f"{file}: grade {most} cannot be used; right would be whole numbers from 0 to {MOST_GRADE}, or an order "
            f"in which all documents of a query have different numbers"
        )
    return data


def fill_missing(x: Floats, queries: Ints) -> None:
    """Put the smallest value that a feature has among the query's documents where it has none; 0 if all have none.

    So LETOR's publishers make the MIN kind of a set of its NULL kind (Qin and Liu, 2013).
    """
    for column in np.flatnonzero([np.isnan(x[:, i]).any() for i in range(x.shape[1])]).tolist():
        gap = np.isnan(x[:, column])
        least = np.full(int(queries.max()) + 1, np.inf, np.float32)
        np.minimum.at(least, queries[~gap], x[~gap, column])
        x[gap, column] = np.where(np.isinf(least), 0, least)[queries[gap]]


def leave_out_unjudged(data: RankingData, file: Path) -> RankingData:
    """Only documents with a grade: from the others a ranker of grades learns nothing."""
    judged = data.grades != UNJUDGED
    if judged.all():
        return data
    if not judged.any():
        raise ConfigError(f"{file}: nobody has judged any of its documents (grade -1); right would be some grades")
    log.info("%s: %d of %d documents are not judged and left out", file, len(data) - int(judged.sum()), len(data))
    return data.take(np.flatnonzero(judged))


def is_order(grades: Ints, queries: Ints) -> bool:
    """Whether no two documents of a query have the same number, in lists too long for that to be grades."""
    pairs = np.stack([queries, grades])
    return bool(np.bincount(queries).max() > LONG and np.unique(pairs, axis=1).shape[1] == len(grades))


def grade_order(places: Ints, queries: Ints) -> Ints:
    """Fifths of each query's documents as grades 0 to 4; the larger the number, the better the document.

    >>> grade_order(np.array([7, 9, 1, 3, 5]), np.zeros(5, np.int64)).tolist()
    [3, 4, 0, 1, 2]
    """
    order = np.lexsort((places, queries))
    sizes = np.bincount(queries)
    within = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    grades = np.empty(len(places), np.int64)
    grades[order] = within * STEPS // sizes[queries[order]]
    return grades
