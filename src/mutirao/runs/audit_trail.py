"""The audit trail: one JSON line for each event, with the hash of the line before, so that changes are detected.

Trails of server and sites vouch for each other: with each request and reply, both sides record the hash of the other's
last event (its head). If the end of one trail is later cut off or rewritten, it no longer agrees with the heads that
the other side recorded.
"""

import csv
import datetime
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.core.arrays import fingerprint
from mutirao.errors import ConfigError
from mutirao.io import append_whole, plain_value, write_whole

log = logging.getLogger("mutirao")
START = "0" * 64


class Audit:
    """An append-only, hash-chained file of events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        events, self._whole, self._torn = read_events(path)
        self.count = len(events)
        self.first = ""
        self.head = START
        self.last: dict[str, Any] = {}
        if events:
            self.first = events[0]["hash"]
            self.last = events[-1]
            self.head = self.last["hash"]
        self.began: dict[str, Any] = next((e for e in events if e.get("event") == "started"), {})

    def append(self, event: str, **facts: Any) -> None:
        """Write one event."""
        if self._torn:
            self._mend()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        content = {"seq": self.count + 1, "time": now, "event": event, **facts, "prev": self.head}
        head = fingerprint(content)
        line = (json.dumps(content | {"hash": head}) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # True until the line is complete: on a full disk only a part of it may be written.
        self._torn = True
        append_whole(self.path, line)
        self._torn = False
        self._whole += len(line)
        self.head = head
        self.first = self.first or head
        self.count += 1

    def where(self) -> dict[str, Any]:
        """The current head: the number of events, and the hashes of the first and the last."""
        return {"seq": self.count, "first": self.first, "head": self.head}

    def _mend(self) -> None:
        """Remove a line that a crash left incomplete."""
        log.warning("%s: the last line was cut off by a crash and is removed", self.path)
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.truncate(self._whole)
        self._torn = False


def read_events(path: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """The events up to the last complete line, their bytes, and whether anything unreadable follows."""
    if not path.exists():
        return [], 0, False
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    events = [parse(line) for line in lines]
    # Only unreadable lines at the end can come from a crash. Those before an event stay, as breaks of the chain.
    while events and events[-1] is None:
        events.pop()
    whole = sum(len(line) for line in lines[: len(events)])
    return [e or {"hash": ""} for e in events], whole, whole < len(content)


def parse(line: bytes) -> dict[str, Any] | None:
    """One event, or None if the line is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and {"event", "prev", "hash"} <= event.keys():
        return event
    return None


def is_unaltered(event: dict[str, Any]) -> bool:
    """Whether an event still has the hash it was written with."""
    return bool(fingerprint({k: v for k, v in event.items() if k != "hash"}) == event["hash"])


def check_chain(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The events, and one line for each break of the hash chain."""
    if not path.exists():
        return [], [f"{path.name}: missing"]
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    head: str | None = START
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        event = parse(line)
        if event is None:
            problems.append(f"{path.name}: line {number} is not an event")
            # The hash of this line is unknown, so the next line cannot be compared with it.
            head = None
            continue
        if head is not None and event["prev"] != head:
            problems.append(f"{path.name}: lines are missing, added or out of order before line {number}")
        if not is_unaltered(event):
            problems.append(f"{path.name}: line {number} ({event['event']}) was altered")
        head = event["hash"]
        events.append(event)
    return events, problems


Event = dict[str, Any]


def read_trail(path: Path) -> tuple[str, list[Event], list[str]]:
    """The site of a trail, its events, and the problems of its hash chain."""
    file = path / "audit.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; name a site's audit trail")
    events, problems = check_chain(file)
    names = {str(e["site"]) for e in events if "site" in e}
    # A trail without exactly one site's name in its events is called by its folder.
    name = file.parent.name or str(file)
    if len(names) == 1:
        name = names.pop()
    return name, events, [f"{name}: {p}" for p in problems]


def clients_with_trails(path: Path) -> set[str]:
    """Clients with heads in a server's trail: their sites keep audit trails of their own."""
    events, _, _ = read_events(path)
    return {str(client) for event in events for client in subtable(event, "heads")}


def count_heads(
    rounds: Mapping[int, Event], rows: Iterable[Mapping[str, str]], known: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Compare heads with replies: each reply of a site with an audit trail must have come with a head.

    Those are the sites that sent a head in any round, and those `known` to keep a trail. `rows` are of `clients.csv`.
    """
    recorded = {(str(number), client) for number, event in rounds.items() for client in subtable(event, "heads")}
    with_trail = {client for _, client in recorded}.union(known)
    if not with_trail:
        return [], []
    numbers = {str(number) for number in rounds}
    replied = {(r["round"], r["client"]) for r in rows if r.get("replied") == "1" and r.get("client") in with_trail}
    audited = {(number, client) for number, client in replied if number in numbers}
    missing = sorted((int(number), client) for number, client in audited - recorded)
    if missing:
        return [], [
            f"audit.jsonl: the reply of {client} in round {n} has no head of its trail" for n, client in missing
        ]
    if not audited:
        return [], []
    return [f"heads: each of {len(audited)} replies of sites with trails has its own"], []


def cross_check(server: Sequence[Event], path: Path) -> tuple[list[str], list[str]]:
    """Compare a server's events with a site's trail: (what agrees, problems)."""
    site, events, problems = read_trail(path)
    first = server[0]["hash"] if server else ""
    mine = [e for e in events if subtable(e, "server").get("first") == first]
    heads = [(e.get("round"), subtable(subtable(e, "heads"), site)) for e in server if site in subtable(e, "heads")]
    if not mine:
        return [], [*problems, f"{site}: its trail contains nothing of this run"]
    hashes = [str(e["hash"]) for e in events]
    sent = {str(e.get("reply")) for e in mine if e["event"] == "sent"}
    for number, head in heads:
        if not has_head(hashes, head):
            problems.append(f"{site}: its trail lost or changed events that the server recorded in round {number}")
        elif not sent.issuperset(str(head.get("reply")).split()):
            problems.append(f"{site}: the server holds a reply of round {number} that the site did not send")
    theirs = [str(e["hash"]) for e in server]
    for event in mine:
        if not has_head(theirs, subtable(event, "server")):
            problems.append(f"audit.jsonl: lost or changed events that {site} recorded (its event {event.get('seq')})")
            # The heads of all later events differ for the same reason.
            break
    if problems:
        return [], problems
    return [
        f"{site}: {len(mine)} events of this run; {len(heads)} heads kept by the server, {len(mine)} by the site, agree"
    ], []


def subtable(event: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table in an event that others wrote; empty if the value is no table."""
    found = event.get(key)
    if isinstance(found, dict):
        return found
    return {}


def has_head(hashes: Sequence[str], head: Mapping[str, Any]) -> bool:
    """Whether a trail still contains the event that was its head at the time."""
    seq = head.get("seq")
    return isinstance(seq, int) and 0 < seq <= len(hashes) and hashes[seq - 1] == head.get("head")


def write_events(trails: Mapping[str, Sequence[Event]], path: Path) -> int:
    """Write the events of several trails, by time, as one CSV file with a column for each fact; return how many."""
    rows = [{"side": side, **event} for side, events in trails.items() for event in events]
    rows.sort(key=lambda row: (str(row.get("time")), str(row["side"]), whole_number(row.get("seq"))))
    columns = list(dict.fromkeys(["side", "seq", "time", "event", *(k for row in rows for k in row)]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell(name) for name in columns])
    for row in rows:
        writer.writerow([cell(row.get(k, "")) for k in columns])
    write_whole(path, out.getvalue())
    return len(rows)


def whole_number(value: Any) -> int:
    """An integer to sort by; 0 for anything else."""
    if isinstance(value, int):
        return value
    return 0


def cell(value: Any) -> Any:
    """A fact as a cell: lists and tables as JSON; no text that a spreadsheet would take for a formula."""
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    value = plain_value(value)
    if isinstance(value, str):
        # JSON may contain lone surrogates, which cannot be written as UTF-8.
        value = value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return value
