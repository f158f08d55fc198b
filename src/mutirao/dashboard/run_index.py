"""All runs and studies below a folder: found by one walk, known by a few small reads, read again only if changed."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.dashboard.curves import History
from mutirao.dashboard.run_summary import Facts, facts_of_run, facts_of_study, problem_in, silence, unreadable
from mutirao.report.run_state import holder
from mutirao.runs.reader import clean

DEEPEST = 8
SKIP = {"checkpoints", "node_modules", "__pycache__"}
AT_REST = frozenset({"finished", "failed", "stopped", "unreadable"})
RUN = ("audit.jsonl", "summary.json", "config.toml", "notes.md", "run.log", ".lock")
STUDY = ("table.json", "study.json", "notes.md", ".lock")


@dataclass(eq=False)
class Item:
    """One run or study."""

    key: str
    path: Path
    kind: str  # run or study
    study: str = ""  # the key of the study it is a cell of
    facts: Facts = field(default_factory=dict)
    text: str = ""  # the facts as JSON
    stamp: tuple[Any, ...] = ()
    history: History = field(init=False)
    files: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.path / "history.csv")
        self.files = tuple(f"{self.path}/{name}" for name in (RUN if self.kind == "run" else STUDY))

    @property
    def rests(self) -> bool:
        """Whether nothing is expected to happen there soon."""
        return self.facts.get("state") in AT_REST

    def pulse(self) -> tuple[Any, ...]:
        """Whether somebody is at work there, and for how long nothing was heard."""
        return holder(self.path), silence(self.path, self.history)

    def is_due(self) -> bool:
        """Whether something in the folder is not as it was when the facts were read."""
        marks = tuple(map(mark_of, self.files))
        return not self.facts or self.stamp != self.stamp_with(marks)

    def stamp_with(self, marks: tuple[Any, ...]) -> tuple[Any, ...]:
        """What differs as soon as the facts may: the marks of the files and, of a run at work, its pulse."""
        if self.rests:
            return marks
        return (*marks, *self.pulse())

    def refresh(self, cells: list[Facts] | None = None) -> bool:
        """Read the facts again if anything changed; whether they did. Of a study, with the facts of its cells."""
        # Before reading: what changes meanwhile is seen the next time.
        marks = tuple(map(mark_of, self.files))
        if cells is None and not self.is_due():
            return False
        before = self.facts
        self.facts = clean(self.named() | self.read(cells or []))
        # One cell cannot be ended without breaking its study.
        if self.study:
            self.facts |= {"ours": False, "resumable": False}
        self.stamp = self.stamp_with(marks)
        # Curves are kept in memory only for runs that grow or are looked at.
        if self.rests:
            self.history = History(self.path / "history.csv")
        if self.facts == before:
            return False
        self.text = json.dumps(self.facts, separators=(",", ":"))
        return True

    def read(self, cells: list[Facts]) -> Facts:
        """The facts, whatever lies in the folder."""
        try:
            if problem := problem_in(self.path):
                return unreadable(problem)
            if self.kind == "run":
                return facts_of_run(self.path, self.history)
            return facts_of_study(self.path, cells)
        except Exception as error:  # one odd folder must not stop the page for all others
            return unreadable(f"it cannot be read: {error or type(error).__name__}")

    def named(self) -> Facts:
        """What it is."""
        name = self.path.name if self.key == "." else self.key
        return {"id": self.key, "name": name, "kind": self.kind, "study": self.study}


def mark_of(path: str | Path) -> tuple[int, int, int] | None:
    """What changes whenever a file does; None if it is not there. A link is not followed."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


class Shelf:
    """The runs and studies below a folder, by their path relative to it; nothing outside of it can be named."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.items: dict[str, Item] = {}

    def walk(self) -> tuple[list[Item], list[str]]:
        """Look for folders that came or went; return both. Symbolic links are not followed."""
        found: dict[str, Item] = {}
        self._enter(str(self.root), ".", "", 0, found)
        gone = [key for key in self.items if key not in found]
        came = [item for key, item in found.items() if key not in self.items]
        for key in gone:
            del self.items[key]
        self.items |= {item.key: item for item in came}
        return came, gone

    def _enter(self, path: str, key: str, study: str, depth: int, found: dict[str, Item]) -> None:
        known = self.items.get(key)
        if known and known.kind == "run" and known.study == study and mark_of(f"{path}/config.toml"):
            found[key] = known  # nothing below it is looked for
            return
        try:
            entries = {e.name: e for e in os.scandir(path)}
        except OSError:
            return
        if "config.toml" in entries and ("audit.jsonl" in entries or ".lock" in entries):
            found[key] = Item(key, Path(path), "run", study)
            return
        if "cells" in entries and ("study.json" in entries or "table.json" in entries or ".lock" in entries):
            if known is None or known.kind != "study":
                known = Item(key, Path(path), "study")
            found[key] = known
            study = key
        if depth < DEEPEST:
            for name, entry in entries.items():
                if not name.startswith(".") and name not in SKIP and entry.is_dir(follow_symlinks=False):
                    self._enter(f"{path}/{name}", name if key == "." else f"{key}/{name}", study, depth + 1, found)

    def cells_of(self, study: str) -> list[Item]:
        """The runs of a study that have begun."""
        return [item for item in self.items.values() if item.study == study]

    def file(self, key: str, name: str) -> Path | None:
        """A plain file of a run, if it lies inside the folder and is no link to elsewhere."""
        item = self.items.get(key)
        if item is None or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", name):
            return None
        path = item.path / name
        inside = path.resolve().is_relative_to(item.path.resolve()) and path.resolve().is_relative_to(self.root)
        if inside and path.is_file() and not path.is_symlink():
            return path
        return None
