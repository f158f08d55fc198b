"""The kinds of pictures that `mutirao plot` can draw of a finished or running run, or of a study, by name.

`draw_study` draws those that every study leaves in its folder.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from mutirao.config import load_name, nearest
from mutirao.errors import ConfigError
from mutirao.report.plots import draw_bands, draw_curves
from mutirao.report.run_plots import draw_best, draw_participation, draw_shares
from mutirao.runs.csv_tables import USUAL, metrics_in_row
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.studies.selection_policies import require_metric, targets_of, write_comparison
from mutirao.studies.study import Study, results
from mutirao.studies.targets import runs_by_method

# What a kind shows, and the module with its function `plot_KIND(folder, out) -> files`: listing them imports nothing.
KINDS = {
    "curves": ("the metrics of a run by round", "mutirao.report.plot_kinds"),
    "participation": ("who was selected when and how evenly, in a run", "mutirao.report.plot_kinds"),
    "selection": ("selection policies side by side, with tables, in a study", "mutirao.report.plot_kinds"),
    "wins": (
        "queries won and lost against another run (--against), of a ranking run",
        "mutirao.systems.ranking.report",
    ),
    # For papers: one vector figure each, of the size of a column.
    "labels": ("label skew: a bar a client, stacked by class, of a run", "mutirao.report.paper_figures"),
    "bands": ("mean curves with 95% bands, of a study or run", "mutirao.report.paper_figures"),
    "ablation": ("mean curves of many methods, named where they end, of a study", "mutirao.report.paper_figures"),
    "best": ("the best value so far by round, of a study or run", "mutirao.report.paper_figures"),
    "histogram": ("how often clients were selected, of a study or run", "mutirao.report.paper_figures"),
    "weights": ("weights of the clients, coloured by risk, of a run", "mutirao.report.paper_figures"),
    "eps": ("groups found over the range of eps, of a run of the groups recipe", "mutirao.report.paper_figures"),
    "users": ("rounds to a target by clients a round, of a study over per_round", "mutirao.report.paper_figures"),
}
Draw = Callable[..., list[Path]]

# What a system draws of a study beside that, as `package.module:function(study, out)`; it draws nothing of others'
# runs.
SYSTEM_PLOTS = ("mutirao.systems.ranking.report:draw_queries",)


def draw(folder: Path, kind: str, out: Path | None = None, **options: str | float | Sequence[float]) -> list[Path]:
    """Draw one kind of picture of what a folder holds, to the file or folder `out`, or beside it; the files written."""
    if kind not in KINDS:
        raise ConfigError(f"no kind of picture is called {kind!r}{nearest(kind, KINDS)}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with a run or a study")
    make: Draw = load_name(f"{KINDS[kind][1]}:plot_{kind}")
    given = {k: v for k, v in options.items() if v}
    takes = inspect.signature(make).parameters
    for name in given:
        if name not in takes:
            raise ConfigError(f"{kind} takes no --{name.removesuffix('s')}")
    return make(folder, out or folder, **given)


def plot_curves(folder: Path, out: Path, metric: str = "") -> list[Path]:
    """The metrics of a run by round, or one of them."""
    rows = Record.begun(folder).rows
    names = list(dict.fromkeys(k for row in rows for k in metrics_in_row(row)))
    path = file_in(out, "curves.png")
    draw_curves(rows, [metric] if metric else names, path)
    return [path]


def plot_participation(folder: Path, out: Path) -> list[Path]:
    """Who was selected when, in one run."""
    path = file_in(out, "participation.png")
    draw_participation(participation_in(Record.begun(folder)), path)
    return [path]


def plot_selection(folder: Path, out: Path, metric: str = "", targets: Sequence[float] = ()) -> list[Path]:
    """The policies of a study side by side: `selection.md`, `selection.json` and two pictures, by one metric."""
    methods = runs_by_method(folder)
    metric = metric or next((run.monitor for runs in methods.values() for run in runs), "accuracy")
    require_metric(methods, metric, folder)
    targets = list(targets) or targets_of(methods, metric)
    tables = write_comparison(methods, out, metric, targets)
    pictures = [out / "selection-curves.png", out / "selection-fairness.png"]
    draw_best(methods, metric, targets, pictures[0])
    draw_shares(methods, pictures[1])
    return tables + pictures


def file_in(out: Path, name: str) -> Path:
    """The file that was named, or the one of that name in the folder that was."""
    if out.is_dir() or not out.suffix:
        return out / name
    return out


def draw_study(study: Study, out: Path) -> list[Path]:
    """One picture a metric, the mean curve of each method with its 95% interval; and one of queries for ranking."""
    curves: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    for cell, record in results(study, out):
        for metric in study.metrics or tuple(k for k in record.rows[-1] if k in USUAL):
            points = [(row["round"], row[metric]) for row in record.rows if metric in row]
            curves.setdefault(metric, {}).setdefault(cell.method, []).append(points)
    paths = []
    for metric, methods in curves.items():
        path = out / f"curves_{quote(metric.replace('@', '_at_'), safe=' ,')}.png"
        draw_bands(methods, metric, path)
        paths.append(path)
    for draw in SYSTEM_PLOTS:
        paths += load_name(draw)(study, out)
    return paths
