"""What a screening model is judged by: not how often it is right, but what it misses and how sure it is."""

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

REPORTED_METRICS = (
    "balanced_accuracy",
    "accuracy",
    "loss",
    "ece",
    "auc",
    "sensitivity@95",
)  # by a hospital, of a model


def sensitivity_at(scores: npt.ArrayLike, positive: npt.ArrayLike, specificity: float = 0.95) -> float:
    """The largest share of positives above a threshold that at least `specificity` of the negatives stay below.

    >>> scores, positive = [0.1, 0.2, 0.3, 0.7, 0.6, 0.9], [0, 0, 0, 0, 1, 1]
    >>> sensitivity_at(scores, positive, specificity=0.95), sensitivity_at(scores, positive, specificity=0.75)
    (0.5, 1.0)
    """
    s, y = np.asarray(scores, np.float64), np.asarray(positive, bool)
    if y.all() or not y.any():
        return float("nan")
    negatives = np.sort(s[~y])
    allowed = int(np.floor((1 - specificity) * len(negatives) + 1e-9))  # negatives that may be called positive
    threshold = negatives[len(negatives) - 1 - allowed] if allowed < len(negatives) else -np.inf
    return float((s[y] > threshold).mean())


def ece(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 15) -> float:
    """Expected calibration error: sum over bins of confidence of n_b / n |accuracy_b - confidence_b|.

    Guo et al., "On Calibration of Modern Neural Networks", ICML 2017: the confidence is the largest probability.

    A model that says 0.9 and is right nine times out of ten is calibrated; one that is right half of the time is not:

    >>> said = np.tile([0.9, 0.1], (10, 1))
    >>> round(ece(said, [0] * 9 + [1]), 2), round(ece(said, [0] * 5 + [1] * 5), 2)
    (0.0, 0.4)
    """
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels)
    if not len(y):
        return float("nan")
    sure, right = p.max(1), p.argmax(1) == y
    place = np.minimum((sure * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(place, right - sure, minlength=bins)
    return float(np.abs(gaps).sum() / len(y))


def auc_interval(
    scores: npt.ArrayLike,
    positive: npt.ArrayLike,
    groups: npt.ArrayLike,
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 1000,
) -> tuple[float, float]:
    """An interval of the AUC over slides."""
    s, y = np.asarray(scores, np.float64), np.asarray(positive, bool)
    return interval_over(groups, lambda rows: auc(s[rows], y[rows]), rng, level, draws)


def interval_over(
    groups: npt.ArrayLike,
    figure: Callable[[npt.NDArray[np.intp]], float],
    rng: np.random.Generator,
    level: float = 0.95,
    draws: int = 1000,
) -> tuple[float, float]:
    """An interval of a figure by drawing whole groups (slides) with replacement: cells of one slide are no news."""
    _, key = np.unique(np.asarray(groups), return_inverse=True)
    members = [np.flatnonzero(key == k) for k in range(int(key.max()) + 1)]
    drawn = (rng.integers(0, len(members), len(members)) for _ in range(draws))
    rows = (np.concatenate([members[k] for k in some]) for some in drawn)
    values = [figure(some) for some in rows]
    low, high = np.nanpercentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def abnormal_classes(classes: Sequence[str], normal: str) -> npt.NDArray[np.bool_]:
    """Which classes are abnormal: all that no pattern in `normal` ("normal*, NILM") fits; upper and lower case alike.

    >>> abnormal_classes(["normal_columnar", "light_dysplastic"], "normal*").tolist()
    [False, True]
    """
    patterns = [p.strip().lower() for p in normal.split(",") if p.strip()]
    return np.array([not any(fnmatchcase(c.lower(), p) for p in patterns) for c in classes])


def diagnose(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str], abnormal: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """All figures of a test set; those of normal against abnormal only if there are both kinds of classes.

    >>> said = [[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.8, 0.2]]
    >>> figures = diagnose(said, [0, 1, 1, 0], ["NILM", "HSIL"], np.array([False, True]))
    >>> figures["balanced_accuracy"], figures["auc"]
    (1.0, 1.0)
    """
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels, np.int64)
    found = p.argmax(1)
    chosen = np.clip(p[np.arange(len(y)), y], 1e-12, 1.0)
    figures = {
        "loss": float(-np.log(chosen).mean()),
        "accuracy": float((found == y).mean()),
        "balanced_accuracy": balanced_accuracy(y, found, len(classes)),
        "ece": ece(p, y),
    }
    if abnormal.any() and not abnormal.all():
        score, positive = p[:, abnormal].sum(1), abnormal[y]
        figures["auc"] = auc(score, positive)
        figures["sensitivity@95"] = sensitivity_at(score, positive, 0.95)
    per_class = recalls(confusion(y, found, len(classes)))
    return figures | {f"recall_{name}": float(r) for name, r in zip(classes, per_class, strict=True) if r == r}


def diagnose_outputs(
    classes: Sequence[str], abnormal: npt.NDArray[np.bool_], outputs: npt.ArrayLike, labels: npt.ArrayLike
) -> dict[str, float]:
    """What a hospital tells of a model's outputs: the same figures, but for recalls, and what it cannot say."""
    p = softmax(outputs)
    found = diagnose(p, labels, classes, abnormal) if np.isfinite(p).all() else {}
    return {name: found[name] for name in REPORTED_METRICS if np.isfinite(found.get(name, np.nan))}


@dataclass(frozen=True, eq=False)
class Confusion:
    """What was taken for what: `counts` has a row a true class and a column a predicted one."""

    classes: tuple[str, ...]
    counts: Ints

    @classmethod
    def of(cls, labels: Ints, probabilities: Floats, classes: Sequence[str]) -> "Confusion":
        """From the true classes and what the model finds likely."""
        return cls(tuple(classes), confusion(labels, probabilities.argmax(1), len(classes)))


def write_verdict(
    path: Path,
    probabilities: Floats,
    labels: Ints,
    slides: npt.NDArray[np.str_],
    classes: Sequence[str],
    abnormal: npt.NDArray[np.bool_],
    rng: np.random.Generator,
    judged: str = "pictures",
    **more: Any,
) -> None:
    """Write all figures of the last model on the test set, and `more`; AUC and accuracy with intervals over slides.

    `judged` says what a row is: pictures, or slides.
    """
    found = {
        **more,
        "judged": judged,
        judged: len(labels),
        "slides": len(set(slides.tolist()) - {""}),
        "classes": list(classes),
        "abnormal": [c for c, a in zip(classes, abnormal, strict=True) if a],
        "confusion": confusion(labels, probabilities.argmax(1), len(classes)).tolist(),
        **diagnose(probabilities, labels, classes, abnormal),
    }
    groups = np.array([s or f"picture {i}" for i, s in enumerate(slides.tolist())])
    right = probabilities.argmax(1) == labels
    found["accuracy_interval"] = interval_over(groups, lambda rows: float(right[rows].mean()), rng)
    positive = abnormal[labels]
    if positive.any() and not positive.all():
        score = probabilities[:, abnormal].sum(1)
        found["auc_interval"] = auc_interval(score, positive, groups, rng)
        thresholds = np.unique(score)[:: max(1, len(np.unique(score)) // 200)]
        found["roc"] = [
            [round(float((score[~positive] >= t).mean()), 4), round(float((score[positive] >= t).mean()), 4)]
            for t in thresholds
        ]
    write_whole(path, json.dumps(found, indent=2) + "\n")
