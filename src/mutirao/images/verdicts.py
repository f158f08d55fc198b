"""The verdict on a trained model: a confusion matrix to look at, and all figures with the curve behind them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.core.files import write_whole
from mutirao.images.diagnosis import auc_interval, confusion, judge

Floats = npt.NDArray[np.float64]


def write_verdict(
    path: Path,
    probabilities: Floats,
    labels: npt.NDArray[np.int64],
    slides: npt.NDArray[np.str_],
    classes: Sequence[str],
    abnormal: npt.NDArray[np.bool_],
    rng: np.random.Generator,
) -> None:
    """Write all figures of the last model on the test set; the AUC with an interval over slides."""
    found = {
        "pictures": len(labels),
        "slides": len(set(slides.tolist()) - {""}),
        "classes": list(classes),
        "abnormal": [c for c, a in zip(classes, abnormal, strict=True) if a],
        "confusion": confusion(labels, probabilities.argmax(1), len(classes)).tolist(),
        **judge(probabilities, labels, classes, abnormal),
    }
    positive = abnormal[labels]
    if positive.any() and not positive.all():
        score = probabilities[:, abnormal].sum(1)
        groups = np.array([s or f"picture {i}" for i, s in enumerate(slides.tolist())])
        found["auc_interval"] = auc_interval(score, positive, groups, rng)
        thresholds = np.unique(score)[:: max(1, len(np.unique(score)) // 200)]
        found["roc"] = [
            [round(float((score[~positive] >= t).mean()), 4), round(float((score[positive] >= t).mean()), 4)]
            for t in thresholds
        ]
    write_whole(path, json.dumps(found, indent=2) + "\n")


def write_confusion(path: Path, probabilities: Floats, labels: npt.NDArray[np.int64], classes: Sequence[str]) -> None:
    """Draw what was taken for what: a row a true class, its shares as shades, its counts as numbers."""
    from matplotlib.figure import Figure

    counts = confusion(labels, probabilities.argmax(1), len(classes))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.6 + 0.62 * len(classes)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="GnBu", vmin=0, vmax=1)
    for i, row in enumerate(counts):
        for j, n in enumerate(row):
            if n:
                axes.text(j, i, str(n), ha="center", va="center", color="white" if shares[i, j] > 0.6 else "#333333")
    names = [c.replace("_", " ") for c in classes]
    axes.set_xticks(range(len(classes)), names, rotation=40, ha="right")
    axes.set_yticks(range(len(classes)), names)
    axes.set_xlabel("found by the model")
    axes.set_ylabel("true class")
    axes.set_title("global test set", fontsize=11)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, dpi=100)
