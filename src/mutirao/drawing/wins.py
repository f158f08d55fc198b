"""Queries that win and lose against a baseline: differences in order, the field's picture of what a mean hides."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.drawing.looks import INK, blank, save, tidy

WON, LOST = "#4477AA", "#CC6677"


def draw_wins(differences: Mapping[str, npt.NDArray[np.float64]], label: str, path: Path | str) -> None:
    """Draw one panel a method: a bar a query, the greatest gain first, with how many were won and lost."""
    across = min(3, len(differences))
    down = -(-len(differences) // across)
    figure, grid = blank(3.3 * across, 2.7 * down + 0.3, down, across, squeeze=False, sharey=True)
    for axes, (method, values) in zip(grid.flat, differences.items(), strict=False):
        ordered = np.sort(values)[::-1]
        place = np.arange(len(ordered))
        axes.fill_between(place, np.maximum(ordered, 0), step="mid", color=WON, linewidth=0)
        axes.fill_between(place, np.minimum(ordered, 0), step="mid", color=LOST, linewidth=0)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_title(f"{method}\n{(values > 0).sum()} won, {(values < 0).sum()} lost", fontsize=8)
        tidy(axes, grid="y")
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    for axes in grid.flat[: len(differences)]:
        axes.set_xlabel("queries, the greatest gain first")
    for axes in grid.flat[len(differences) :]:
        axes.remove()
    save(figure, path)
