"""The tables that a command prints at its end, and where the rest is."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from mutirao.report.sentences import describe_checkpoints
from mutirao.research_notice import notice_of
from mutirao.runs.reader import Record
from mutirao.runs.unlearning import ROUNDS
from mutirao.studies.study_display import make_table, result_tables

if TYPE_CHECKING:
    from mutirao.config import Part
    from mutirao.runs.replay import Replay
    from mutirao.studies.comparison import MethodResult
    from mutirao.studies.tuning import Trial, Tuning


def show_table(lines: "Sequence[MethodResult]", folder: Path, pictures: Sequence[Path]) -> None:
    """The table of a study, with the columns that fit a terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in result_tables(lines):
        console.print(table)
    files = "table.md, table.tex, table.csv, table.json"
    console.print(f"everything is in {folder}: {files}, {', '.join(p.name for p in pictures)}", soft_wrap=True)
    console.print(f"look at {folder / 'report.html'}", soft_wrap=True)


def show_trials(tuning: "Tuning", trials: "Sequence[Trial]", study: Path) -> None:
    """All trials with the chosen ones in bold, and the command that confirms them."""
    from mutirao.studies.confirmation import trial_rows

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    header, *rows = trial_rows(tuning, trials)
    table = make_table(f"{tuning.metric} on validation data, {tuning.effort} trials for each method", header)
    for row in rows:
        table.add_row(*row, style="bold" if row[header.index("chosen")] else "")
    console.print(table)
    console.print(f"everything is in {study.parent}: trials.md, trials.csv, trials.json", soft_wrap=True)
    console.print(f"confirm it on test data with fresh seeds: mutirao study {study}", soft_wrap=True)


def show_replay(part: "Part", found: "Replay") -> None:
    """Compare another selector's choices with those of a run."""
    console = Console(highlight=False)
    table = make_table(f"{len(found.actual)} rounds, {len(found.clients)} clients", ("", "the run", part.name))
    actual = found.participation(found.actual)
    other = found.participation(found.other)
    for label in ("Gini", "Jain", "least", "most", "never"):
        key = label.lower()
        table.add_row(label, f"{actual.figures[key]:.4g}", f"{other.figures[key]:.4g}")
    # A selector that is given another's history in every round shows nothing of its own fairness.
    if found.own:
        console.print(table)
    same = np.mean(found.overlap)
    console.print(f"{part.name} selects the same clients as the run: {same:.1%} of a round's, on average")
    difference = other.times - actual.times
    order = np.argsort(-difference, kind="stable")
    for text, rows in (("more often", order[:5]), ("less often", order[::-1][:5])):
        changes = [f"{found.clients[i]} {actual.times[i]} -> {other.times[i]}" for i in rows if difference[i]]
        console.print(f"{text}: {', '.join(changes) or 'no client'}", soft_wrap=True)


# Left to the report: of each metric at the clients, mean and worst are enough on a terminal.
ONLY_IN_REPORT = ("_clients", "_p10", "_p50", "_p90")


def conclude(summary: dict[str, Any], folder: Path) -> None:
    """The result of a run as a small table, and where to find the rest."""
    console = Console(highlight=False)
    if summary.get("already"):
        console.print(f"{folder} is already finished: {summary['rounds']} rounds.")
    title = f"{summary['recipe']}, {summary['rounds']} rounds, {summary['seconds']:.1f} s"
    table = make_table(title, ("metric", "final", f"best (round {summary['best_round']})"))
    for name, value in summary["final"].items():
        if name.endswith(ONLY_IN_REPORT):
            continue
        # None if clients were evaluated at the end only.
        best = summary["best"].get(name)
        table.add_row(name, f"{value:.4f}", "" if best is None else f"{best:.4f}")
    console.print(table)
    console.print(f"model {summary['digest'][:16]}  seed {summary['seed']}")
    if "checkpoints" in summary:
        console.print(describe_checkpoints(summary["checkpoints"]), soft_wrap=True)
    notice = notice_of(Record.of(folder).config)
    if notice:
        console.print(notice, soft_wrap=True)
    console.print(f"everything is in {folder}; look at {folder / 'report.html'}", soft_wrap=True)


def conclude_forgetting(record: dict[str, Any], folder: Path) -> None:
    """The metrics before and after a client was unlearned, and where to find the rest."""
    console = Console(highlight=False)
    first = record["first_contribution"]
    contribution = "contributed to no round" if first is None else f"first contributed in round {first}"
    other_part = record.get("had_part_in", ROUNDS)
    if other_part != ROUNDS:
        contribution = f"was one of {other_part}, made again without it, and {contribution}"
    kept = record["rounds_kept"]
    console.print(f"{record['client']} {contribution}; rounds kept: {kept}, trained again: {record['rounds_redone']}")
    if first is not None and kept < first - 1:
        console.print(f"there is no checkpoint between rounds {kept} and {first}; keep=all keeps all checkpoints")
    table = make_table(None, ("metric", "before", "after"))
    for name, value in record["after"].items():
        table.add_row(name, f"{record['before'].get(name, float('nan')):.4f}", f"{value:.4f}")
    console.print(table)
    console.print(f"everything is in {folder}; the record is {folder / 'forget.json'}", soft_wrap=True)
