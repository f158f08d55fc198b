"""Figures for papers: small, vector, of the sizes LaTeX columns have, with fonts that can be edited and searched.

Each is a kind of `mutirao plot`: a function `(folder, out, ...) -> files`, where `out` is a file or a folder.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.report.plot_kinds import file_in
from mutirao.report.plots import (
    BRIGHT,
    INK,
    PALE,
    add_legend,
    average,
    blank,
    count_on,
    palette,
    save,
    scatter_risks,
    tidy,
)
from mutirao.runs.reader import Columns, Floats, Record, json_of
from mutirao.studies.targets import runs_by_method, sign_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.4  # inches: one column of two; 7.0 is the whole width
STYLES = ("solid", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
Methods = Mapping[str, Sequence[Record]]
Targets = Sequence[float]
Lead = Callable[[Floats], Floats]


def canvas(width: float, tall: float = 0.68) -> tuple["Figure", Any]:
    """An empty figure of that many inches."""
    width = width or COLUMN
    if not 1 <= width <= 30:
        raise ConfigError(f"width: {width:g} inches is not between 1 and 30; one column of a paper is 3.4")
    return blank(width, width * tall)


def look_of(i: int) -> dict[str, Any]:
    """The colour and style of a method's curve, by its number."""
    return {"color": BRIGHT[i % len(BRIGHT)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 1.1}


def finish(figure: "Figure", axes: "Axes", out: Path, name: str, grid: str = "both", legend: bool = True) -> list[Path]:
    """Small type, a light grid, a legend of several curves, and text that stays text."""
    from matplotlib import rc_context

    tidy(axes, grid=grid)
    axes.tick_params(labelsize=7)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(8)
    if legend and len(axes.get_legend_handles_labels()[1]) > 1:
        add_legend(axes, 6.5, handlelength=2.2)
    path = file_in(out, f"{name}.pdf")
    # TrueType (42) in PDF and real text in SVG: text can be edited and searched, unlike outlines or Type 3 fonts.
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        save(figure, path)
    return [path]


def read_methods(folder: Path, metric: str) -> tuple[Methods, str]:
    """The runs of each method, and the requested metric or else the monitored one."""
    methods = runs_by_method(folder)
    first = next(iter(methods.values()))[0]
    if metric and metric not in first.metrics:
        raise ConfigError(f"no round has a metric {metric!r}{nearest(metric, set(first.metrics))}")
    return methods, metric or first.monitor


def mean_curves(methods: Methods, metric: str, lead: Lead = np.asarray) -> Iterator[tuple[str, Floats, Floats, Floats]]:
    """Each method with its rounds, the mean of its runs as `lead` makes them, and half of its 95% interval."""
    for method, records in methods.items():
        known = [(r.history.numbers("round"), r.history.numbers(metric)) for r in records]
        runs = [(x[~np.isnan(y)].tolist(), lead(y[~np.isnan(y)]).tolist()) for x, y in known]
        yield method, *average(zip(x, y, strict=True) for x, y in runs)


def plot_bands(folder: Path, out: Path, metric: str = "", width: float = 0.0) -> list[Path]:
    """Mean curves of the methods of a study, with the 95% interval of the mean as a band."""
    methods, metric = read_methods(folder, metric)
    figure, axes = canvas(width)
    for i, (method, rounds, mean, half) in enumerate(mean_curves(methods, metric)):
        axes.fill_between(rounds, mean - half, mean + half, color=look_of(i)["color"], alpha=0.15, linewidth=0)
        axes.plot(rounds, mean, label=method, **look_of(i))
    axes.set(xlabel="round", ylabel=metric)
    count_on(axes.xaxis)
    return finish(figure, axes, out, "bands")


def plot_ablation(folder: Path, out: Path, metric: str = "", width: float = 0.0) -> list[Path]:
    """Mean curves of many methods, thin and without bands, named where they end."""
    methods, metric = read_methods(folder, metric)
    figure, axes = canvas(width, 0.8)
    ends = []
    for i, (method, rounds, mean, _) in enumerate(mean_curves(methods, metric)):
        style = STYLES[i // len(BRIGHT) % len(STYLES)]
        axes.plot(rounds, mean, color=BRIGHT[i % len(BRIGHT)], linestyle=style, linewidth=0.9)
        ends.append((float(mean[-1]), method, BRIGHT[i % len(BRIGHT)], float(rounds[-1])))
    low, high = axes.get_ylim()
    heights = space_out([y for y, *_ in sorted(ends)], (high - low) * 0.055)
    for height, (value, method, colour, last) in zip(heights, sorted(ends), strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
        place = {"textcoords": ("axes fraction", "data"), "va": "center"}
        axes.annotate(method, (last, value), (1.03, height), fontsize=6, color=INK, arrowprops=line, **place)
    axes.set(xlabel="round", ylabel=metric)
    count_on(axes.xaxis)
    return finish(figure, axes, out, "ablation", legend=False)


def space_out(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights moved apart as little as is needed for a gap between any two."""
    out = list(heights)
    for _ in range(50):
        for i in range(len(out) - 1):
            short = gap - (out[i + 1] - out[i])
            if short > 1e-12:
                out[i] -= short / 2
                out[i + 1] += short / 2
    return out


def plot_best(folder: Path, out: Path, metric: str = "", width: float = 0.0, targets: Targets = ()) -> list[Path]:
    """The best value so far by round, averaged over runs; targets as lines across."""
    methods, metric = read_methods(folder, metric)
    figure, axes = canvas(width)
    for value in targets:
        axes.axhline(value, color=INK, linewidth=0.5, linestyle=(0, (4, 3)))
    first = next(iter(methods.values()))[0]
    lead = np.maximum.accumulate if sign_of(first, metric) > 0 else np.minimum.accumulate
    for i, (method, rounds, mean, _) in enumerate(mean_curves(methods, metric, lead)):
        axes.step(rounds, mean, where="post", label=method, **look_of(i))
    axes.set(xlabel="round", ylabel=f"best {metric} so far")
    count_on(axes.xaxis)
    return finish(figure, axes, out, "best")


def plot_histogram(folder: Path, out: Path, width: float = 0.0) -> list[Path]:
    """How many clients were selected how often, the methods of a study as outlines."""
    figure, axes = canvas(width)
    found = {method: [times_of(record) for record in records] for method, records in runs_by_method(folder).items()}
    most = max(int(times.max()) for runs in found.values() for times in runs)
    for i, (method, runs) in enumerate(found.items()):
        counts = np.mean([np.bincount(times, minlength=most + 1) for times in runs], axis=0)
        if len(found) == 1:
            axes.bar(np.arange(most + 1), counts, width=0.9, color=BRIGHT[0])
        else:
            axes.stairs(counts, np.arange(most + 2) - 0.5, label=method, **look_of(i))
    axes.set(xlabel="times selected", ylabel="clients")
    return finish(figure, axes, out, "histogram")


def times_of(record: Record) -> Any:
    """How often each client was selected, those never selected included."""
    names, counts = record.selections()
    return np.concatenate([counts, np.zeros(max(0, record.population - len(names)), np.int64)]).astype(np.int64)


def plot_labels(folder: Path, out: Path, width: float = 0.0) -> list[Path]:
    """Who has how much of what: one bar a client, stacked by class."""
    table = Columns(folder / "partition.csv")
    if not len(table):
        raise ConfigError(f"{folder} holds no partition.csv; runs of recipes that partition labelled data do")
    classes = table.names[1:]
    counts = np.nan_to_num(np.array([table.numbers(c) for c in classes]))
    figure, axes = canvas(width, 0.75)
    colours = palette(len(classes))
    under = np.zeros(len(table))
    for i, name in enumerate(classes):
        label = name if len(classes) <= 12 else None
        axes.bar(np.arange(len(table)), counts[i], 0.92, bottom=under, color=colours[i], label=label)
        under += counts[i]
    axes.set(xlabel="client", ylabel="samples", xlim=(-0.7, len(table) - 0.3))
    count_on(axes.xaxis)
    if len(classes) <= 12:
        close = {"handlelength": 0.8, "columnspacing": 0.8, "handletextpad": 0.3}
        wide = min(10, len(classes))
        add_legend(figure, 6, loc="outside upper center", ncols=wide, **close)
    return finish(figure, axes, out, "labels", grid="y", legend=False)


def plot_eps(folder: Path, out: Path, width: float = 0.0) -> list[Path]:
    """Groups found, and the share of clients in none, over all values of eps."""
    table = Columns(folder / "eps_scan.csv")
    if not len(table) or "from" not in table:
        raise ConfigError(f"{folder} holds no eps_scan.csv; runs of the groups recipe write it")
    spaces = table.texts("space")
    # The last space is the one in which the groups were chosen.
    rows = np.array([space == spaces[-1] for space in spaces])
    low, found, alone = (table.numbers(name)[rows] for name in ("from", "groups", "noise"))
    # Of equal signatures a range begins at eps = 0, which a logarithmic axis cannot show.
    edges = [*np.maximum(low, low.max() * 1e-3), low.max() * 1.6]
    figure, axes = canvas(width)
    axes.stairs(found, edges, baseline=None, color=BRIGHT[0], linewidth=1.2)
    right = axes.twinx()
    right.stairs(alone, edges, baseline=None, color=BRIGHT[1], linewidth=1.0, linestyle="--")
    right.set(ylim=(0, 1.02))
    right.set_ylabel("share of clients in none", fontsize=8, color=BRIGHT[1])
    right.tick_params(labelsize=7, colors=INK, length=0)
    right.spines[:].set_visible(False)
    axes.set(xscale="log", xlabel="eps", ylim=(0, float(found.max()) + 0.4))
    axes.set_ylabel("groups", color=BRIGHT[0])
    count_on(axes.yaxis)
    return finish(figure, axes, out, "eps")


def plot_users(folder: Path, out: Path, metric: str = "", width: float = 0.0, targets: Targets = ()) -> list[Path]:
    """Rounds to a target by the number of clients a round, one bar a method; what never got there is hatched."""
    methods, metric = read_methods(folder, metric)
    thresholds = json_of(folder / "study.json").get("threshold")
    goal: Any = None
    if targets:
        goal = targets[0]
    elif isinstance(thresholds, Mapping):
        goal = thresholds.get(metric)
    if not isinstance(goal, int | float):
        raise ConfigError(f"say which {metric} is to be reached, such as --target 0.9")
    rounds: dict[str, dict[float, list[float]]] = {}
    for method, records in methods.items():
        for record in records:
            many = float(record.config.get("per_round", 0))
            rounds.setdefault(method, {}).setdefault(many, []).append(first_round_at(record, metric, float(goal)))
    sizes = sorted({s for of in rounds.values() for s in of}, reverse=True)
    longest = max(record.rounds for records in methods.values() for record in records)
    figure, axes = canvas(width)
    wide = 0.8 / len(rounds)
    for i, (method, of) in enumerate(rounds.items()):
        middle = [float(np.median(of.get(s, [math.nan]))) for s in sizes]
        x = np.arange(len(sizes)) - 0.4 + (i + 0.5) * wide
        heights = [longest if m == math.inf else m for m in middle]
        bars = axes.bar(x, heights, wide * 0.92, color=BRIGHT[i % len(BRIGHT)], label=method)
        for bar, m, at in zip(bars, middle, x, strict=True):
            text = f"{m:g}"
            if m == math.inf:
                bar.set(hatch="////", alpha=0.45)
                text = f">{longest}"
            elif math.isnan(m):
                text = ""
            axes.annotate(text, (at, bar.get_height()), ha="center", va="bottom", fontsize=5.5, color=INK)
    axes.set_xticks(np.arange(len(sizes)), [f"{s:g}" for s in sizes])
    axes.set(xlabel="clients a round", ylabel=f"rounds to {metric} {goal:g}")
    axes.margins(y=0.12)
    return finish(figure, axes, out, "users", grid="y")


def first_round_at(record: Record, metric: str, goal: float) -> float:
    """The first round at which the metric is at the goal or beyond; infinity if none is."""
    values = record.history.numbers(metric)
    rounds = record.history.numbers("round")
    there = values >= goal if sign_of(record, metric) > 0 else values <= goal
    if there.any():
        return float(rounds[there][0])
    return math.inf


def plot_weights(folder: Path, out: Path, width: float = 0.0) -> list[Path]:
    """The weight of every client in every round, coloured by its risk."""
    table = Record.of(folder).clients
    if "risk" not in table:
        raise ConfigError(f"{folder}: no client has a risk; runs with aggregate=fedrisk do")
    figure, axes = canvas(width)
    risk = table.numbers("risk")
    keep = ~np.isnan(risk)
    rounds = table.numbers("round")[keep]
    weight = table.numbers("weight")[keep]
    bar = scatter_risks(figure, axes, rounds, weight, risk[keep], size=3, edge=0.1)
    bar.set_label("risk", color=INK, size=8)
    bar.ax.tick_params(labelsize=6.5, colors=INK, length=0)
    bar.outline.set_edgecolor(PALE)
    axes.set(xlabel="round", ylabel="weight")
    return finish(figure, axes, out, "weights")
