"""Metrics of a screening model: sensitivity, AUC, calibration, and their intervals over slides."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.io import write_whole
from mutirao.metrics import auc, balanced_accuracy, confusion, recalls, softmax

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The metrics that a hospital reports of a model.
REPORTED_METRICS = ("balanced_accuracy", "accuracy", "loss", "ece", "auc", "sensitivity@95")


def sensitivity_at(scores: npt.ArrayLike, positive: npt.ArrayLike, specificity: float = 0.95) -> float:
    """The largest share of positives above a threshold that at least `specificity` of the negatives stay below.

    >>> scores, positive = [0.1, 0.2, 0.3, 0.7, 0.6, 0.9], [0, 0, 0, 0, 1, 1]
    >>> sensitivity_at(scores, positive, specificity=0.95), sensitivity_at(scores, positive, specificity=0.75)
    (0.5, 1.0)
    """
    s = np.asarray(scores, np.float64)
    y = np.asarray(positive, bool)
    if y.all() or not y.any():
        return float("nan")
    negatives = np.sort(s[~y])
    # The negatives that may be called positive. The margin is for rounding: (1 - 0.9) * 10 is 0.9999999999999998.
    allowed = int(np.floor((1 - specificity) * len(negatives) + 1e-9))
    threshold = -np.inf
    if allowed < len(negatives):
        threshold = negatives[len(negatives) - 1 - allowed]
    return float((s[y] > threshold).mean())


def ece(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 15) -> float:
    """Expected calibration error: sum over bins of confidence of n_b / n |accuracy_b - confidence_b|.

    Guo et al., "On Calibration of Modern Neural Networks", ICML 2017: the confidence is the largest probability.

    A model that predicts 0.9 and is right nine times out of ten is calibrated; one that is right half the time is not:

    >>> predicted = np.tile([0.9, 0.1], (10, 1))
    >>> round(ece(predicted, [0] * 9 + [1]), 2), round(ece(predicted, [0] * 5 + [1] * 5), 2)
    (0.0, 0.4)
    """
    p = np.asarray(probabilities, np.float64)
    y = np.asarray(labels)
    if not len(y):
        return float("nan")
    confidence = p.max(1)
    correct = p.argmax(1) == y
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of, correct - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(y))


def auc_interval(
    scores: npt.ArrayLike,
    positive: npt.ArrayLike,
    groups: npt.ArrayLike,
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 1000,
) -> tuple[float, float]:
    """Bootstrap interval of the AUC over slides."""
    s = np.asarray(scores, np.float64)
    y = np.asarray(positive, bool)
    return bootstrap_interval(groups, lambda rows: auc(s[rows], y[rows]), rng, level, draws)


def bootstrap_interval(
    groups: npt.ArrayLike,
    metric: Callable[[npt.NDArray[np.intp]], float],
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 1000,
) -> tuple[float, float]:
    """Cluster bootstrap interval of a metric, resampling whole groups: cells of one slide are not independent."""
    _, key = np.unique(np.asarray(groups), return_inverse=True)
    members = [np.flatnonzero(key == k) for k in range(int(key.max()) + 1)]
    values = []
    for _ in range(draws):
        sampled = rng.integers(0, len(members), len(members))
        values.append(metric(np.concatenate([members[k] for k in sampled])))
    low, high = np.nanpercentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def abnormal_classes(classes: Sequence[str], normal: str) -> npt.NDArray[np.bool_]:
    """Which classes are abnormal: those that match no pattern in `normal` ("normal*, NILM"), whatever the case.

    >>> abnormal_classes(["normal_columnar", "light_dysplastic"], "normal*").tolist()
    [False, True]
    """
    patterns = [p.strip().lower() for p in normal.split(",") if p.strip()]

    def is_normal(name: str) -> bool:
        return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)

    return np.array([not is_normal(name) for name in classes])


def screening_metrics(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str], abnormal: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """All metrics of a test set; those of normal against abnormal only if there are both kinds of classes.

    >>> predicted = [[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.8, 0.2]]
    >>> found = screening_metrics(predicted, [0, 1, 1, 0], ["NILM", "HSIL"], np.array([False, True]))
    >>> found["balanced_accuracy"], found["auc"]
    (1.0, 1.0)
    """
    p = np.asarray(probabilities, np.float64)
    y = np.asarray(labels, np.int64)
    predicted = p.argmax(1)
    chosen = np.clip(p[np.arange(len(y)), y], 1e-12, 1.0)
    metrics = {
        "loss": float(-np.log(chosen).mean()),
        "accuracy": float((predicted == y).mean()),
        "balanced_accuracy": balanced_accuracy(y, predicted, len(classes)),
        "ece": ece(p, y),
    }
    if abnormal.any() and not abnormal.all():
        score = p[:, abnormal].sum(1)
        positive = abnormal[y]
        metrics["auc"] = auc(score, positive)
        metrics["sensitivity@95"] = sensitivity_at(score, positive, 0.95)
    for name, recall in zip(classes, recalls(confusion(y, predicted, len(classes))), strict=True):
        if not np.isnan(recall):  # a class without samples has none
            metrics[f"recall_{name}"] = float(recall)
    return metrics


def reported_metrics(
    classes: Sequence[str], abnormal: npt.NDArray[np.bool_], outputs: npt.ArrayLike, labels: npt.ArrayLike
) -> dict[str, float]:
    """The metrics that a hospital reports of a model's logits: no recalls, and only finite values."""
    p = softmax(outputs)
    if not np.isfinite(p).all():
        return {}
    found = screening_metrics(p, labels, classes, abnormal)
    return {name: found[name] for name in REPORTED_METRICS if np.isfinite(found.get(name, np.nan))}


@dataclass(frozen=True, eq=False)
class Confusion:
    """Confusion matrix: `counts` has a row for each true class and a column for each predicted one."""

    classes: tuple[str, ...]
    counts: Ints

    @classmethod
    def of(cls, labels: Ints, probabilities: Floats, classes: Sequence[str]) -> "Confusion":
        """From the true classes and the predicted probabilities."""
        return cls(tuple(classes), confusion(labels, probabilities.argmax(1), len(classes)))


def write_verdict(
    path: Path,
    probabilities: Floats,
    labels: Ints,
    slides: npt.NDArray[np.str_],
    classes: Sequence[str],
    abnormal: npt.NDArray[np.bool_],
    rng: np.random.Generator,
    unit: str = "pictures",
    **more: Any,
) -> None:
    """Write the last model's test metrics, and `more`; AUC and accuracy have intervals over slides.

    `unit` is what a row is: pictures, or slides.
    """
    found = {
        **more,
        "judged": unit,
        unit: len(labels),
        "slides": len(set(slides.tolist()) - {""}),
        "classes": list(classes),
        "abnormal": [c for c, a in zip(classes, abnormal, strict=True) if a],
        "confusion": confusion(labels, probabilities.argmax(1), len(classes)).tolist(),
        **screening_metrics(probabilities, labels, classes, abnormal),
    }
    groups = np.array([s or f"picture {i}" for i, s in enumerate(slides.tolist())])
    correct = probabilities.argmax(1) == labels
    found["accuracy_interval"] = bootstrap_interval(groups, lambda rows: float(correct[rows].mean()), rng)
    positive = abnormal[labels]
    if positive.any() and not positive.all():
        score = probabilities[:, abnormal].sum(1)
        found["auc_interval"] = auc_interval(score, positive, groups, rng)
        distinct = np.unique(score)
        curve = []
        for threshold in distinct[:: max(1, len(distinct) // 200)]:
            false_positives = float((score[~positive] >= threshold).mean())
            true_positives = float((score[positive] >= threshold).mean())
            curve.append([round(false_positives, 4), round(true_positives, 4)])
        found["roc"] = curve
    write_whole(path, json.dumps(found, indent=2) + "\n")
