"""The verdict on a trained model: what it takes for what, and all figures with the curve behind them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.core.files import write_whole
from mutirao.images.diagnosis import auc_interval, confusion, judge

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Confusion:
    """What was taken for what: `counts` has a row a true class and a column a predicted one."""

    classes: tuple[str, ...]
    counts: Labels

    @classmethod
    def of(cls, labels: Labels, probabilities: Floats, classes: Sequence[str]) -> "Confusion":
        """From the true classes and what the model finds likely."""
        return cls(tuple(classes), confusion(labels, probabilities.argmax(1), len(classes)))


def write_verdict(
    path: Path,
    probabilities: Floats,
    labels: Labels,
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
