"""What a person sees of what has ended: tables, and where the rest is."""

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
from mutirao.studies.study_display import make_table, tables_of

if TYPE_CHECKING:
    from mutirao.config import Part
    from mutirao.runs.replay import Replay
    from mutirao.studies.comparison import Line
    from mutirao.studies.tuning import Trial, Tuning


def show_table(lines: "Sequence[Line]", folder: Path, pictures: Sequence[Path]) -> None:
    """The table of a study, the columns that fit a terminal, and where the rest is."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables_of(lines):
        console.print(table)
    files = "table.md, table.tex, table.csv, table.json"
    console.print(f"everything is in {folder}: {files}, {', '.join(p.name for p in pictures)}", soft_wrap=True)
    console.print(f"look at {folder / 'report.html'}", soft_wrap=True)


def show_trials(tuning: "Tuning", trials: "Sequence[Trial]", study: Path) -> None:
    """All trials, the chosen ones marked, and how they are confirmed."""
    from mutirao.studies.confirmation import rows_of

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    head, *body = rows_of(tuning, trials)
    table = make_table(f"{tuning.metric} on validation data, {tuning.effort} trials for each method", head)
    for row in body:
        table.add_row(*row, style="bold" if row[head.index("chosen")] else "")
    console.print(table)
    console.print(f"everything is in {study.parent}: trials.md, trials.csv, trials.json", soft_wrap=True)
    console.print(f"confirm it on test data with fresh seeds: mutirao study {study}", soft_wrap=True)


def show_replay(part: "Part", found: "Replay") -> None:
    """How another policy's choices compare with those of a run."""
    console = Console(highlight=False)
    table = make_table(f"{len(found.actual)} rounds, {len(found.clients)} clients", ("", "the run", part.name))
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


IN_REPORT = (
    "_clients",
    "_p10",
    "_p50",
    "_p90",
)  # of each metric at the clients: the mean and the worst are enough here


def conclude(summary: dict[str, Any], folder: Path) -> None:
    """The result of a run as a small table, and where to find the rest."""
    console = Console(highlight=False)
    if summary.get("already"):
        console.print(f"{folder} is already finished: {summary['rounds']} rounds.")
    title = f"{summary['recipe']}, {summary['rounds']} rounds, {summary['seconds']:.1f} s"
    table = make_table(title, ("metric", "final", f"best (round {summary['best_round']})"))
    for name, value in summary["final"].items():
        if name.endswith(IN_REPORT):
            continue
        best = summary["best"].get(name)  # nothing where clients were asked at the end alone
        table.add_row(name, f"{value:.4f}", "" if best is None else f"{best:.4f}")
    console.print(table)
    console.print(f"model {summary['digest'][:16]}  seed {summary['seed']}")
    if "checkpoints" in summary:
        console.print(describe_checkpoints(summary["checkpoints"]), soft_wrap=True)
    if said := notice_of(Record.of(folder).config):
        console.print(said, soft_wrap=True)
    console.print(f"everything is in {folder}; look at {folder / 'report.html'}", soft_wrap=True)


def conclude_forgetting(record: dict[str, Any], folder: Path) -> None:
    """What a withdrawal changed, before and after, and where to find the rest."""
    console = Console(highlight=False)
    first = record["first_contribution"]
    had = "had no part in any round" if first is None else f"first contributed in round {first}"
    if (part := record.get("had_part_in", ROUNDS)) != ROUNDS:
        had = f"was one of {part}, made again without it, and {had}"
    kept, redone = record["rounds_kept"], record["rounds_redone"]
    console.print(f"{record['client']} {had}; rounds kept: {kept}, made again: {redone}")
    if first is not None and kept < first - 1:
        console.print(f"no checkpoint after round {kept} and before round {first} was kept: keep=all keeps them all")
    table = make_table(None, ("metric", "before", "after"))
    for name, value in record["after"].items():
        table.add_row(name, f"{record['before'].get(name, float('nan')):.4f}", f"{value:.4f}")
    console.print(table)
    console.print(f"everything is in {folder}; the record is {folder / 'forget.json'}", soft_wrap=True)
