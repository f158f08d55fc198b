"""The pictures of a run: those every run has, who took part, and those its task provides data for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mutirao.clustering.group_tables import Plane, Scan
from mutirao.config import load_name, nearest
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task
from mutirao.io import write_rows, write_whole
from mutirao.partitioning.heterogeneity import SAMPLES, PartitionSummary, describe
from mutirao.report.plots import (
    BRIGHT,
    INK,
    MUTED,
    PALE,
    add_legend,
    blank,
    count_on,
    draw_curves,
    draw_partition,
    draw_weights,
    every,
    palette,
    panels_of,
    sample_note,
    save,
    tidy,
)
from mutirao.runs.csv_tables import CsvTable, metrics_in_row
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
    step = every(len(shown), 12)
    heat.set_yticks(np.arange(len(shown))[::step], [str(shown[i]) for i in range(0, len(shown), step)])
    heat.set(title="who was selected when", xlabel="round", ylabel="client" + sample_note(len(shown), clients))
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


def draw_plane(found: Plane, path: Path) -> None:
    """Draw the clients in the plane, coloured by group; where they lie stands beside the picture in `plane.csv`."""
    groups = found.groups
    plane = found.points
    share = found.shares
    figure, axes = blank(6.6, 4.6)
    colours = palette(max(1, groups.count))
    for i, name in enumerate(groups.names):
        mine = groups.labels == i
        label = f"{name}: {int(mine.sum())}" if groups.count <= 12 else None
        x, y = plane[mine].T
        axes.scatter(x, y, s=42, color=colours[i], edgecolors="white", linewidths=0.6, label=label)
    if (waits := groups.labels < 0).any():
        x, y = plane[waits].T
        axes.scatter(x, y, s=46, color=INK, marker="x", label=f"waits: {int(waits.sum())}")
    many = "group" if groups.count == 1 else "groups"
    axes.set(
        xlabel=f"first component ({share[0]:.0%} of the variance)",
        ylabel=f"second component ({share[1]:.0%})",
        title=f"{len(groups.clients):,} clients by what their warm-up sent: {groups.count} {many}",
    )
    tidy(axes, grid="both")
    if groups.count <= 12:
        add_legend(axes, title="clients", loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
    places = zip(groups.clients, plane.tolist(), strict=False)
    rows = [["client", "x", "y"], *([client, *place] for client, place in places)]
    # The report makes a chart of this table, which replaces the picture there.
    write_whole(path.with_name("plane.csv"), write_rows(rows))


def draw_scan(scan: Scan, path: Path) -> None:
    """Draw how many groups DBSCAN finds for each eps, and how many clients are in none."""
    tables = scan.tables
    chosen = scan.chosen
    figure, panels = blank(8.6, 3.4, 1, len(tables), squeeze=False)
    for axes, (space, rows) in zip(panels[0], tables.items(), strict=True):
        found = [r.groups for r in rows]
        last = rows[-1].low
        # Of equal signatures a range begins at eps = 0, which a logarithmic axis cannot show.
        ends = [*(max(r.low, last * 1e-3) for r in rows), last * 1.6]
        axes.stairs(found, ends, color=BRIGHT[0], linewidth=1.8, baseline=None, label="groups")
        axes.set(xscale="log", ylim=(0, max(found) + 0.6), xlabel="eps", title=space)
        right = axes.twinx()
        right.stairs([r.noise for r in rows], ends, color=BRIGHT[1], linestyle="--", baseline=None)
        right.set_ylim(0, 1.02)
        axes.set_ylabel("groups", color=BRIGHT[0])
        right.set_ylabel("share of clients in none", color=BRIGHT[1])
        tidy(axes, grid="both")
        tidy(right, grid="y")
        right.grid(False)
    if chosen.holds:
        axes.axvspan(chosen.low, chosen.high, color=BRIGHT[2], alpha=0.15, linewidth=0)
        axes.annotate("chosen", (chosen.eps, 0.25), ha="center", color=INK, fontsize=9)
    save(figure, path)


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
    counts = found.counts
    classes = found.classes
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


# Beyond these, counting takes long or shows nothing.
MOST_CLIENTS = 20_000
MOST_CLASSES = 1_000


@runtime_checkable
class CountsClasses(Protocol):
    """A population that can count a client's classes without reading its data, such as folders of pictures."""

    accepts_any_client: bool  # whether it stands for any client, so that it cannot list their names

    def counts(self, name: ClientId) -> Mapping[str, int]:
        """The samples of a client by class."""


def count_held(population: Mapping[ClientId, Any]) -> PartitionSummary | None:
    """The samples of each client by class, or in all where they have none; None where that is not known here.

    Nothing is read that is not at hand: data that come from elsewhere, or are not `Samples`, are not counted.
    """
    # Imported late, because it imports torch.
    from mutirao.training.samples import ClientData, Samples, VirtualClients

    whole = whole_population(population)
    if not 1 < len(population) <= MOST_CLIENTS:
        return None
    if isinstance(whole, CountsClasses):
        try:
            if whole.accepts_any_client:
                return None
            return count_labels({name: spread(whole.counts(name)) for name in population})
        except ConfigError:
            # This party does not have the clients' pictures.
            return None
    if not isinstance(whole, dict | VirtualClients):
        return None
    held = {name: population[name] for name in population}
    if not all(isinstance(data, Samples | ClientData) for data in held.values()):
        return None
    return count_labels({name: labels_of(Samples.of(data)) for name, data in held.items()})


def whole_population(population: Mapping[ClientId, Any]) -> Mapping[ClientId, Any]:
    """The population with the clients that are excluded from a run."""
    if isinstance(population, PopulationWithout):
        return population.population
    return population


def labels_of(samples: Any) -> Any:
    """The labels of a client's samples."""
    if samples.index is None:
        return samples.y.numpy()
    return samples.y.numpy()[samples.index]


def spread(counts: Mapping[str, int]) -> Any:
    """Counts of classes as labels."""
    return np.repeat(np.array([*counts], str), np.array([*counts.values()], np.intp))


def count_labels(labels: Mapping[ClientId, Any]) -> PartitionSummary | None:
    """Labels counted by class where they are classes, of not too many kinds, and all together otherwise."""
    each = list(labels.values())
    sizes = np.array([len(y) for y in each])
    if not sizes.sum():
        return None
    ends = np.cumsum(sizes)
    parts = [np.arange(end - many, end) for end, many in zip(ends, sizes, strict=True)]
    classed = all(y.ndim == 1 and y.dtype.kind in "biuU" for y in each)
    y: Any = np.full(int(ends[-1]), SAMPLES)
    if classed:
        classes = np.concatenate(each)
        if len(np.unique(classes)) <= MOST_CLASSES:
            y = classes
    return replace(describe(y, parts), clients=tuple(labels))


def name_clients(summary: PartitionSummary, population: Mapping[ClientId, Any]) -> PartitionSummary:
    """The summary with its clients' names, which it lacks if a recipe counted parts."""
    # Clients that are excluded from the rounds were still counted.
    whole = whole_population(population)
    fits = not summary.clients and len(whole) == len(summary.counts)
    if fits:
        return replace(summary, clients=tuple(whole))
    return summary


# One painter a kind, `(data, path)`; a kind of your own is a dotted path to one.
PAINTERS: dict[str, Callable[[Any, Path], None]] = {
    "partition": draw_partition,
    "confusion": draw_confusion,
    "groups": draw_plane,
    "eps_scan": draw_scan,
}


def painter(kind: str) -> Callable[[Any, Path], None]:
    """Who draws pictures of that kind."""
    if kind in PAINTERS:
        return PAINTERS[kind]
    if ":" not in kind:
        raise ConfigError(f"no kind of picture is called {kind!r}{nearest(kind, PAINTERS)}")
    found: Callable[[Any, Path], None] = load_name(kind)
    return found


def draw_run(run: Run, task: Task, out: Path) -> None:
    """Save the pictures of a run: the curves that every run has, who holds what, and the task's own."""
    exhibits = task.exhibits
    metrics = list(dict.fromkeys([task.judge, *(k for row in run.history for k in metrics_in_row(row))]))
    if any(task.judge in row for row in run.history):
        draw_curves(run.history, [m for m in metrics if m not in exhibits.constant], out / "curves.png")
    record = Record(out)
    if "risk" in record.clients:
        draw_weights(CsvTable(out / "clients.csv").each(), out / "weights.png")
    if any(row["selected"] < len(run.roster) for row in run.history):
        draw_participation(participation_in(record, len(run.roster)), out / "participation.png")
    for file, picture in exhibits.pictures.items():
        if (data := picture.data(run)) is not None:
            if isinstance(data, PartitionSummary):
                data = name_clients(data, task.population)
            painter(picture.kind)(data, out / file)
    own = any(picture.kind == "partition" for picture in exhibits.pictures.values())
    if not own and (held := count_held(task.population)) is not None:
        draw_partition(held, out / "partition.png")
