"""How a ranking is judged: over all queries, and query by query, which is what tells who wins and who loses."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.io import write_rows, write_whole
from mutirao.metrics import mrr, ndcg
from mutirao.systems.ranking.ranking_data import RankingData

CUTS = (1, 5, 10)
Metric = Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], float]  # of scores, grades, queries: a mean over these
Metrics = Mapping[str, Metric]
METRICS: Metrics = {f"{name}@{k}": partial(f, k=k) for name, f in (("ndcg", ndcg), ("mrr", mrr)) for k in CUTS}


def judge(scores: npt.ArrayLike, data: RankingData, metrics: Metrics = METRICS) -> dict[str, float]:
    """Each metric over all queries."""
    return {name: metric(scores, data.grades, data.queries) for name, metric in metrics.items()}


def judge_queries(scores: npt.ArrayLike, data: RankingData, metrics: Metrics = METRICS) -> list[dict[str, Any]]:
    """Each metric of each query alone, and how many documents and relevant ones (grade 1 or above) it has.

    The mean of a column is the metric over all queries: one without a relevant document counts 0 in both.
    """
    s, rows = np.asarray(scores, np.float64), []
    order = np.argsort(data.queries, kind="stable")
    cuts = np.flatnonzero(np.diff(data.queries[order])) + 1
    for own in np.split(order, cuts):
        grades, one = data.grades[own], np.zeros(len(own), np.int64)
        row = {
            "query": data.query_ids[data.queries[own[0]]],
            "documents": len(own),
            "relevant": int((grades > 0).sum()),
        }
        rows.append(row | {name: metric(s[own], grades, one) for name, metric in metrics.items()})
    return rows


def write_queries(scores: npt.ArrayLike, data: RankingData, metrics: Metrics, path: Path) -> None:
    """Write `queries.csv`: what a model makes of each query that judges it."""
    rows = judge_queries(scores, data, metrics)
    write_whole(path, write_rows([list(rows[0]), *(list(row.values()) for row in rows)]))
