"""What the run folders of a server tell of its sites: who answered when, who refused what by which rule, versions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mutirao.dashboard.curves import History
from mutirao.dashboard.run_index import Shelf, mark_of
from mutirao.dashboard.run_summary import facts_of_run
from mutirao.runs.audit_trail import read_events
from mutirao.runs.linked_trails import subtable
from mutirao.runs.reader import Columns

Facts = dict[str, Any]
REFUSED = re.compile(r"refused: (?P<rule>[\w.*-]+): (?P<reason>.*)", re.DOTALL)
TEXT = 300  # characters of what a site said that are shown
SHOWN = 50  # lines of each kind


@dataclass(frozen=True)
class Told:
    """What one run folder tells of the clients."""

    last: Mapping[str, Facts] = field(default_factory=dict)  # by client, the last round it answered
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: Sequence[Facts] = ()


def run_folders(root: Path, submitted: Iterable[Path] = ()) -> list[Path]:
    """The run folders below `root`, and those elsewhere that runs were submitted for."""
    shelf = Shelf(root)
    shelf.walk()
    found = [item.path for item in shelf.items.values() if item.kind == "run"]
    others = [path for path in submitted if (path / "config.toml").is_file() and (path / "audit.jsonl").is_file()]
    return list(dict.fromkeys(path.resolve() for path in [*found, *others]))


def run_facts(path: Path, root: Path) -> Facts:
    """How a run stands: state, round, when it began and last changed."""
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    facts = facts_of_run(path, History(path / "history.csv"))
    chosen = ("recipe", "state", "why", "rounds", "of", "began", "changed")
    return {"name": name, **{key: facts[key] for key in chosen}}


def told_in(path: Path) -> Told:
    """What a run folder tells of its clients, read again only if it changed."""
    return read_told(path, (mark_of(path / "clients.csv"), mark_of(path / "audit.jsonl")))


@lru_cache(maxsize=64)
def read_told(path: Path, mark: Any) -> Told:
    """The same; `mark` changes with the files."""
    events = read_events(path / "audit.jsonl")[0]
    ends = [event for event in events if event.get("event") in ("round", "failed")]
    times = {n: str(event.get("time", "")) for event in ends if isinstance(n := event.get("round"), int)}
    table, last = Columns(path / "clients.csv"), dict[str, Facts]()
    refused: dict[tuple[str, int, str], Facts] = {}  # a round that is tried again is refused again
    texts = [table.texts(name) for name in ("client", "replied", "failure")]
    for client, replied, failure, number in zip(*texts, table.numbers("round").tolist(), strict=True):
        at = int(number) if number == number else 0
        about = {"run": path.name, "round": at, "time": times.get(at, "")}
        if replied == "1":
            last[client] = about
        elif match := REFUSED.fullmatch(failure):
            rule, reason = match["rule"], match["reason"][:TEXT]
            often = refused.get((client, at, rule), {"times": 0})["times"] + 1
            refused[client, at, rule] = {"client": client, **about, "rule": rule, "reason": reason, "times": often}
    return Told(last, versions_in(events), list(refused.values()))


def versions_in(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The versions that clients told last, by client, as the run's trail has them."""
    found: dict[str, dict[str, str]] = {}
    for event in events:
        for client, told in subtable(event, "site_versions").items():
            if isinstance(told, dict):
                found[str(client)] = {str(k)[:40]: str(v)[:40] for k, v in list(told.items())[:10]}
    return found
