"""A study on the terminal: a progress bar, and its tables."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mutirao.runs.progress import in_notebook
from mutirao.studies.comparison import BESIDE, MethodResult, header_of, row_of

TEXTS = ("", "metric", "method", "verdict", "within", "settings", "chosen", "fault")  # columns of text


class CellBar:
    """Shows the progress of a study; call it after each cell."""

    def __init__(self, cells: int, quiet: bool = False) -> None:
        self.cells = cells
        self.quiet = quiet
        self.bar: Any = None
        self.live = None if quiet else in_notebook()

    def __enter__(self) -> "CellBar":
        if not self.quiet and self.live is None and sys.stderr.isatty():
            columns = (TextColumn("cell"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self.bar.start()
            self.line = self.bar.add_task("cell", total=self.cells, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, name: str) -> None:
        """Show a finished cell."""
        line = f"cell {done}/{self.cells}  {name}"
        if self.bar is not None:
            self.bar.update(self.line, completed=done, note=name)
        elif self.live is not None:
            self.live.update(line, done == self.cells)
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)


def make_table(title: str | None, names: Sequence[str], **options: Any) -> Table:
    """An empty table, with numbers aligned to the right."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in TEXTS else "right", **options)
    return table


def result_tables(lines: Sequence[MethodResult]) -> list[Table]:
    """The tables of a study for each metric, with the columns that fit a terminal, and those of published values."""
    shown = ["method", "mean", "95% t", "wobble", "rounds to", "difference", "p t", "p Holm", "verdict"]
    if not any(line.reached for line in lines):
        shown.remove("rounds to")
    tables = []
    for metric in dict.fromkeys(line.metric for line in lines):
        of_metric = [line for line in lines if line.metric == metric]
        tables.append(filled(metric, shown, of_metric))
        with_published = [line for line in of_metric if line.published]
        if with_published:
            beside = [name for name in header_of(with_published) if name in BESIDE]
            columns = ["method", "mean", "95% t", *beside]
            if "published rounds" in beside:
                columns.insert(3, "rounds to")
            tables.append(filled(f"{metric}, published", columns, with_published))
    return tables


def filled(title: str, shown: Sequence[str], lines: Sequence[MethodResult]) -> Table:
    """A table of these results and columns."""
    table = make_table(title, shown, no_wrap=True)
    for line in lines:
        table.add_row(*row_of(line, shown))
    return table
