"""What the list of runs shows of each run or study: state, settings and clients, from the smallest files there are.

Nothing in them is trusted. Settings of thousands of runs are read line by line, as most lines are the same in all;
`clients.csv` may have a million rows and is counted, not kept.
"""

import json
import os
import re
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import flatten
from mutirao.dashboard.curves import LINE, History, read_column, spark
from mutirao.metrics import direction_of
from mutirao.report.run_state import RunState, holder, state_of
from mutirao.report.study_report import best_of
from mutirao.runs.audit_trail import subtable
from mutirao.runs.changed_settings import changed_settings
from mutirao.runs.csv_tables import likely_monitor
from mutirao.runs.notes import read_notes
from mutirao.runs.reader import Columns, Floats, json_of, text_in

Settings = dict[str, Any]
TABLE = re.compile(r"\[([A-Za-z0-9_-]+)\]")


def read_settings(text: str) -> dict[str, Any]:
    """What a configuration says; ValueError if it is not TOML.

    Lines of the form our own files have, `[table]` and `key = value`, are looked up; anything else is read as TOML is.
    """
    out: dict[str, Any] = {}
    table = out
    for line in text.splitlines():
        if not line or line.isspace():
            continue
        if found := TABLE.fullmatch(line):
            if found[1] in out:
                return tomllib.loads(text)
            table = out[found[1]] = {}
            continue
        pair = read_line(line)
        if pair is None or pair[0] in table:
            return tomllib.loads(text)
        table[pair[0]] = pair[1]
    return out


@lru_cache(20_000)
def read_line(line: str) -> tuple[str, Any] | None:
    """`key = value`, if the line is that and whole by itself."""
    try:
        ((key, value),) = tomllib.loads(line).items()
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str | int | float | bool):
        return (key, value)
    return None


def settings_of(config: dict[str, Any]) -> Settings:
    """A configuration as dotted keys; a part's name stands for the part."""
    pairs = ((key.removesuffix(".name"), value) for key, value in flatten(config))
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in pairs}


Facts = dict[str, Any]
READ = frozenset(
    {"config.toml", "history.csv", "audit.jsonl", "summary.json", "clients.csv", "partition.csv", "plane.csv"}
)
READ |= {"groups.json", "run.log", "study.json", "table.json", "reproduction.json", "notes.md", ".lock"}
LARGEST = {"config.toml": 1 << 20, "summary.json": 1 << 24, "study.json": 1 << 24, "table.json": 1 << 26}
MOST_WORDS = 160  # letters of a note or a setting that the list shows
MOST_SETTINGS = 30  # that differ
QUIET = 600.0  # seconds without a word after which a run at work is called stale, if its rounds are not as long


def problem_in(folder: Path) -> str:
    """Why a folder is not read at all: links and devices in place of files, files too large to be what they say."""
    for entry in os.scandir(folder):
        if entry.name not in READ:
            continue
        if not entry.is_file(follow_symlinks=False):
            return f"{entry.name} is not a plain file, and links are not followed"
        if entry.stat(follow_symlinks=False).st_size > LARGEST.get(entry.name, 1 << 31):
            return f"{entry.name} is too large to be one"
    return ""


def facts_of_run(path: Path, history: History) -> Facts:
    """A run: its state, how far it came, its best, and in what it differs."""
    first, last, resumed = ends_of(path / "audit.jsonl")
    state = state_of(path, last, resumed)
    why = ""
    try:
        config = read_settings(text_in(path / "config.toml"))
    except (ValueError, RecursionError) as error:
        config = {}
        why = f"config.toml cannot be read: {error}"
    summary: Facts = {}
    if state.name == "finished":
        summary = json_of(path / "summary.json")
    if state.name in ("running", "waiting") and (silent := silence(path, history)):
        state = RunState("stale", state.why, resumed, state.pid)
        why = f"at work, but nothing came for {silent}"
    began = str(first.get("time", ""))
    changed = str(last.get("time", ""))
    facts = state_facts(state, why) | {
        "broken": why.startswith("config.toml"),
        "recipe": short(config.get("recipe", "")),
        "of": whole(config.get("rounds")),
        "began": began,
        "changed": changed,
        "diff": {
            short(k): short(v)
            for k, v in list(changed_settings(config, subtable(first, "defaults")).items())[:MOST_SETTINGS]
        },
        "note": short(read_notes(path).text),
    }
    if summary:
        return facts | ended(path, summary)
    return facts | under_way(history, began, changed)


def ended(path: Path, summary: Facts) -> Facts:
    """What the summary of a finished run says, and its curve."""
    final = subtable(summary, "final")
    best = subtable(summary, "best")
    judge = str(summary.get("judge", ""))
    return {
        "rounds": whole(summary.get("rounds")),
        "judge": short(judge),
        "way": direction_of(judge, subtable(summary, "directions")),
        "value": final.get(judge),
        "best": best.get(judge),
        "seconds": summary.get("seconds"),
        "spark": spark(read_column(path / "history.csv", judge)),
    }


def under_way(history: History, began: str, changed: str) -> Facts:
    """What the curves of a run say that is not finished."""
    history.read_on()
    judge = likely_monitor(history.columns)
    values = [v for v in history.column(judge) if v == v]
    way = direction_of(judge)
    value: float | None = None
    best: float | None = None
    if values:
        value = values[-1]
    if values and way == "lower":
        best = min(values)
    elif values and way:
        best = max(values)
    rest = {"seconds": apart(began, changed), "spark": spark(values), "way": way}
    return {"rounds": len(history), "judge": judge, "value": value, "best": best, **rest}


def silence(path: Path, history: History) -> str:
    """For how long a run at work has said nothing, if that is longer than its rounds let expect."""
    try:
        quiet = time.time() - max((path / name).stat().st_mtime for name in ("audit.jsonl", "config.toml"))
    except OSError:
        return ""
    seconds = [s for s in list(history.column("seconds"))[-20:] if s == s]
    if quiet > max(QUIET, 10 * max(seconds, default=0.0)):
        return f"{quiet / 60:.0f} minutes"
    return ""


def ends_of(trail: Path) -> tuple[Facts, Facts, bool]:
    """The first and the last event of an audit trail, and whether an unfinished run was ever resumed."""
    try:
        with trail.open("rb") as file:
            first = file.readline(LINE)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LINE))
            tail = file.read()
            # The last line counts once its end is written.
            last = event(tail[: tail.rfind(b"\n")].rpartition(b"\n")[2])
            if last.get("event") == "finished":
                return event(first), last, False
            # Only the trail of a run that has not finished is read as a whole.
            file.seek(0)
            return event(first), last, any(b'"event": "resumed"' in line for line in file)
    except OSError:
        return {}, {}, False


def event(line: bytes) -> Facts:
    """One event, or nothing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


def facts_of_study(path: Path, cells: Iterable[Facts]) -> Facts:
    """A study: how many of its runs are finished, and its best method."""
    plan = json_of(path / "study.json")
    table = json_of(path / "table.json")
    pid, alive = holder(path)
    begun = list(cells)
    done = sum(cell["state"] == "finished" for cell in begun)
    planned = plan.get("cells")
    total = len(begun)
    if isinstance(planned, list):
        total = max(total, len(planned))
    name = "stopped"
    if alive:
        name = "running"
    elif done >= total > 0 and table:
        name = "finished"
    lines = [x for x in table.get("lines") or [] if isinstance(x, dict) and isinstance(x.get("mean"), int | float)]
    metric = str(lines[0].get("metric", "")) if lines else ""
    top = best_of([x for x in lines if x.get("metric") == metric], metric, table) or {}
    began = min_of(begun, "began")
    changed = max((cell["changed"] for cell in begun), default="")
    methods = list(dict.fromkeys(str(x.get("method", "")) for x in lines))
    return state_facts(RunState(name, pid=pid), "") | {
        "recipe": short(plan.get("recipe") or table.get("recipe") or ""),
        "rounds": done,
        "of": total,
        "judge": short(metric),
        "way": direction_of(metric, subtable(table, "directions")),
        "value": top.get("mean"),
        "best": top.get("mean"),
        "winner": short(top.get("method", "")),
        "began": began,
        "changed": changed,
        "seconds": apart(began, changed) if name == "finished" else None,
        "methods": [short(m) for m in methods[:MOST_SETTINGS]],
        "note": short(read_notes(path).text),
        "resumable": bool(plan.get("file")),
    }


def unreadable(why: str) -> Facts:
    """A folder that says it is a run but cannot be read as one."""
    return state_facts(RunState("unreadable"), why) | {"recipe": "", "rounds": 0, "of": 0, "began": "", "changed": ""}


def state_facts(state: RunState, why: str) -> Facts:
    """How it stands."""
    told = {"state": state.name, "why": short(why or state.why), "resumed": state.resumed}
    return told | {"ours": bool(state.pid), "resumable": state.name != "unreadable"}


def short(value: Any) -> str:
    """A text from a folder as the list shows it: one line, not too long."""
    text = " ".join(str(value)[: 4 * MOST_WORDS].split())
    if len(text) <= MOST_WORDS:
        return text
    return text[: MOST_WORDS - 1] + "…"


def whole(value: Any) -> int:
    """A count, 0 if it is none."""
    if isinstance(value, int) and 0 <= value < 2**53:
        return value
    return 0


def min_of(facts: Iterable[Facts], key: str) -> str:
    """The first time that is known."""
    return min((f[key] for f in facts if f[key]), default="")


def apart(began: str, ended: str) -> float | None:
    """Seconds between two times of a trail."""
    try:
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    except (ValueError, TypeError):
        return None


Whole = npt.NDArray[np.int64]
PAGE = 100


@dataclass(frozen=True, eq=False)
class Clients:
    """What is known of every client that was ever selected, in columns; `group` and `failure` are numbers of texts."""

    name: list[str]
    selected: Whole
    replied: Whole
    last: Whole
    n: Whole
    weight: Floats
    group: Whole
    failure: Whole  # the last one; 0: none
    failed: Whole  # the round of it
    groups: list[str]
    failures: list[str]

    def __len__(self) -> int:
        return len(self.name)

    @cached_property
    def by_name(self) -> Whole:
        """The place of each client when they are sorted by name."""
        place = np.empty(len(self), np.int64)
        place[sorted(range(len(self)), key=self.name.__getitem__)] = np.arange(len(self))
        return place

    def order(self, sort: str) -> Whole:
        """By what clients are sorted, the least first; those that are equal go by name."""
        columns: dict[str, npt.NDArray[Any]] = {
            "selected": self.selected,
            "lost": self.selected - self.replied,
            "last": self.last,
            "weight": self.weight,
        }
        values = columns.get(sort, np.zeros(len(self)))
        # lexsort sorts by its last key first.
        return np.lexsort((self.by_name, -values))

    def with_text(self, text: str) -> npt.NDArray[np.bool_]:
        """Which clients have a text in their name or failure, whatever its case."""
        in_failure = np.array([text in failure.lower() for failure in self.failures], np.bool_)
        in_name = np.fromiter((text in name.lower() for name in self.name), np.bool_, len(self))
        return np.asarray(in_name | in_failure[self.failure])

    def line(self, i: int) -> dict[str, Any]:
        """One client."""
        numbers = {k: getattr(self, k)[i].item() for k in ("selected", "replied", "last", "n", "weight")}
        texts = {"group": self.groups[self.group[i]], "failure": self.failures[self.failure[i]]}
        return {"name": self.name[i], **numbers, **texts, "failed": self.failed[i].item()}


def clients_of(table: Columns) -> Clients:
    """Every client that was ever selected."""
    names, who = table.codes("client")
    round = table.wholes("round")
    n = table.wholes("n")
    weight = np.nan_to_num(table.numbers("weight"))
    (groups, group), (failures, failure), (reasons, rejected) = (
        table.codes(k) for k in ("group", "failure", "rejected")
    )
    good = table.where("replied", "1") & table.where("rejected", "")

    def last_of(values: Any, rows: npt.NDArray[np.bool_]) -> Any:
        """Each client's value in the last of these rows that is its own; 0 if none is."""
        out = np.zeros(len(names), values.dtype)
        out[who[rows]] = values[rows]
        return out

    # texts by number, the first of them for none; a reply without a failure was rejected
    why = np.where(table.where("failure", ""), len(failures) + rejected, failure) + 1
    latest = np.zeros(len(names), np.int64)
    np.maximum.at(latest, who, round)
    return Clients(
        name=names,
        selected=np.bincount(who, minlength=len(names)),
        replied=np.bincount(who[good], minlength=len(names)),
        last=latest,
        n=last_of(n, good),
        weight=last_of(weight, good),
        group=last_of(group + 1, np.array([bool(text) for text in groups], np.bool_)[group]),
        failure=last_of(why, ~good),
        failed=last_of(round, ~good),
        groups=["", *groups],
        failures=["", *failures, *(f"rejected: {reason}" for reason in reasons)],
    )


def page_of(clients: Clients, search: str, sort: str, start: int) -> dict[str, Any]:
    """A hundred of them: those with the text in their name or failure, in the order asked for."""
    ordered = clients.order(sort)
    if wanted := search.lower():
        ordered = ordered[clients.with_text(wanted)[ordered]]
    rows = [clients.line(i) for i in ordered[start : start + PAGE].tolist()]
    return {"total": len(clients), "found": len(ordered), "start": start, "page": PAGE, "rows": rows}
