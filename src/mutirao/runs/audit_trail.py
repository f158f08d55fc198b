"""The audit trail: one JSON line for each event, with the hash of the line before, so that changes are detected."""

import datetime
import json
import logging
from pathlib import Path
from typing import Any

from mutirao.core.digests import fingerprint
from mutirao.io import append_whole

log = logging.getLogger("mutirao")
START = "0" * 64


class Audit:
    """An append-only, hash-chained file of events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        events, self._whole, self._torn = read_events(path)
        self.count = len(events)
        self.first: str = events[0]["hash"] if events else ""
        self.head: str = events[-1]["hash"] if events else START
        self.last: dict[str, Any] = events[-1] if events else {}
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
        self._torn = True  # until the line is complete: on a full disk a part of it may be written
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
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    events = [parse(line) for line in lines]
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
            head = None
            continue
        if head is not None and event["prev"] != head:
            problems.append(f"{path.name}: lines are missing, added or out of order before line {number}")
        if not is_unaltered(event):
            problems.append(f"{path.name}: line {number} ({event['event']}) was altered")
        head = event["hash"]
        events.append(event)
    return events, problems
