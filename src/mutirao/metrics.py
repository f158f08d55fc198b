"""What a model is judged by: ranking metrics over all queries at once, and figures of fairness and speed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Gain = Literal["exponential", "linear"]
Ties = Literal["order", "average", "worst"]


def ndcg(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    gain: Gain = "exponential",
    empty: float = 0.0,
    ties: Ties = "order",
) -> float:
    """Mean over queries of DCG@k / ideal DCG@k, with DCG@k = sum_{r<=k} g_r / log2(r + 1).

    The gain is 2^grade - 1 or the grade. A query without relevant documents counts `empty` (NaN: it is left out).
    Equal scores: `order` keeps the order given, `average` takes the mean over all orders (McSherry and Najork,
    2008), `worst` puts the less relevant first.

    >>> ndcg([0.1, 0.9, 0.5], [0, 1, 2], [7, 7, 7], k=3)
    0.7967...
    """
    s, y, q, rank = _rank(scores, labels, queries, ties)
    if not len(q):
        return float("nan")
    g = np.exp2(y) - 1 if gain == "exponential" else y
    discount = np.where(rank < k, 1 / np.log2(rank + 2.0), 0.0)
    dcg = np.bincount(q, (_mean_of_ties(g, s, q) if ties == "average" else g) * discount)
    ideal = np.bincount(q, g[np.lexsort((-g, q))] * discount)
    return _mean_over_queries(dcg / np.where(ideal > 0, ideal, 1.0), ideal > 0, empty)


def mrr(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    threshold: float = 1,
    empty: float = 0.0,
    ties: Literal["order", "worst"] = "order",
) -> float:
    """Mean over queries of 1 / rank of the first document graded `threshold` or above, 0 if it is below rank k.

    >>> mrr([0.1, 0.9, 0.5], [0, 0, 2], [7, 7, 7], k=3)
    0.5
    """
    _, y, q, rank = _rank(scores, labels, queries, ties)
    if not len(q):
        return float("nan")
    found, rank = q[y >= threshold], rank[y >= threshold]
    first = np.zeros(q[-1] + 1)
    np.maximum.at(first, found, np.where(rank < k, 1 / (rank + 1.0), 0.0))
    return _mean_over_queries(first, np.bincount(found, minlength=len(first)) > 0, empty)


def mean_average_precision(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    threshold: float = 1,
    empty: float = 0.0,
    ties: Literal["order", "worst"] = "order",
) -> float:
    """Mean over queries of (sum of the precision at each relevant document up to rank k) / relevant documents.

    >>> mean_average_precision([0.1, 0.9, 0.5], [1, 0, 1], [7, 7, 7], k=3)
    0.5833...
    """
    _, y, q, rank = _rank(scores, labels, queries, ties)
    if not len(q):
        return float("nan")
    relevant = y >= threshold
    total = np.bincount(q[relevant], minlength=q[-1] + 1)
    found = np.cumsum(relevant) - (np.cumsum(total) - total)[q]  # relevant ones of this query up to here
    use = relevant & (rank < k)
    precision = np.bincount(q[use], found[use] / (rank[use] + 1.0), len(total))
    return _mean_over_queries(precision / np.maximum(total, 1), total > 0, empty)


def rmse(predictions: npt.ArrayLike, truth: npt.ArrayLike) -> float:
    """sqrt(mean (p - t)^2)."""
    p, t = np.asarray(predictions, np.float64), np.asarray(truth, np.float64)
    return float(np.sqrt(np.mean((p - t) ** 2)))


def gini(counts: npt.ArrayLike) -> float:
    """Inequality of counts: sum_i sum_j |x_i - x_j| / (2 n^2 mean); 0 all equal, towards 1 one has all.

    >>> gini([10, 10, 10]), gini([0, 0, 3])
    (0.0, 0.666...)
    """
    x = np.sort(np.asarray(counts, np.float64))
    n, total = len(x), x.sum()
    if not n or total <= 0:
        return 0.0
    return float(max(0.0, np.sum((2 * np.arange(1, n + 1) - n - 1) * x) / (n * total)))


def jain(counts: npt.ArrayLike) -> float:
    """Jain's index of fairness, (sum x)^2 / (n sum x^2): 1 all equal, 1/n one has all (Jain et al., 1984).

    >>> jain([10, 10, 10]), jain([0, 0, 3])
    (1.0, 0.333...)
    """
    x = np.asarray(counts, np.float64)
    squares = float(np.sum(x**2))
    return float(x.sum() ** 2 / (len(x) * squares)) if squares > 0 else 1.0


def rounds_to(values: Sequence[float], threshold: float) -> int | None:
    """The first round (from 1) whose value is at least `threshold`, or None.

    >>> rounds_to([0.2, 0.6, 0.5], 0.6), rounds_to([0.2], 0.6)
    (2, None)
    """
    return next((t for t, value in enumerate(values, 1) if value >= threshold), None)


Direction = Literal["higher", "lower"]
# Which way is better, of metrics by the names they commonly have; a task says it of its own ones.
BETTER: Mapping[Direction, str] = {
    "higher": "accuracy acc balanced_accuracy auc auroc auprc precision recall sensitivity specificity f1 dice iou r2 "
    "bleu ndcg mrr map hr jain rand caught",
    "lower": "loss rmse mse mae mape error nll ece brier perplexity wer cer gini false_rejections epsilon",
}
KNOWN: Mapping[str, Direction] = {name: way for way, names in BETTER.items() for name in names.split()}
WHERE = re.compile("^(train|val|vali|validation|test|global|own|distributed)_")  # loss: val_loss, train_val_loss
WHOSE = re.compile("(_(mean|worst|decile|p10|p50|p90|own|known))+$|(?<=^recall)_.*$")  # accuracy: accuracy_worst


def stem(metric: str) -> str:
    """The metric without where, of whom and at which cut it was measured.

    >>> stem("train_val_loss"), stem("accuracy_worst_decile"), stem("ndcg@5")
    ('loss', 'accuracy', 'ndcg')
    """
    name = re.split("[@,]", metric)[0]
    while (shorter := WHERE.sub("", name)) != name:
        name = shorter
    return WHOSE.sub("", name)


def direction_of(metric: str, told: Mapping[str, Any] | None = None) -> Direction | None:
    """Which way the metric is better, as was told of it or of its stem, or else as is known; None: nobody knows.

    >>> direction_of("val_loss"), direction_of("regret"), direction_of("regret_worst", {"regret": "lower"})
    ('lower', None, 'lower')
    """
    ways = [table.get(name) for table in (told or {}, KNOWN) for name in (metric, stem(metric))]
    return next((way for way in ways if way in ("higher", "lower")), None)


def _rank(
    scores: npt.ArrayLike, labels: npt.ArrayLike, queries: npt.ArrayLike, ties: Ties
) -> tuple[Floats, Floats, npt.NDArray[np.intp], Ints]:
    """Scores, labels and numbers of queries, by query and falling score, and the rank (from 0) within the query."""
    s, y, q = np.asarray(scores, np.float64), np.asarray(labels, np.float64), np.asarray(queries)
    if not s.shape == y.shape == q.shape or s.ndim != 1:
        raise ValueError(f"scores {s.shape}, labels {y.shape} and queries {q.shape} must be vectors of one length")
    if np.isnan(s).any():
        raise ValueError("scores hold NaN")
    if not np.all(q[1:] >= q[:-1]):  # if they are sorted, numbering the queries needs no sort
        q = np.unique(q, return_inverse=True)[1]
    order = np.lexsort((y, -s, q) if ties == "worst" else (-s, q))
    mine, position = q[order], np.arange(len(q))
    first = np.append([True], mine[1:] != mine[:-1])[: len(q)]
    rank = position - np.maximum.accumulate(np.where(first, position, 0))
    return s[order], y[order], np.cumsum(first) - 1, rank


def _mean_of_ties(gains: Floats, scores: Floats, queries: npt.NDArray[np.intp]) -> Floats:
    """Each gain replaced by the mean over the documents of its query with the same score."""
    new = np.concatenate([[True], (scores[1:] != scores[:-1]) | (queries[1:] != queries[:-1])])
    group = np.cumsum(new) - 1
    return np.asarray((np.bincount(group, gains) / np.bincount(group))[group])


def _mean_over_queries(values: Floats, answerable: npt.NDArray[np.bool_], empty: float) -> float:
    if np.isnan(empty):
        return float(values[answerable].mean()) if answerable.any() else float("nan")
    return float(np.where(answerable, values, empty).mean())
