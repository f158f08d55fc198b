"""All runs and studies below a folder: found by one walk, known by a few small reads, read again only if changed."""

import csv
import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.metrics import direction_of
from mutirao.report.state import RunState, holder, state_of
from mutirao.runs.reader import clean, json_of, number, text_of
from mutirao.runs.schema import likely_judge
from mutirao.runs.trails import table_in

DEEPEST = 8
SKIP = {"checkpoints", "node_modules", "__pycache__"}
LINE = 1 << 16  # bytes in which the last line of an audit trail surely lies
Facts = dict[str, Any]


@dataclass
class History:
    """The rows of `history.csv`, read on from where the last reading ended."""

    path: Path
    columns: list[str] = field(default_factory=list)
    rows: list[list[float | None]] = field(default_factory=list)
    offset: int = 0
    _head: bytes = b""
    _seen: tuple[int, int] = (0, 0)
    _inode: int = 0

    def read_on(self) -> int:
        """Read what is new; return the row at which the new ones begin, or -1 if nothing is new."""
        try:
            stat = self.path.stat()
        except OSError:
            return -1
        if (stat.st_size, stat.st_mtime_ns) == self._seen:
            return -1
        with self.path.open("rb") as file:
            head = file.readline(LINE)
            replaced = self._inode not in (0, stat.st_ino)  # a resumed run drops the rows of an unfinished round so
            if head != self._head or stat.st_size < self.offset or replaced:
                self.columns, self.rows, self.offset, self._head = [], [], len(head), head
                self.columns = next(csv.reader(head.decode("utf-8", errors="replace").splitlines()), [])
            file.seek(self.offset)
            block = file.read()
        self._seen = (stat.st_size, stat.st_mtime_ns)
        self._inode = stat.st_ino
        whole = block[: block.rfind(b"\n") + 1]
        self.offset += len(whole)
        start = len(self.rows)
        for cells in csv.reader(whole.decode("utf-8", errors="replace").splitlines()):
            if len(cells) == len(self.columns):
                self.rows.append([None if (v := number(c)) != v else v for c in cells])
        return start if len(self.rows) > start or start == 0 else -1


@dataclass
class Item:
    """One run or study."""

    key: str
    path: Path
    kind: str  # run or study
    study: str = ""  # the key of the study it is a cell of
    facts: Facts = field(default_factory=dict)
    stamp: tuple[Any, ...] = ()
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.path / "history.csv")

    def looks(self) -> tuple[Any, ...]:
        """What changes whenever anything of interest does; a few stats, no reading."""
        names = ("audit.jsonl", "summary.json", "table.json") if self.kind == "run" else ("table.json", "study.json")
        marks: list[Any] = [mark_of(self.path / name) for name in names]
        if self.facts.get("state") != "finished":
            marks += [holder(self.path), mark_of(self.path / "run.log")]
        return tuple(marks)

    def refresh(self) -> bool:
        """Read the facts again if anything changed; whether it did."""
        stamp = self.looks()
        if stamp == self.stamp and self.facts:
            return False
        self.facts = clean(facts_of_run(self) if self.kind == "run" else facts_of_study(self))
        self.stamp = self.looks()
        return True


def mark_of(path: Path) -> tuple[int, int] | None:
    """What changes whenever a file does; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def ends_of(trail: Path) -> tuple[Facts, Facts, bool]:
    """The first and the last event of an audit trail, and whether the run was ever resumed."""
    try:
        content = trail.read_bytes()
    except OSError:
        return {}, {}, False
    whole = content[: content.rfind(b"\n")]
    first, last = whole.partition(b"\n")[0], whole[-LINE:].rpartition(b"\n")[2]
    return event(first), event(last), b'"event": "resumed"' in content


def event(line: bytes) -> Facts:
    """One event, or nothing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def facts_of_run(item: Item) -> Facts:
    """What the list shows of a run."""
    first, last, resumed = ends_of(item.path / "audit.jsonl")
    state = state_of(item.path, last, resumed)
    try:
        config = tomllib.loads(text_of(item.path / "config.toml"))
    except (ValueError, RecursionError):
        config = {}
    summary = json_of(item.path / "summary.json") if state.name == "finished" else {}
    final, best = table_in(summary, "final"), table_in(summary, "best")
    judge, made = str(summary.get("judge", "")), summary.get("rounds", 0)
    facts = common(item, state) | {
        "recipe": str(config.get("recipe", "")),
        "rounds": made,
        "of": config.get("rounds", 0),
        "judge": judge,
        "value": final.get(judge),
        "best": best.get(judge),
        "began": str(first.get("time", "")),
        "changed": str(last.get("time", "")),
        "clients": summary.get("clients") or config.get("clients"),
    }
    if not summary:
        item.history.read_on()
        facts |= latest(item.history)
    ways = {name: direction_of(name, table_in(summary, "directions")) for name in final or item.history.columns}
    return facts | {"directions": {name: way for name, way in ways.items() if way}}


def latest(history: History) -> Facts:
    """The last values of a run that is not finished."""
    judge = likely_judge(history.columns)
    values = [v for row in history.rows if judge and (v := row[history.columns.index(judge)]) is not None]
    way = direction_of(judge)
    best = (min if way == "lower" else max)(values) if values and way else None
    return {"rounds": len(history.rows), "judge": judge, "value": values[-1] if values else None, "best": best}


def facts_of_study(item: Item) -> Facts:
    """What the list shows of a study."""
    plan, table = json_of(item.path / "study.json"), json_of(item.path / "table.json")
    pid, alive = holder(item.path)
    cells = plan.get("cells")
    done, begun = (len([*item.path.glob(f"cells/*/*/{name}")]) for name in ("summary.json", "config.toml"))
    total = max(len(cells) if isinstance(cells, list) else 0, begun)
    name = "running" if alive else "finished" if done >= total > 0 and table else "stopped"
    return common(item, RunState(name, pid=pid)) | {
        "recipe": str(plan.get("recipe") or table.get("recipe") or ""),
        "rounds": done,
        "of": total,
        "judge": "",
        "began": "",
        "changed": "",
        "resumable": bool(plan.get("file")),
    }


def common(item: Item, state: RunState) -> Facts:
    """What runs and studies have in common."""
    return {
        "id": item.key,
        "name": item.path.name if item.key == "." else item.key,
        "kind": item.kind,
        "study": item.study,
        "state": state.name,
        "why": state.why,
        "resumed": state.resumed,
        "ours": bool(state.pid) and not item.study,  # one cell cannot be ended without breaking its study
        "resumable": item.kind == "run" and not item.study,
    }


class Shelf:
    """The runs and studies below a folder, by their path relative to it; nothing outside of it can be named."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.items: dict[str, Item] = {}

    def walk(self) -> list[str]:
        """Look for folders that came or went; return the keys that went. Symbolic links are not followed."""
        found: dict[str, Item] = {}
        self._enter(self.root, "", 0, found)
        gone = [key for key in self.items if key not in found]
        for key in gone:
            del self.items[key]
        for key, item in found.items():
            self.items.setdefault(key, item)
        return gone

    def _enter(self, path: Path, study: str, depth: int, found: dict[str, Item]) -> None:
        try:
            entries = {e.name: e for e in os.scandir(path)}
        except OSError:
            return
        key = path.relative_to(self.root).as_posix()
        if "config.toml" in entries and ("audit.jsonl" in entries or ".lock" in entries):
            found[key] = Item(key, path, "run", study)
            return
        if "cells" in entries and ("study.json" in entries or "table.json" in entries or ".lock" in entries):
            found[key], study = Item(key, path, "study"), key
        if depth < DEEPEST:
            for name, entry in entries.items():
                if not name.startswith(".") and name not in SKIP and entry.is_dir(follow_symlinks=False):
                    self._enter(path / name, study, depth + 1, found)

    def file(self, key: str, name: str) -> Path | None:
        """A plain file of a run, if it lies inside the folder and is no link to elsewhere."""
        item = self.items.get(key)
        if item is None or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", name):
            return None
        path = item.path / name
        inside = path.resolve().is_relative_to(item.path.resolve()) and path.resolve().is_relative_to(self.root)
        return path if inside and path.is_file() and not path.is_symlink() else None
