"""What a run leaves to look at: the pictures every run has, and those its task hands over data for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.config import load_name, nearest
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task
from mutirao.partitioning import PartitionSummary
from mutirao.report.client_data import count_held, name_clients
from mutirao.report.confusion_plot import draw_confusion
from mutirao.report.group_plots import draw_plane, draw_scan
from mutirao.report.participation_plots import draw_participation
from mutirao.report.plots import draw_curves, draw_partition, draw_weights
from mutirao.runs.column_names import metrics_in_row
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record

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
            named = name_clients(data, task.population) if isinstance(data, PartitionSummary) else data
            painter(picture.kind)(named, out / file)
    own = any(picture.kind == "partition" for picture in exhibits.pictures.values())
    if not own and (held := count_held(task.population)) is not None:
        draw_partition(held, out / "partition.png")
