"""Ranking metrics: by the setting `metrics`, over all queries, query by query, and one ranker compared with another.

The setting lists metrics as `ndcg@5,ndcg@10,mrr@10,map,err@10,p@5`; the first chooses the best round. After a name
follows the rank at which the ranking is cut; without one the whole ranking counts. `gain` applies to nDCG, and `empty`
is the value of a query without relevant documents.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.metrics import err, mean_average_precision, mrr, ndcg, precision
from mutirao.risk import residuals
from mutirao.systems.ranking.ranking_data import RankingData

Metric = Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], float]  # of scores, grades, queries: mean over queries
Metrics = Mapping[str, Metric]
Floats = npt.NDArray[np.float64]

USUAL = "ndcg@5,ndcg@1,ndcg@10,mrr@5,mrr@1,mrr@10"
FUNCTIONS: dict[str, Any] = {"ndcg": ndcg, "mrr": mrr, "map": mean_average_precision, "err": err, "p": precision}
DIRECTIONS = dict.fromkeys(FUNCTIONS, "higher")
EMPTY = {"0": 0.0, "1": 1.0, "skip": math.nan}
WHOLE = 1 << 31  # no ranking is longer
AVERSION = 5.0  # as in TREC's Web tracks of 2013 and 2014


def metric_names(text: str) -> tuple[str, ...]:
    """The metrics that a setting names; ConfigError for one that does not exist, or is repeated."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"metrics: name at least one, such as {USUAL}")
    for name in names:
        stem, _, cut = name.partition("@")
        if stem not in FUNCTIONS:
            raise ConfigError(f"metrics: no metric is called {stem!r}{nearest(stem, FUNCTIONS)}")
        if ("@" in name and not re.fullmatch("[1-9][0-9]{0,8}", cut)) or (stem == "p" and not cut):
            raise ConfigError(f"metrics: {name!r} is not cut at a rank from 1 on, as {stem}@5 is")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"metrics: {twice[0]!r} is named twice")
    return names


def build_metrics(text: str, gain: str = "exponential", empty: str = "0", highest: int = 4) -> Metrics:
    """The metrics of a setting as functions of scores, grades and queries; `highest` is the scale's highest grade.

    >>> build_metrics("p@2,map")["p@2"]([0.1, 0.9, 0.5], [1, 0, 1], [7, 7, 7])
    0.5
    """
    options = {"gain": gain, "empty": EMPTY[empty], "highest": highest}
    metrics: dict[str, Metric] = {}
    for name in metric_names(text):
        stem, _, cut = name.partition("@")
        supported = inspect.signature(FUNCTIONS[stem]).parameters
        used = {key: value for key, value in options.items() if key in supported}
        metrics[name] = partial(FUNCTIONS[stem], k=int(cut or WHOLE), **used)
    return metrics


METRICS = build_metrics("ndcg@1,ndcg@5,ndcg@10,mrr@1,mrr@5,mrr@10")


def evaluate_ranking(scores: npt.ArrayLike, data: RankingData, metrics: Metrics = METRICS) -> dict[str, float]:
    """Each metric over all queries."""
    return {name: metric(scores, data.grades, data.queries) for name, metric in metrics.items()}


def evaluate_queries(scores: npt.ArrayLike, data: RankingData, metrics: Metrics = METRICS) -> list[dict[str, Any]]:
    """Each metric of each single query, with its numbers of documents and of relevant ones (grade 1 or above).

    The mean of a column is the metric over all queries: one without a relevant document counts 0 in both.
    """
    values = np.asarray(scores, np.float64)
    rows: list[dict[str, Any]] = []
    order = np.argsort(data.queries, kind="stable")
    cuts = np.flatnonzero(np.diff(data.queries[order])) + 1
    for own in np.split(order, cuts):
        grades = data.grades[own]
        query = np.zeros(len(own), np.int64)
        row = {
            "query": data.query_ids[data.queries[own[0]]],
            "documents": len(own),
            "relevant": int((grades > 0).sum()),
        }
        rows.append(row | {name: metric(values[own], grades, query) for name, metric in metrics.items()})
    return rows


def write_query_metrics(scores: npt.ArrayLike, data: RankingData, metrics: Metrics, path: Path) -> None:
    """Write `queries.csv`: a model's metrics on each test query."""
    rows = evaluate_queries(scores, data, metrics)
    write_whole(path, write_rows([list(rows[0]), *(list(row.values()) for row in rows)]))


@dataclass(frozen=True)
class RankerComparison:
    """One ranker against another: queries won, lost and tied, and risk-sensitive measures.

    >>> compare_rankers([0.6, 0.5, 0.3], [0.5, 0.5, 0.4], aversion=0.0).losses
    1
    """

    wins: int
    losses: int
    ties: int
    u_risk: float
    t_risk: float
    geo_risk: float
    their_geo_risk: float


def gains(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> Floats:
    """d_i = ours_i - theirs_i of each query."""
    a = np.asarray(ours, np.float64)
    b = np.asarray(theirs, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ConfigError(
            f"expected one value a query from both rankers, for the same queries; found shapes {a.shape} and {b.shape}"
        )
    return np.asarray(a - b)


def weigh_losses(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float) -> Floats:
    """d_i where it is a gain, (1 + aversion) d_i where it is a loss."""
    if not 0 <= aversion < math.inf:
        raise ConfigError(f"aversion: {aversion} is not a finite number of at least 0")
    d = gains(ours, theirs)
    return np.asarray(d + aversion * np.minimum(d, 0.0))


def u_risk(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> float:
    """URisk = 1/n (sum of gains + (1 + aversion) times the sum of losses) (Wang, Bennett and Collins-Thompson, 2012).

    With aversion 0 it is the difference of the means; it is below 0 where the losses outweigh the gains.

    >>> u_risk([0.5, 0.25], [0.25, 0.5], aversion=1.0)
    -0.125
    """
    return float(weigh_losses(ours, theirs, aversion).mean())


def t_risk(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> float:
    """TRisk = URisk / (s / sqrt(n)), s the standard deviation (n - 1) of the weighed gains.

    Dinçer, Macdonald and Ounis, 2014. It is Student's t with n - 1 degrees of freedom: below -2 the risk is real, above
    2 so is the gain. NaN if s is 0.

    >>> ours, theirs = [0.6, 0.5, 0.3, 0.7], [0.5, 0.6, 0.4, 0.6]  # two won and two lost by 0.1
    >>> round(t_risk(ours, theirs, aversion=0.0), 2) == 0, round(t_risk(ours, theirs, aversion=2.0), 2)
    (True, -0.87)
    """
    d = weigh_losses(ours, theirs, aversion)
    if len(d) < 2:
        return math.nan
    error = float(d.std(ddof=1)) / math.sqrt(len(d))
    if error > 0:
        return float(d.mean()) / error
    return math.nan


def z_risk(scores: npt.ArrayLike, aversion: float = AVERSION) -> Floats:
    """ZRisk of each ranker, for scores of rankers x queries: gains + (1 + aversion) losses of z (Dinçer et al., 2016).

    z_ki = (s_ki - e_ki) / sqrt(e_ki), where e_ki = (sum of row k)(sum of column i) / (sum of all) is what a ranker of
    this strength should have on a query of this difficulty: the baseline is all rankers together.

    >>> z_risk([[0.6, 0.5], [0.5, 0.6]], aversion=2.0).round(2)  # each is below what is expected of it once
    array([-0.13, -0.13])
    """
    z = residuals(scores)
    return np.asarray(z.sum(-1) + aversion * np.minimum(z, 0.0).sum(-1))


def geo_risk(scores: npt.ArrayLike, aversion: float = AVERSION) -> Floats:
    """GeoRisk(k) = sqrt(mean_i s_ki * Phi(ZRisk(k) / n)) of each ranker, higher being better (Dinçer et al., 2016).

    `mutirao.risk.geo_risk` is its counterpart for errors.

    Two rankers with the same mean; the second has one very bad query:

    >>> geo_risk([[0.5, 0.5, 0.5], [0.7, 0.7, 0.1]], aversion=5.0).round(3)
    array([0.416, 0.36 ])
    """
    from scipy.special import ndtr  # late: it takes a while

    s = np.asarray(scores, np.float64)
    n = max(s.shape[-1], 1)
    return np.asarray(np.sqrt(s.sum(-1) / n * ndtr(z_risk(s, aversion) / n)))


def compare_rankers(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> RankerComparison:
    """Compare two rankers by their values of a metric on the same queries.

    >>> found = compare_rankers([0.6, 0.5, 0.3], [0.5, 0.5, 0.4])
    >>> found.wins, found.losses, found.ties, round(found.u_risk, 3)
    (1, 1, 1, -0.167)
    """
    d = gains(ours, theirs)
    wins = int((d > 0).sum())
    losses = int((d < 0).sum())
    own, other = geo_risk(np.array([ours, theirs]), aversion).tolist()
    u = u_risk(ours, theirs, aversion)
    t = t_risk(ours, theirs, aversion)
    return RankerComparison(wins, losses, len(d) - wins - losses, u, t, own, other)
