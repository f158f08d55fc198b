"""What a person sees while a run goes on: a bar on a terminal, plain lines when piped, a table at the end."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from mutirao.recipes import Task
from mutirao.rounds import Round, Run


class Progress:
    """Follows a run; call it after each round."""

    def __init__(self, rounds: int, quiet: bool = False) -> None:
        self.rounds = rounds
        self.quiet = quiet
        self.bar: Any = None
        self._said = 0.0

    def __enter__(self) -> "Progress":
        if self.quiet or not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"))
        self.bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self.bar.start()
        self.line = self.bar.add_task("rounds", total=self.rounds, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, run: Run, done: Round, task: Task) -> None:
        """Show a round that was made."""
        if self.quiet:
            return
        note = f"{task.judge} {done.row[task.judge]:.4f}" if task.judge in done.row else ""
        if done.row["failed"] or done.row["rejected"]:
            note += f", {done.row['failed'] + done.row['rejected']} of {done.row['selected']} clients lost"
        if self.bar is not None:
            self.bar.update(self.line, completed=run.round, note=note)
        elif time.monotonic() - self._said > 1 or run.round == self.rounds:
            self._said = time.monotonic()
            print(f"round {run.round}/{self.rounds}  {note}", file=sys.stderr, flush=True)


def conclude(summary: dict[str, Any], folder: Path) -> None:
    """The result of a run as a small table, and where to find the rest."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if summary.get("already"):
        console.print(f"{folder} is already finished: {summary['rounds']} rounds.")
    table = Table(title=f"{summary['recipe']}, {summary['rounds']} rounds, {summary['seconds']:.1f} s")
    table.add_column("metric")
    table.add_column("final", justify="right")
    table.add_column(f"best (round {summary['best_round']})", justify="right")
    for name, value in summary["final"].items():
        table.add_row(name, f"{value:.4f}", f"{summary['best'].get(name, float('nan')):.4f}")
    console.print(table)
    console.print(f"model {summary['digest'][:16]}  seed {summary['seed']}")
    console.print(f"everything is in {folder}; look at {folder / 'report.html'}", soft_wrap=True)
