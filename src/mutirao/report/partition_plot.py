"""A partition as papers draw it: a bubble for each client and class, as large as the samples it stands for."""

from pathlib import Path

import numpy as np

from mutirao.partitioning import PartitionSummary
from mutirao.report.plot_style import BRIGHT, INK, blank, every, save, tidy
from mutirao.report.plots import write_counts

MOST = 60  # more clients than this are shown by a sample: smaller bubbles could not be told apart
INCH = 0.3  # a client
DOTS = 72.0  # points an inch, in which sizes of bubbles are given


def draw_bubbles(summary: PartitionSummary, path: Path | str) -> None:
    """Draw a bubble for each client (across) and class (down), its area by its number of samples."""
    total, classes = summary.counts.shape
    shown = np.arange(0, total, every(total, MOST))
    counts = summary.counts[shown]
    step_down = every(classes, 40)
    tall = INCH * min(classes, 40)
    figure, axes = blank(max(4.5, 1.6 + INCH * len(shown)), 1.3 + max(1.2, tall))
    place, kind = np.nonzero(counts)
    many = counts[place, kind]
    widest = (0.95 * DOTS * min(INCH, tall / classes)) ** 2  # the square on which the largest bubble stands
    axes.scatter(place, kind, s=widest * many / max(1, counts.max()), color=BRIGHT[0], alpha=0.8, linewidths=0)
    few = "" if len(shown) == total else f" ({len(shown)} of {total:,} shown)"
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylim(classes - 0.4, -0.6)
    step = every(len(shown), 30)
    axes.set_xticks(np.arange(len(shown))[::step], [f"{k}" for k in shown[::step]])
    axes.set_yticks(np.arange(classes)[::step_down], [str(c) for c in summary.classes[::step_down]])
    axes.set(xlabel="client" + few, ylabel="class")
    figures = summary.figures()
    axes.set_title(f"largest bubble {int(counts.max()):,} samples, EMD {figures['emd']:.2f}", color=INK)
    tidy(axes, grid="both")
    axes.tick_params(axis="both", length=0)
    save(figure, path)
    write_counts(summary, path)
