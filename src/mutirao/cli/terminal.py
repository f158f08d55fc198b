"""What a person sees while a run goes on: a bar on a terminal, plain lines when piped, a table at the end."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mutirao.core.rounds import Round, Run
from mutirao.recipes.task import Task

if TYPE_CHECKING:
    from mutirao.config import Part
    from mutirao.runs.replay import Replay
    from mutirao.studies.comparison import Line


BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Follows a run; call it after each round.

    `auto` is one line that moves on a terminal and `lines` elsewhere: plain lines, a second apart; `jsonl` prints every
    round as JSON on standard output; `quiet` nothing.
    """

    def __init__(self, rounds: int, quiet: bool = False, mode: str = "auto") -> None:
        self.rounds = rounds
        self.mode = "quiet" if quiet else mode
        self.live: Any = None
        self.values: list[float] = []
        self._said = 0.0
        self._began = time.monotonic()
        self._first = 0
        self._bytes = 0
        self._blocks = can_say(BLOCKS)  # asked now: a live display puts its own stream in the place of this one

    def __enter__(self) -> "Progress":
        if self.mode == "auto" and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True, highlight=False), transient=True, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, run: Run, done: Round, task: Task) -> None:
        """Show a round that was made."""
        row = done.row
        if self.mode == "quiet":
            return
        if self.mode == "jsonl":
            print(json_line({"event": "round", "of": self.rounds, **row}), flush=True)
            return
        if not self._first:  # the time before the first round says nothing about the next
            self._first, self._began = run.round, time.monotonic()
        self._bytes += int(row["bytes_down"]) + int(row["bytes_up"])
        if task.judge in row:
            self.values.append(float(row[task.judge]))
        last = run.round == self.rounds
        if self.live is not None:
            self.live.update(self.line(run.round, row, task.judge, self.live.console.width), refresh=True)
        elif time.monotonic() - self._said > 1 or last:
            self._said = time.monotonic()
            print(self.line(run.round, row, task.judge, 120), file=sys.stderr, flush=True)

    def line(self, round: int, row: Mapping[str, Any], judge: str, width: int) -> str:
        """What fits: the round first, then the metric, who was lost, a curve, the time left, clients and bytes."""
        made = round - self._first
        left = (time.monotonic() - self._began) / made * (self.rounds - round) if made else 0.0
        lost = int(row["failed"]) + int(row["rejected"])
        curve = sparkline(self.values, 16 if width >= 80 else 8) if self._blocks and len(self.values) > 1 else ""
        parts = [  # (order on the line, text), the most wanted first
            (0, f"round {round}/{self.rounds}"),
            (2, f"{judge} {row[judge]:.4f}" if judge in row else ""),
            (3, f"{lost} of {row['selected']} clients lost" if lost else ""),
            (1, curve),
            (5, f"{clock(left)} left" if made and round < self.rounds else ""),
            (4, "" if lost else f"{row['selected']} clients"),
            (6, size_of(self._bytes)),
        ]
        kept: list[tuple[int, str]] = []
        for order, text in parts:
            if text and (not kept or sum(len(t) + 2 for _, t in kept) + len(text) < width):
                kept.append((order, text))
        return "  ".join(text for _, text in sorted(kept))[: max(1, width - 1)]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of block letters, the last value at its end."""
    known = [v for v in values if v == v and abs(v) != float("inf")]
    if not known:
        return ""
    step = max(1.0, len(known) / width)
    some = [known[min(len(known) - 1, int((i + 1) * step) - 1)] for i in range(min(width, len(known)))]
    share = 0.5 if max(known) - min(known) == float("inf") else 1.0  # two huge numbers may be too far apart
    low, high = share * min(known), share * max(known)
    return "".join(BLOCKS[int((share * v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in some)


def can_say(text: str) -> bool:
    """Whether the terminal knows these letters."""
    try:
        text.encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def clock(seconds: float) -> str:
    """1:05, or 2:00:00."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def size_of(many: float) -> str:
    """Bytes as people say them."""
    from mutirao.report.words import size

    return size(many)


def json_line(content: Mapping[str, Any]) -> str:
    """A line of JSON; what is not finite is null."""
    from mutirao.report.record import clean

    return json.dumps(clean(content), allow_nan=False)


class Cells:
    """Follows a study; call it after each cell."""

    def __init__(self, cells: int, quiet: bool = False) -> None:
        self.cells = cells
        self.quiet = quiet
        self.bar: Any = None

    def __enter__(self) -> "Cells":
        if not self.quiet and sys.stderr.isatty():
            self.bar, self.line = bar("cell", self.cells)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, name: str) -> None:
        """Show a cell that was finished."""
        if self.bar is not None:
            self.bar.update(self.line, completed=done, note=name)
        elif not self.quiet:
            print(f"cell {done}/{self.cells}  {name}", file=sys.stderr, flush=True)


def bar(unit: str, total: int) -> tuple[Any, Any]:
    """A bar on the terminal that counts units, with room for a note and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"))
    shown = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    shown.start()
    return shown, shown.add_task(unit, total=total, note="")


def show_table(lines: "Sequence[Line]", folder: Path, pictures: Sequence[Path]) -> None:
    """The table of a study, the columns that fit a terminal, and where the rest is."""
    from rich.console import Console
    from rich.table import Table

    from mutirao.studies.comparison import HEADER, cells_of

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    shown = ["method", "mean", "95% t", "wobble", "rounds to", "difference", "p Holm", "verdict"]
    if not any(line.reached for line in lines):
        shown.remove("rounds to")
    for metric in dict.fromkeys(line.metric for line in lines):
        table = Table(title=metric)
        for name in shown:
            table.add_column(name, justify="left" if name in ("method", "verdict") else "right", no_wrap=True)
        for line in (x for x in lines if x.metric == metric):
            row = dict(zip(HEADER, cells_of(line), strict=True))
            table.add_row(*(row[name] for name in shown))
        console.print(table)
    files = "table.md, table.tex, table.csv, table.json"
    console.print(f"everything is in {folder}: {files}, {', '.join(p.name for p in pictures)}", soft_wrap=True)


def show_replay(part: "Part", found: "Replay") -> None:
    """How another policy's choices compare with those of a run."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{len(found.actual)} rounds, {len(found.clients)} clients")
    for name in ("", "the run", part.name):
        table.add_column(name, justify="right" if name else "left")
    both = [found.participation(which) for which in (found.actual, found.other)]
    for label, key in (("Gini", "gini"), ("Jain", "jain"), ("least", "least"), ("most", "most"), ("never", "never")):
        table.add_row(label, *(f"{p.figures[key]:.4g}" for p in both))
    if found.own:  # asked round by round about another's history, a policy's total says nothing of its fairness
        console.print(table)
    same = np.mean(found.overlap)
    console.print(f"{part.name} selects the same clients as the run: {same:.1%} of a round's, on average")
    gain = both[1].times - both[0].times
    order = np.argsort(-gain, kind="stable")
    for text, rows in (("more often", order[:5]), ("less often", order[::-1][:5])):
        told = [f"{found.clients[i]} {both[0].times[i]} -> {both[1].times[i]}" for i in rows if gain[i]]
        console.print(f"{text}: {', '.join(told) or 'nobody'}", soft_wrap=True)


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


def conclude_forgetting(record: dict[str, Any], folder: Path) -> None:
    """What a withdrawal changed, before and after, and where to find the rest."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    first = record["first_contribution"]
    had = "had no part in any round" if first is None else f"first contributed in round {first}"
    kept, redone = record["rounds_kept"], record["rounds_redone"]
    console.print(f"{record['client']} {had}; rounds kept: {kept}, made again: {redone}")
    table = Table("metric")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for name, value in record["after"].items():
        table.add_row(name, f"{record['before'].get(name, float('nan')):.4f}", f"{value:.4f}")
    console.print(table)
    console.print(f"everything is in {folder}; the record is {folder / 'forget.json'}", soft_wrap=True)
