"""The progress of a run: a live line on a terminal, plain lines when piped, or JSON for programs."""

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from mutirao.core.rounds import Round, Run
from mutirao.experiments.task import Task
from mutirao.runs.reader import clean

BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows the progress of a run; call it after each round.

    `auto` is one live line on a terminal or in a notebook, and `lines` elsewhere: plain lines, at most one a second.
    `jsonl` prints every round as JSON on standard output; `quiet` prints nothing.
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
        # Asked here, since a live display later replaces the stream.
        self._blocks = can_encode(BLOCKS)

    def __enter__(self) -> "Progress":
        if self.mode != "auto":
            return self
        self.live = in_notebook()
        if self.live is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True, highlight=False), transient=True, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live is not None and not isinstance(self.live, NotebookLine):
            self.live.stop()

    def __call__(self, run: Run, done: Round, task: Task) -> None:
        """Show a finished round."""
        row = done.row
        if self.mode == "quiet":
            return
        if self.mode == "jsonl":
            print(json_line({"event": "round", "of": self.rounds, **row}), flush=True)
            return
        # The clock starts after the first round: preparation before it says nothing about the time of the next.
        if not self._first:
            self._first = run.round
            self._began = time.monotonic()
        self._bytes += int(row["bytes_down"]) + int(row["bytes_up"])
        if task.judge in row:
            self.values.append(float(row[task.judge]))
        last = run.round == self.rounds
        if isinstance(self.live, NotebookLine):
            self.live.update(self.line(run.round, row, task.judge, 100), last)
        elif self.live is not None:
            self.live.update(self.line(run.round, row, task.judge, self.live.console.width), refresh=True)
        elif time.monotonic() - self._said > 1 or last:
            self._said = time.monotonic()
            print(self.line(run.round, row, task.judge, 120), file=sys.stderr, flush=True)

    def line(self, round: int, row: Mapping[str, Any], monitor: str, width: int) -> str:
        """As much as fits: round, metric, lost clients, a curve, the time left, clients and bytes."""
        made = round - self._first
        lost = int(row["failed"]) + int(row["rejected"])
        # (position on the line, text), the most important first: what comes last is left out of a narrow line.
        parts = [(0, f"round {round}/{self.rounds}")]
        if monitor in row:
            parts.append((2, f"{monitor} {row[monitor]:.4f}"))
        if lost:
            parts.append((3, f"{lost} of {row['selected']} clients lost"))
        if self._blocks and len(self.values) > 1:
            parts.append((1, sparkline(self.values, 16 if width >= 80 else 8)))
        if made and round < self.rounds:
            left = (time.monotonic() - self._began) / made * (self.rounds - round)
            parts.append((5, f"{clock(left)} left"))
        if not lost:
            parts.append((4, f"{row['selected']} clients"))
        parts.append((6, size(self._bytes)))
        kept: list[tuple[int, str]] = []
        for order, text in parts:
            if text and (not kept or sum(len(t) + 2 for _, t in kept) + len(text) < width):
                kept.append((order, text))
        return "  ".join(text for _, text in sorted(kept))[: max(1, width - 1)]


class NotebookLine:
    """One line below a notebook's cell, written over at most four times a second."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._said = 0.0

    def update(self, line: str, last: bool = False) -> None:
        """Replace the line."""
        if not last and time.monotonic() - self._said < 0.25:
            return
        display = importlib.import_module("IPython.display").display
        self._said = time.monotonic()
        content = {"text/plain": line}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def in_notebook() -> NotebookLine | None:
    """A line in the running notebook; None outside of notebooks."""
    # IPython is not imported here: in a notebook it is loaded already.
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        return NotebookLine()
    return None


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of block characters, with the last value at its end."""
    known = [v for v in values if v == v and abs(v) != float("inf")]
    if not known:
        return ""
    step = max(1.0, len(known) / width)
    some = [known[min(len(known) - 1, int((i + 1) * step) - 1)] for i in range(min(width, len(known)))]
    share = 1.0
    # The difference of huge numbers overflows; that of their halves does not.
    if max(known) - min(known) == float("inf"):
        share = 0.5
    low = share * min(known)
    high = share * max(known)
    return "".join(BLOCKS[int((share * v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in some)


def can_encode(text: str) -> bool:
    """Whether the terminal can show these characters."""
    try:
        text.encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def clock(seconds: float) -> str:
    """Seconds as text: 1:05, or 2:00:00."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}"


def size(many: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(many) < 1000:
            return f"{many:.3g} {unit}"
        many /= 1000
    return f"{many:.3g} TB"


def json_line(content: Mapping[str, Any]) -> str:
    """A line of JSON; NaN and infinity become null."""
    return json.dumps(clean(content), allow_nan=False)
