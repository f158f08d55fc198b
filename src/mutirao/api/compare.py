"""`mutirao.compare`: methods side by side over seeds, through the same grid, tables and tests as `mutirao study`."""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from mutirao.api.result import Page, Picture, as_frame, draw_kind
from mutirao.api.run import Entry, Mode, Pairs, enter, how_shown
from mutirao.config import Common, resolve
from mutirao.errors import ConfigError
from mutirao.partitioning.flwr_partitioners import is_partitioner
from mutirao.report import write_report
from mutirao.report.notebook import PIECES
from mutirao.report.plot_kinds import draw_study
from mutirao.runs.execute import default_out, different_settings
from mutirao.studies.comparison import MethodResult, comparison_fields, header_of, row_of, write_tables
from mutirao.studies.comparison import compare_methods as compare_cells
from mutirao.studies.study import Study, lay_out, ratio_of, run_study
from mutirao.templates import macros

log = logging.getLogger("mutirao")


def compare(
    model: Any = None,
    /,  # as in `run`
    data: Any = None,
    *,
    methods: Mapping[str, Mapping[str, Any]],
    seeds: int | Iterable[int] = 5,
    over: Mapping[str, Sequence[Any]] | None = None,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    shared: float | str = 0.0,
    target: str | None = None,
    client: str | None = None,
    test: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    transform: Any = None,
    workers: int = 0,
    out: Path | str | None = None,
    progress: Mode = "auto",
    settings: Mapping[str, Any] | None = None,
    **common: Any,
) -> "Table":
    """Run every method with every seed, and compare them with the baseline, which is the first by default.

    `methods` are settings by name, `over` further settings with the values of each that all methods go through. What
    is run, and all other keywords, are as in `mutirao.run`. Finished cells in `out` are kept: called again it goes on.
    `shared` is n_test/n_train if the cells' data are splits of one set, which widens the intervals of differences.

    >>> import torch
    >>> from torch import nn
    >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> both = {"FedAvg": {}, "FedYogi": {"aggregate": "fedyogi"}}
    >>> table = compare(nn.Linear(4, 2), (x, (x[:, 0] > 0).long()), methods=both, seeds=2, rounds=3, clients=4)
    >>> [line.method for line in table.lines if line.metric == "accuracy"]
    ['FedAvg', 'FedYogi']
    """
    if not isinstance(methods, Mapping) or not methods:
        raise ConfigError('methods: name at least one, such as methods={"FedAvg": {}, "FedYogi": {...}}')
    what = common.pop("model", None) if model is None else model
    partitioner = common.pop("partition") if is_partitioner(common.get("partition")) else None
    entry = enter(
        what, data, target=target, client=client, test=test, loss=loss, transform=transform, partitioner=partitioner
    )
    study = plan(
        entry, methods, seeds, over or {}, baseline, metrics, {"optimizer": optimizer, **common, **(settings or {})}
    )
    study = replace(study, shared=ratio_of(shared))
    folder = Path(out) if out is not None else default_out(f"compare-{study.called}", False)
    check_cells(study, entry.config, folder)
    # Imported late, because it imports rich.
    from mutirao.studies.study_display import CellBar

    with CellBar(len(study.cells), quiet=how_shown(progress) == "quiet") as watch:
        problems = run_study(study, folder, workers, watch, start=how_started())
    for problem in problems:
        log.warning("not finished: %s", problem)
    if len(problems) == len(study.cells):
        raise ConfigError(problems[0])
    lines = compare_cells(study, folder)
    write_tables(study, lines, folder)
    draw_study(study, folder)
    write_report(folder)
    return Table(folder, tuple(lines), tuple(problems))


def plan(
    entry: Entry,
    methods: Mapping[str, Mapping[str, Any]],
    seeds: int | Iterable[int],
    over: Mapping[str, Sequence[Any]],
    baseline: str | None,
    metrics: Sequence[str],
    common: Mapping[str, Any],
) -> Study:
    """The grid, every cell checked before anything runs."""
    if "seed" in common:
        raise ConfigError("seed: a comparison goes over several; give seeds= a number of them, or a list")
    for method, own in methods.items():
        if not isinstance(own, Mapping):
            raise ConfigError(f"methods: {method!r} is {own!r}, not a dict of settings")
    if isinstance(seeds, int) and seeds < 1:
        raise ConfigError(f"seeds: {seeds} is too small, at least 1 is needed")
    axes = {key: list(values) for key, values in over.items()}
    axes["seed"] = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]

    def settle(own: Mapping[str, Any], place: Pairs) -> Pairs:
        return entry.settle({**common, **own, **dict(place)})

    first = baseline if baseline is not None else next(iter(methods))
    named = [metrics] if isinstance(metrics, str) else metrics
    cells = lay_out(entry.config, methods, axes, first, settle)
    return Study(entry.recipe, cells, tuple(methods), first, tuple(named))


def check_cells(study: Study, config: type[Common], folder: Path) -> None:
    """Refuse a folder that holds a run, or cells with other settings, before anything runs."""
    if (folder / "config.toml").exists():
        raise ConfigError(f"out: {folder} holds a run; choose another")
    for cell in study.cells:
        place = folder / "cells" / cell.name
        if not (place / "config.toml").exists():
            continue
        if other := different_settings(place, study.called, resolve(config, {}, cell.settings)):
            raise ConfigError(f"out: {place} was made with another {other[0]}; choose another out, or remove it")


def how_started() -> Literal["fork", "here"]:
    """Workers are forks, which have the model and data that no other process could be handed, or there are none.

    Elsewhere than on Linux a fork is not safe, nor is it once torch has a device with threads of its own.
    """
    import torch

    if sys.platform == "linux" and not torch.cuda.is_available():
        return "fork"
    return "here"


@dataclass(frozen=True, repr=False)
class Table:
    """Methods by metric: means with intervals, and what may be said against the baseline.

    A comparison makes it; here it is made of one line by hand, to show what a line holds:

    >>> from mutirao.stats import interval
    >>> values = (0.90, 0.92, 0.91)
    >>> mean = interval(values)
    >>> figures = (mean, mean, mean, 0.01, "4", None, float("nan"), values)
    >>> line = MethodResult("FedAvg", "accuracy", *figures, "higher", "baseline")
    >>> Table(Path("runs/compare"), (line,)), round(line.final.mean, 2)
    (Table(runs/compare: FedAvg; 1 lines), 0.91)
    """

    folder: Path
    lines: tuple[MethodResult, ...]
    problems: tuple[str, ...] = field(default=(), compare=False)  # cells that were not finished, and why

    @property
    def frame(self) -> Any:
        """A row a method and metric, as a pandas frame if there is pandas."""
        return as_frame([as_row(line) for line in self.lines])

    @property
    def report(self) -> Page:
        """The study on one page."""
        return Page(self.folder / "report.html")

    def plot(self, kind: str = "bands", **options: Any) -> Picture:
        """A picture of the study: a kind of `mutirao plot` with its options."""
        return draw_kind(self.folder, kind, **options)

    def __str__(self) -> str:
        """The table as a terminal shows it."""
        from rich.console import Console

        from mutirao.studies.study_display import result_tables

        page = StringIO()
        console = Console(file=page, highlight=False, width=120, force_jupyter=False)  # to the text alone
        for table in result_tables(self.lines):
            console.print(table)
        return page.getvalue().rstrip()

    def __repr__(self) -> str:
        methods = list(dict.fromkeys(line.method for line in self.lines))
        return f"Table({self.folder}: {', '.join(methods)}; {len(self.lines)} lines)"

    def _repr_html_(self) -> str:
        """A table a notebook shows; self-contained."""
        full = header_of(self.lines)
        texts = [row_of(line, full) for line in self.lines]
        shown = [i for i in range(len(full)) if any(row[i] for row in texts)]
        head, *rows = [[line[i] for i in shown] for line in (full, *texts)]
        return str(macros(PIECES).titled_table(str(self.folder), head, rows))


def as_row(line: MethodResult) -> dict[str, Any]:
    """A line with its numbers as numbers."""
    tested = comparison_fields(line)
    return {
        "method": line.method,
        "metric": line.metric,
        "mean": line.final.mean,
        "half": line.final.half,
        "best": line.best.mean,
        "difference": tested["difference"],
        "difference_half": tested["difference_half"],
        "p_t": tested["p_t"],
        "p_holm": tested["p_holm"],
        "verdict": line.verdict,
        "values": list(line.values),
    }
