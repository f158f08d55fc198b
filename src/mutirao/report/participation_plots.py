"""Pictures of who took part: one run in detail, and policies side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.report.plot_style import BRIGHT, INK, MUTED, PALE, add_legend, blank, count_on, every, save, tidy
from mutirao.report.plots import panels_of
from mutirao.runs.participation import Participation, lorenz, participation_in
from mutirao.runs.reader import Record
from mutirao.studies.targets import best_so_far, mean_best

MOST_DOTS = 10_000  # of a Lorenz curve: of more clients, every so manieth
MOST_ROWS = 400  # clients in the heat map; of more, every so manieth is shown


def draw_participation(found: Participation, path: Path | str) -> None:
    """Draw who was selected when, how often each client was, and the Lorenz curve."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    clients = len(found.clients)
    rounds = found.rounds
    shown = np.arange(0, clients, every(clients, MOST_ROWS))
    figure = Figure(figsize=(9.6, 4.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
    heat, bars, curve = (figure.add_subplot(g) for g in (grid[:, 0], grid[0, 1], grid[1, 1]))
    extent = (0.5, rounds + 0.5, len(shown) - 0.5, -0.5)
    colours = ListedColormap([PALE, BRIGHT[0]])
    cells = found.among(shown)
    heat.imshow(cells, aspect="auto", interpolation="nearest", cmap=colours, extent=extent, vmin=0, vmax=1)
    few = "" if len(shown) == clients else f" ({len(shown)} of {clients:,} shown)"
    step = every(len(shown), 12)
    heat.set_yticks(np.arange(len(shown))[::step], [str(shown[i]) for i in range(0, len(shown), step)])
    heat.set(title="who was selected when", xlabel="round", ylabel="client" + few)
    values, counts = np.unique(found.times, return_counts=True)
    bars.bar(values, counts, width=0.9, color=BRIGHT[0])
    bars.set(title="how often", xlabel="times selected", ylabel="clients")
    count_on(bars.xaxis, bars.yaxis)
    x, y = (part[:: every(clients, MOST_DOTS)] for part in lorenz(found.times))
    curve.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    curve.fill_between(x, y, x, color=BRIGHT[0], alpha=0.15, linewidth=0)
    curve.plot(x, y, color=BRIGHT[0], linewidth=1.8)
    curve.set(title=f"Lorenz curve, Gini {found.gini:.3f}", xlabel="share of clients", ylabel="share of selections")
    for axes, lines in ((heat, False), (bars, True), (curve, True)):
        tidy(axes, grid="both")
        axes.grid(lines)
    save(figure, path)


def draw_best(methods: Mapping[str, Sequence[Record]], metric: str, targets: Sequence[float], path: Path | str) -> None:
    """Draw the best value so far by round, averaged over runs, with the span of the runs as a band."""
    figure, panels = panels_of(len(methods))
    for (name, runs), axes, colour in zip(methods.items(), panels, _colours(len(methods)), strict=True):
        mean = mean_best(runs, metric)
        each = np.array([best_so_far(run, metric)[: len(mean)] for run in runs])
        rounds = np.arange(1, len(mean) + 1)
        axes.fill_between(rounds, each.min(0), each.max(0), color=colour, alpha=0.12, linewidth=0)
        axes.plot(rounds, mean, color=colour, linewidth=1.8, label=f"{name}")
    for axes in figure.axes:
        for target in targets:
            axes.axhline(target, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            place: Any = {"xycoords": ("axes fraction", "data"), "va": "bottom", "ha": "right"}
            axes.annotate(f"{target:g}", (1, target), color=INK, **place)
        axes.set(ylabel=f"best {metric} so far")
        tidy(axes, grid="both")
        add_legend(axes, loc="lower right")
    figure.axes[-1].set_xlabel("round")
    save(figure, path)


def draw_shares(methods: Mapping[str, Sequence[Record]], path: Path | str) -> None:
    """Draw how often clients were selected by each policy, all runs together, and the Lorenz curves."""
    figure, (many, curves) = blank(9.6, 4.0, 1, 2, width_ratios=(1.5, 1))
    curves.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    for i, ((name, runs), colour) in enumerate(zip(methods.items(), _colours(len(methods)), strict=True)):
        found = [participation_in(run) for run in runs]
        times = np.concatenate([each.times for each in found])
        values, counts = np.unique(times, return_counts=True)
        width = 0.8 * counts / counts.max()
        many.barh(values, width, left=i - width / 2, height=0.85, color=colour)
        x, y = (part[:: every(len(times), MOST_DOTS)] for part in lorenz(times))
        gini = np.mean([each.gini for each in found])
        curves.plot(x, y, color=colour, linewidth=1.8, label=f"{name}, Gini {gini:.3f}")
    many.set_xticks(range(len(methods)), list(methods), rotation=20 if len(methods) > 4 else 0)
    many.set(title="how often clients were selected", ylabel="times selected")
    count_on(many.yaxis)
    curves.set(title="Lorenz curves", xlabel="share of clients", ylabel="share of selections")
    for axes in (many, curves):
        tidy(axes, grid="both")
    add_legend(curves, 8, loc="upper left")
    save(figure, path)


def _colours(count: int) -> list[str]:
    palette = BRIGHT if count <= len(BRIGHT) else MUTED
    return [palette[i % len(palette)] for i in range(count)]
