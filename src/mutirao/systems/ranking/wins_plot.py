"""Queries that win and lose against a baseline: differences in order, the field's picture of what a mean hides."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.report.plot_kinds import file_in
from mutirao.report.plot_style import INK, blank, save, tidy
from mutirao.runs.reader import Record
from mutirao.systems.ranking.query_tests import pair_queries, read_queries
from mutirao.systems.ranking.query_wins import hold_against

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


def plot_wins(folder: Path, out: Path, metric: str = "", against: str = "") -> list[Path]:
    """Who wins and loses of the queries of a run against another run that was judged by the same ones."""
    if not against:
        raise ConfigError("wins: against which run? right would be --against FOLDER, another run on the same queries")
    sides = []
    for place in (folder, Path(against)):
        if not (place / "queries.csv").is_file():
            raise ConfigError(f"{place} has no queries.csv; right would be the folder of a finished ranking run")
        sides.append(read_queries(place / "queries.csv"))
    ours, theirs = sides
    metric = metric or Record.begun(folder).judge.removeprefix("vali_")
    for side in sides:
        if metric not in (known := next(iter(side.values()), {})):
            raise ConfigError(f"no query has a metric {metric!r}{nearest(metric, known)}")
    a, b = pair_queries({0: ours}, {0: theirs}, metric)
    if not len(a):
        raise ConfigError(f"{folder} and {against} were judged by different queries")
    found = hold_against(a, b)
    name = f"{folder.name} against {Path(against).name}\nURisk {found.u_risk:+.4f}, TRisk {found.t_risk:+.2f}"
    path = file_in(out, "wins.png")
    draw_wins({name: a - b}, f"{metric}, difference", path)
    return [path]
