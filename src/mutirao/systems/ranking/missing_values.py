"""Missing values of ranking files: features without a value, documents without a label, orders in place of grades.

After this, LETOR's NULL variants and its semi-supervised and listwise sets are used like all others.
"""

import logging
from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_parsing import MOST_GRADE, UNLABELLED, Floats, Ints
from mutirao.systems.ranking.ranking_data import RankingData

log = logging.getLogger("mutirao")

LONG = 32  # where more documents of a query all have different numbers, these are an order and no grades
STEPS = 5  # grades that an order is divided into


def clean_data(data: RankingData, file: Path) -> RankingData:
    """Data with a value for every feature and a grade for every document, ready to train on."""
    fill_missing(data.x, data.queries)
    data = drop_unlabelled(data, file)
    if is_order(data.grades, data.queries):
        log.warning("%s has an order of each query's documents; it is divided into %d grades", file, STEPS)
        return RankingData(data.x, grade_order(data.grades, data.queries), data.queries, data.query_ids)
    if (most := int(data.grades.max())) > MOST_GRADE:
        raise ConfigError(
            f"{file}: grade {most} cannot be used; expected whole numbers from 0 to {MOST_GRADE}, or an order "
            f"in which all documents of a query have different numbers"
        )
    return data


def fill_missing(x: Floats, queries: Ints) -> None:
    """Fill a missing value with the smallest of the feature among the query's documents; 0 if all are missing.

    LETOR's publishers make the MIN variant of a set from its NULL variant like this (Qin and Liu, 2013).
    """
    for column in np.flatnonzero([np.isnan(x[:, i]).any() for i in range(x.shape[1])]).tolist():
        gap = np.isnan(x[:, column])
        least = np.full(int(queries.max()) + 1, np.inf, np.float32)
        np.minimum.at(least, queries[~gap], x[~gap, column])
        x[gap, column] = np.where(np.isinf(least), 0, least)[queries[gap]]


def drop_unlabelled(data: RankingData, file: Path) -> RankingData:
    """Only documents with a grade: a supervised ranker learns nothing from the others."""
    labelled = data.grades != UNLABELLED
    if labelled.all():
        return data
    if not labelled.any():
        raise ConfigError(f"{file}: none of its documents has a label (all have grade -1); expected some grades")
    log.info("%s: %d of %d documents have no label and are left out", file, int((~labelled).sum()), len(data))
    return data.take(np.flatnonzero(labelled))


def is_order(grades: Ints, queries: Ints) -> bool:
    """Whether no two documents of a query have the same number, in lists too long for that to be grades."""
    # Lists of up to LONG documents may have different grades by chance.
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
