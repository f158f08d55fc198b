"""Pictures of partitions, runs and methods, each written whole to a PNG, SVG or PDF file, in one style.

Figures are made as objects of their own, never through pyplot, so nothing global changes and threads may draw.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.partitioning import PartitionSummary
from mutirao.partitioning.heterogeneity import SAMPLES
from mutirao.runs.reader import Floats
from mutirao.stats import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

FORMATS = ("png", "svg", "pdf")
# Paul Tol's "bright" and "muted" schemes: distinct for the colour-blind, too.
BRIGHT = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")
MUTED = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
INK = "#333333"
PALE = "#E4E4E4"


def blank(wide: float, tall: float, *grid: int, **options: Any) -> tuple["Figure", Any]:
    """An empty figure of so many inches and its axes: one, or as many as the grid of rows and columns has."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, tall), layout="constrained", facecolor="white")
    return figure, figure.subplots(*grid, **options)


def palette(classes: int) -> list[Any]:
    """A colour a class; beyond ten, in the order of the classes along a colour map."""
    if classes <= len(BRIGHT):
        return list(BRIGHT[:classes])
    if classes <= len(MUTED):
        return list(MUTED[:classes])
    from matplotlib import colormaps

    return [colormaps["viridis"](v) for v in np.linspace(0, 1, classes)]


def every(count: int, most: int) -> int:
    """Every how many bars are labelled: 1, 2, 5, 10, 20 and so on, so that at most `most` are."""
    step = 1
    while count > most * step:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def add_legend(place: "Axes | Figure", size: float = 9, **options: Any) -> "Legend":
    """Name the curves, without a box around the names."""
    return place.legend(frameon=False, fontsize=size, labelcolor=INK, **options)


def count_on(*sides: "Axis") -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))


def scatter_risks(
    figure: "Figure", axes: "Axes", rounds: Any, weights: Any, risks: Any, size: float, edge: float
) -> "Colorbar":
    """Draw the weights of clients by round, coloured by risk, and the scale of the colours."""
    most = max(1e-9, float(np.abs(risks).max()))
    colours = {"c": risks, "cmap": "PuOr_r", "vmin": -most, "vmax": most}
    dots = axes.scatter(rounds, weights, s=size, linewidths=edge, edgecolors=INK, **colours)
    return figure.colorbar(dots, ax=axes, pad=0.02)


def tidy(axes: "Axes", grid: str) -> None:
    """Light grid behind the data, no box around it, one colour for all text but labels that have their line's."""
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=PALE, linewidth=0.8)  # type: ignore[arg-type]  # a literal in all calls
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=PALE)
    axes.title.set(color=INK, fontsize=11)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=label.get_color() if label.get_color() in BRIGHT else INK, fontsize=10)


def save(figure: "Figure", path: Path | str) -> None:
    """Write the figure in the format its name ends in; readers see the old file or the new one, never a part."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ConfigError(f"cannot draw to {path}: right would be a name that ends in .{', .'.join(FORMATS)}")
    content = BytesIO()
    # The file does not say when it was made.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(content, format=kind, dpi=150, metadata=dates.get(kind))
    write_whole(path, content.getvalue(), durable=False)


# More clients than this are shown by a sample: thinner bars could not be distinguished.
MOST_BARS = 120
# The bands of more methods than this would cover each other, so they get panels of their own.
MOST_BANDS = 6
# With more curves than colours, the line style distinguishes them.
STYLES = ("solid", (0, (5, 2)), (0, (1, 1.5)))
MOST_NAMED = 24  # more classes than this get a scale of colours instead of a name each


def draw_partition(summary: PartitionSummary, path: Path | str) -> None:
    """Draw how many samples of each class every client has: one horizontal bar a client, stacked by class.

    The counts stand beside the picture as a table, `partition.csv` for `partition.png`.

    >>> from mutirao.partitioning import describe
    >>> draw_partition(describe([0, 0, 1, 1], [[0, 1], [2, 3]]), "partition.png")
    >>> sorted(path.name for path in Path().glob("partition.*"))
    ['partition.csv', 'partition.png']
    """
    from matplotlib.patches import Patch

    total, classes = summary.counts.shape
    shown = np.arange(0, total, every(total, MOST_BARS))
    counts = summary.counts[shown]
    colours = palette(classes)
    each = float(np.clip(8.0 / len(shown), 0.06, 0.34))  # inches a bar
    figure, axes = blank(8.2, 1.5 + max(0.8, each * len(shown)))
    # Thin bars with gaps would flicker.
    gap = 0.2 if len(shown) <= 40 else 0.0
    for place, row in enumerate(counts):
        has = np.flatnonzero(row)
        bars = list(zip((np.cumsum(row) - row)[has], row[has], strict=True))
        axes.broken_barh(bars, (place - 0.5 + gap / 2, 1 - gap), facecolors=[colours[c] for c in has])
    axes.set_ylim(len(shown) - 0.5 + gap, -0.5 - gap)  # the first client on top
    axes.set_xlim(0, max(1.0, float(counts.sum(1).max())) * 1.01)
    step = every(len(shown), most=25 if each > 0.2 else 16)
    names = summary.clients or [str(k) for k in range(total)]
    axes.set_yticks(np.arange(len(shown))[::step], [names[k][:18] for k in shown[::step]])
    axes.set(xlabel="samples", ylabel="client" + sample_note(len(shown), total))
    title = f"{total:,} client{'s' * (total != 1)}, {summary.sizes.sum():,} samples"
    if summary.classes != (SAMPLES,):
        title += f", label skew {summary.heterogeneity:.2f}"
    axes.set_title(title)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    if summary.classes == (SAMPLES,):
        # One colour needs no legend.
        pass
    elif classes <= MOST_NAMED:
        marks = [Patch(color=colours[c], label=str(summary.classes[c])) for c in range(classes)]
        square = {"handlelength": 1.0, "handleheight": 1.0}
        legend = add_legend(figure, handles=marks, loc="outside right upper", title="class", **square)
        legend.get_title().set_color(INK)
    else:
        _scale(figure, axes, summary.classes)
    save(figure, path)
    write_counts(summary, path)


def sample_note(shown: int, total: int) -> str:
    """How many of all clients are shown, for the label of an axis; empty if all are."""
    if shown == total:
        return ""
    return f" ({shown} of {total:,} shown)"


def write_counts(summary: PartitionSummary, path: Path | str) -> None:
    """Write the counts beside a picture: a line a client, a column a class."""
    names = summary.clients or range(len(summary.counts))
    lines = [["client", *map(str, summary.classes)]]
    lines += [[str(name), *row] for name, row in zip(names, summary.counts.tolist(), strict=True)]
    write_whole(Path(path).with_suffix(".csv"), write_rows(lines), durable=False)


def draw_curves(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], path: Path | str, title: str = "") -> None:
    """Draw metrics by round, one panel a family, to a file.

    >>> from pathlib import Path
    >>> draw_curves([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.8}], ["accuracy"], "curves.svg")
    >>> "<svg" in Path("curves.svg").read_text()
    True
    """
    save(make_curves(rows, metrics, title), path)


def make_curves(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], title: str = "") -> "Figure":
    """Metrics by round, one panel a family: `loss` and `train_loss` share one."""
    families: dict[str, list[str]] = {}
    for name in metrics:
        families.setdefault(name.removeprefix("train_"), []).append(name)
    curves = {name: _curve(rows, name) for name in metrics}
    known = {k for row in rows for k in row}
    for name in metrics:
        if name not in known:
            raise ConfigError(f"no round has a metric {name!r}{nearest(name, known)}")
    if not curves:
        raise ConfigError("no metrics are named, so there is no curve to draw")
    # Three panels in a row, but four stand two by two instead of three and one.
    across = 2 if len(families) == 4 else min(len(families), 3)
    down = math.ceil(len(families) / across)
    wide = max(5.2, 4.2 * across)
    tall = 3.1 * down + (0.4 if title else 0)
    figure, panels = blank(wide, tall, down, across, squeeze=False)
    for axes, (family, names) in zip(panels.flat, families.items(), strict=False):
        # Sorted, so that evaluation usually comes before `train_` in the legend.
        for name in sorted(names):
            rounds, values = curves[name]
            look: dict[str, Any] = {"color": BRIGHT[0], "label": "evaluation, global model"}
            if name.startswith("train_"):
                look = {"color": BRIGHT[1], "linestyle": (0, (4, 2)), "label": "training, on the clients"}
            marker = "o" if len(rounds) <= 25 else None
            axes.plot(rounds, values, linewidth=1.8, marker=marker, markersize=3.5, **look)
        axes.set(title=family, xlabel="round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02)
        if not any(len(curves[name][0]) for name in names):
            axes.text(0.5, 0.5, "never finite", transform=axes.transAxes, ha="center", color=INK)
        tidy(axes, grid="both")
        if len(names) > 1:
            add_legend(axes)
    for axes in panels.flat[len(families) :]:
        axes.remove()
    if title:
        figure.suptitle(title, fontsize=13, color=INK)
    return figure


def panels_of(methods: int) -> tuple["Figure", list[Any]]:
    """A figure of as few panels as hold all bands, at most six in each, and the panel of each method."""
    down = max(1, math.ceil(methods / MOST_BANDS))
    each = math.ceil(methods / down)
    figure, grid = blank(7.6, 4.2 if down == 1 else 3.2 * down, down, 1, squeeze=False, sharex=True, sharey=True)
    return figure, [grid[i // each, 0] for i in range(methods)]


def draw_bands(
    methods: Mapping[str, Sequence[Sequence[tuple[int, float]]]], metric: str, path: Path | str, title: str = ""
) -> None:
    """Draw the mean curve of each method over its runs, with the 95% interval of the mean as a band.

    >>> runs = {"FedAvg": [[(1, 0.5), (2, 0.8)], [(1, 0.6), (2, 0.7)]]}
    >>> draw_bands(runs, "accuracy", "bands.png")
    >>> Path("bands.png").stat().st_size > 0
    True
    """
    figure, panels = panels_of(len(methods))
    for i, ((method, runs), axes) in enumerate(zip(methods.items(), panels, strict=True)):
        rounds, mean, half = average(runs)
        colour = BRIGHT[i % len(BRIGHT)]
        style = STYLES[i // len(BRIGHT) % len(STYLES)]
        axes.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
        axes.plot(rounds, mean, color=colour, linestyle=style, linewidth=1.8, label=method)
    for axes in figure.axes:
        axes.set(ylabel=metric)
        tidy(axes, grid="both")
        add_legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.axes[0].set_title(title)
    figure.axes[-1].set_xlabel("round")
    save(figure, path)


def average(runs: Iterable[Iterable[tuple[float, float]]]) -> tuple[Floats, Floats, Floats]:
    """Rounds, the mean over runs at each of them, and half the width of its 95% interval."""
    by_round: dict[float, list[float]] = {}
    for run in runs:
        for round, value in run:
            by_round.setdefault(round, []).append(value)
    found = [interval(by_round[r]) for r in sorted(by_round)]
    means, halves = (np.array([getattr(one, part) for one in found]) for part in ("mean", "half"))
    return np.array(sorted(by_round)), means, np.nan_to_num(halves)


def draw_weights(rows: Iterable[Mapping[str, Any]], path: Path | str) -> None:
    """Draw the weight of every client in every round, coloured by its risk."""
    points = ([float(r[k]) for k in ("round", "weight", "risk")] for r in rows if "risk" in r and "weight" in r)
    known = np.fromiter(points, np.dtype((np.float64, 3)))
    if not len(known):
        raise ConfigError("no client has a risk, so there are no weights to draw")
    figure, axes = blank(8.2, 3.6)
    rounds, weights, risks = known.T
    bar = scatter_risks(figure, axes, rounds, weights, risks, size=9, edge=0.2)
    bar.set_label("risk", color=INK)
    bar.outline.set_visible(False)
    axes.set(xlabel="round", ylabel="weight of a client")
    tidy(axes, grid="both")
    save(figure, path)


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[Floats, Floats]:
    """Rounds and values of a metric, where a round has a finite one."""
    points = [(row["round"], row[name]) for row in rows if isinstance(row.get(name), int | float | np.number)]
    table = np.array([p for p in points if math.isfinite(p[1])], np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _scale(figure: "Figure", axes: "Axes", classes: Sequence[Any]) -> None:
    """A bar of colours with some of the classes named."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(0, len(classes) - 1), "viridis"), ax=axes, aspect=40, pad=0.02)
    ticks = list(range(0, len(classes), every(len(classes), 12)))
    bar.set_ticks(ticks, labels=[str(classes[t]) for t in ticks])
    bar.set_label("class", color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=9, length=0)


# More clients than this are shown by a sample: smaller bubbles could not be distinguished.
MOST = 60
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
    # matplotlib takes areas in square points: the largest bubble just fits into its cell.
    widest = (0.95 * DOTS * min(INCH, tall / classes)) ** 2
    axes.scatter(place, kind, s=widest * many / max(1, counts.max()), color=BRIGHT[0], alpha=0.8, linewidths=0)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylim(classes - 0.4, -0.6)
    step = every(len(shown), 30)
    axes.set_xticks(np.arange(len(shown))[::step], [f"{k}" for k in shown[::step]])
    axes.set_yticks(np.arange(classes)[::step_down], [str(c) for c in summary.classes[::step_down]])
    axes.set(xlabel="client" + sample_note(len(shown), total), ylabel="class")
    figures = summary.figures()
    axes.set_title(f"largest bubble {int(counts.max()):,} samples, EMD {figures['emd']:.2f}", color=INK)
    tidy(axes, grid="both")
    axes.tick_params(axis="both", length=0)
    save(figure, path)
    write_counts(summary, path)
