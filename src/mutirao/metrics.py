"""Metrics: classification, regression, ranking over all queries at once, fairness and speed."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.deprecation import former_names

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
    g = y
    if gain == "exponential":
        g = np.exp2(y) - 1
    discount = np.where(rank < k, 1 / np.log2(rank + 2.0), 0.0)
    # Over all orders of documents with one score, each of their ranks has the mean of their gains.
    expected = g
    if ties == "average":
        expected = _mean_of_ties(g, s, q)
    dcg = np.bincount(q, expected * discount)
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
    found = q[y >= threshold]
    rank = rank[y >= threshold]
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


def precision(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    threshold: float = 1,
    empty: float = 0.0,
    ties: Literal["order", "worst"] = "order",
) -> float:
    """Mean over queries of (documents graded `threshold` or above among the first k) / k.

    >>> precision([0.1, 0.9, 0.5], [1, 0, 1], [7, 7, 7], k=2)
    0.5
    """
    _, y, q, rank = _rank(scores, labels, queries, ties)
    if not len(q):
        return float("nan")
    total = np.bincount(q[y >= threshold], minlength=q[-1] + 1)
    found = np.bincount(q[(y >= threshold) & (rank < k)], minlength=len(total))
    return _mean_over_queries(np.asarray(found / k, np.float64), total > 0, empty)


def err(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    highest: int = 4,
    empty: float = 0.0,
    ties: Literal["order", "worst"] = "order",
) -> float:
    """Mean over queries of sum_{r<=k} 1/r R_r prod_{i<r} (1 - R_i), with R = (2^grade - 1) / 2^highest.

    The expected reciprocal rank of the document that a user stops at, who is satisfied by one with probability R
    (Chapelle et al., 2009). `highest` is the highest grade of the scale, whether or not a document has it.

    >>> err([0.1, 0.9, 0.5], [0, 1, 2], [7, 7, 7], k=3, highest=2)
    0.53125
    """
    _, y, q, rank = _rank(scores, labels, queries, ties)
    if not len(q):
        return float("nan")
    if y.min() < 0 or y.max() > highest:
        raise ValueError(f"grades from {y.min():g} to {y.max():g} are not on the scale from 0 to {highest}")
    stops = (np.exp2(y) - 1) / np.exp2(highest)
    # The product over earlier documents is a running sum of logarithms. No grade satisfies for certain: none is -inf.
    logs = np.log1p(-stops)
    before = np.cumsum(logs) - logs
    before -= before[np.flatnonzero(rank == 0)][q]
    share = np.where(rank < k, np.exp(before) * stops / (rank + 1.0), 0.0)
    return _mean_over_queries(np.asarray(np.bincount(q, share), np.float64), np.bincount(q, y) > 0, empty)


def rmse(predictions: npt.ArrayLike, truth: npt.ArrayLike) -> float:
    """sqrt(mean (p - t)^2).

    >>> rmse([3.0, 5.0], [4.0, 4.0])
    1.0
    """
    p = np.asarray(predictions, np.float64)
    t = np.asarray(truth, np.float64)
    return float(np.sqrt(np.mean((p - t) ** 2)))


def softmax(scores: npt.ArrayLike) -> Floats:
    """Probabilities of classes from the outputs of a model, row by row: exp(s_k) / sum_j exp(s_j).

    >>> softmax([[0.0, 0.0], [0.0, 3.0]]).round(2)
    array([[0.5 , 0.5 ],
           [0.05, 0.95]])
    """
    s = np.asarray(scores, np.float64)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        raised = np.exp(s - s.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def confusion(labels: npt.ArrayLike, predicted: npt.ArrayLike, classes: int) -> Ints:
    """Counts with a row a true class and a column a predicted one.

    >>> confusion([0, 0, 1, 1], [0, 1, 1, 1], classes=2)  # one of class 0 was taken for class 1
    array([[1, 1],
           [0, 2]])
    """
    y = np.asarray(labels, np.int64)
    p = np.asarray(predicted, np.int64)
    return np.bincount(y * classes + p, minlength=classes * classes).reshape(classes, classes)


def recalls(counts: npt.ArrayLike) -> Floats:
    """The recall of each true class; NaN for a class without samples.

    >>> recalls([[1, 1], [0, 2]])
    array([0.5, 1. ])
    """
    table = np.asarray(counts, np.float64)
    totals = table.sum(1)
    return np.asarray(np.divide(np.diag(table), totals, out=np.full(len(table), np.nan), where=totals > 0))


def balanced_accuracy(labels: npt.ArrayLike, predicted: npt.ArrayLike, classes: int) -> float:
    """Mean recall over the classes with samples, so that a rare class counts as much as a common one.

    >>> balanced_accuracy([0, 0, 0, 1], [0, 0, 0, 0], 2)
    0.5
    """
    if np.size(labels):
        return float(np.nanmean(recalls(confusion(labels, predicted, classes))))
    return float("nan")


def auc(scores: npt.ArrayLike, positive: npt.ArrayLike) -> float:
    """P(score of a positive > score of a negative) + P(equal) / 2, the area under the ROC curve; NaN without both.

    >>> auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75
    """
    s = np.asarray(scores, np.float64)
    y = np.asarray(positive, bool)
    ones = int(y.sum())
    zeros = int((~y).sum())
    if not ones or not zeros:
        return float("nan")
    _, place, many = np.unique(s, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(many) - (many - 1) / 2)[place]  # equal scores share the mean of their ranks
    return float((ranks[y].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def classification_metrics(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """`accuracy`, `balanced_accuracy`, `auc`, `f1` and `log_loss` of probabilities, a row a sample, a column a class.

    Of two classes `f1` is that of class 1 and `auc` that of its probability. Of more, `auc` is the mean over the
    classes that are there of each against the rest, and `f1` the mean over those that are there or were predicted.
    Undefined metrics are left out: `auc` where there is one class alone, all of them without samples or with a
    probability that is NaN.

    >>> classification_metrics([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]], [0, 0, 1])["f1"]
    0.666...
    """
    p = np.asarray(probabilities, np.float64)
    y = np.asarray(labels, np.int64)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ValueError(f"expected one row of probabilities for each label, got {p.shape} and {y.shape}")
    classes = p.shape[1]
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        raise ValueError(f"labels from {y.min()} to {y.max()} do not number {classes} classes")
    if not len(y) or not np.isfinite(p).all():
        return {}
    found = p.argmax(1)
    present = np.unique(y)
    counts = confusion(y, found, classes)
    used = counts.sum(0) + counts.sum(1)
    f1 = 2 * np.diag(counts) / np.maximum(used, 1)
    figures = {
        "accuracy": float((found == y).mean()),
        "balanced_accuracy": balanced_accuracy(y, found, classes),
        "f1": float(f1[1] if classes == 2 else f1[used > 0].mean()),
        "log_loss": float(-np.log(np.clip(p[np.arange(len(y)), y], np.finfo(np.float64).eps, 1.0)).mean()),
    }
    if len(present) > 1:
        ones = [1] if classes == 2 else present.tolist()
        figures["auc"] = float(np.mean([auc(p[:, k], y == k) for k in ones]))
    return figures


def evaluate_logits(outputs: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """The same metrics from a model's logits; `Trainer(figures=evaluate_logits)` reports them.

    >>> evaluate_logits([[2.0, 0.0], [0.0, 2.0]], [0, 1])["accuracy"]
    1.0
    """
    return classification_metrics(softmax(outputs), labels)


def regression_metrics(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> dict[str, float]:
    """`rmse`, `mae` and `r2` = 1 - sum (p - t)^2 / sum (t - mean t)^2, of one number a sample.

    Undefined metrics are left out: `r2` where all targets are equal, all of them without samples or with a
    prediction that is NaN.

    >>> regression_metrics([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])["r2"]
    0.5
    """
    p = np.asarray(predictions, np.float64).ravel()
    t = np.asarray(targets, np.float64).ravel()
    if p.shape != t.shape:
        raise ValueError(f"expected one prediction for each target, got {p.size} for {t.size}")
    if not len(t) or not np.isfinite(p).all():
        return {}
    figures = {"rmse": rmse(p, t), "mae": float(np.abs(p - t).mean())}
    spread = float(np.square(t - t.mean()).sum())
    if t.min() < t.max() and spread > 0:
        figures["r2"] = 1 - float(np.square(p - t).sum()) / spread
    return figures


def gini(counts: npt.ArrayLike) -> float:
    """Inequality of counts: sum_i sum_j |x_i - x_j| / (2 n^2 mean); 0 all equal, towards 1 one has all.

    >>> gini([10, 10, 10]), gini([0, 0, 3])
    (0.0, 0.666...)
    """
    x = np.sort(np.asarray(counts, np.float64))
    n = len(x)
    total = x.sum()
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
    if squares > 0:
        return float(x.sum() ** 2 / (len(x) * squares))
    return 1.0


def rounds_to(values: Sequence[float], threshold: float) -> int | None:
    """The first round (from 1) with a value of at least `threshold`, or None.

    >>> rounds_to([0.2, 0.6, 0.5], 0.6), rounds_to([0.2], 0.6)
    (2, None)
    """
    return next((t for t, value in enumerate(values, 1) if value >= threshold), None)


Direction = Literal["higher", "lower"]
# Whether higher or lower is better, by the usual names of metrics; a task declares it for its own ones.
BETTER: Mapping[Direction, str] = {
    "higher": "accuracy acc balanced_accuracy auc auroc auprc precision recall sensitivity specificity f1 dice iou r2 "
    "bleu ndcg mrr map hr coverage jain rand caught",
    "lower": "loss log_loss rmse mse mae mape error nll ece brier perplexity wer cer gini false_rejections epsilon",
}
KNOWN: Mapping[str, Direction] = {name: way for way, names in BETTER.items() for name in names.split()}
PREFIX = re.compile("^(train|val|vali|validation|test|global|own|distributed|new|sampled)_")  # loss: val_loss
SUFFIX = re.compile("(_(mean|worst|decile|p10|p50|p90|own|known))+$|(?<=^recall)_.*$")  # accuracy: accuracy_worst


def final_std(curve: Sequence[tuple[int, float]], last: int) -> float:
    """The standard deviation of the values in the last `last` rounds of (round, value); NaN with fewer than two.

    >>> final_std([(10, 0.1), (20, 0.5), (30, 0.75)], last=20)
    0.125
    """
    values = [value for round, value in curve if round > curve[-1][0] - last]
    if len(values) > 1:
        return float(np.std(values))
    return math.nan


def stem(metric: str) -> str:
    """The metric without the data set, clients and cutoff in its name.

    >>> stem("train_val_loss"), stem("accuracy_worst_decile"), stem("ndcg@5")
    ('loss', 'accuracy', 'ndcg')
    """
    name = re.split("[@,]", metric)[0]
    while (shorter := PREFIX.sub("", name)) != name:
        name = shorter
    return SUFFIX.sub("", name)


def direction_of(metric: str, declared: Mapping[str, Any] | None = None) -> Direction | None:
    """Whether higher or lower is better, as declared for the metric or its stem, or as known; None if unknown.

    >>> direction_of("val_loss"), direction_of("regret"), direction_of("regret_worst", {"regret": "lower"})
    ('lower', None, 'lower')
    """
    for table in (declared or {}, KNOWN):
        for name in (metric, stem(metric)):
            direction = table.get(name)
            if direction == "higher" or direction == "lower":
                return direction
    return None


def _rank(
    scores: npt.ArrayLike, labels: npt.ArrayLike, queries: npt.ArrayLike, ties: Ties
) -> tuple[Floats, Floats, npt.NDArray[np.intp], Ints]:
    """Scores, labels and numbers of queries, by query and falling score, and the rank (from 0) within the query."""
    s = np.asarray(scores, np.float64)
    y = np.asarray(labels, np.float64)
    q = np.asarray(queries)
    if not s.shape == y.shape == q.shape or s.ndim != 1:
        raise ValueError(f"scores {s.shape}, labels {y.shape} and queries {q.shape} must be vectors of one length")
    if np.isnan(s).any():
        raise ValueError("scores contain NaN")
    # Queries that are sorted already, as in most files, need not be numbered by another sort.
    if not np.all(q[1:] >= q[:-1]):
        q = np.unique(q, return_inverse=True)[1]
    # lexsort takes the last key first, and keeps the order given where all keys are equal.
    keys: tuple[npt.NDArray[Any], ...] = (-s, q)
    if ties == "worst":
        keys = (y, -s, q)
    order = np.lexsort(keys)
    mine = q[order]
    position = np.arange(len(q))
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
        if answerable.any():
            return float(values[answerable].mean())
        return float("nan")
    return float(np.where(answerable, values, empty).mean())


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "classification_figures": "classification_metrics",
            "judge_classes": "evaluate_logits",
            "regression_figures": "regression_metrics",
            "wobble_in": "final_std",
        },
    )
