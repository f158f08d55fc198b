"""The picture of a confusion matrix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mutirao.report.plot_style import blank, save


class ConfusionMatrix(Protocol):
    """Counts by true class (rows) and class found (columns), and the names of the classes."""

    @property
    def counts(self) -> Any:
        """How many of a true class (row) were taken for a class (column)."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""


def draw_confusion(found: ConfusionMatrix, path: Path) -> None:
    """Draw what was taken for what: a row a true class, its shares as shades, its counts as numbers."""
    counts, classes = found.counts, found.classes
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.6 + 0.62 * len(classes)
    figure, axes = blank(side + 0.6, side)
    axes.imshow(shares, cmap="GnBu", vmin=0, vmax=1)
    for i, row in enumerate(counts):
        for j, n in enumerate(row):
            if n:
                axes.text(j, i, str(n), ha="center", va="center", color="white" if shares[i, j] > 0.6 else "#333333")
    names = [c.replace("_", " ") for c in classes]
    axes.set_xticks(range(len(classes)), names, rotation=40, ha="right")
    axes.set_yticks(range(len(classes)), names)
    axes.set(xlabel="found by the model", ylabel="true class")
    axes.set_title("global test set", fontsize=11)
    axes.spines[:].set_visible(False)
    save(figure, path)
