"""Audit trails of server and sites that vouch for each other.

With each request and reply, both sides record the hash of the other's last event (its head). If the end of one trail is
later cut off or rewritten, it no longer agrees with the heads that the other side recorded.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.errors import ConfigError
from mutirao.io import plain_value, write_whole
from mutirao.runs.audit_trail import check_chain, read_events

Event = dict[str, Any]


def read_trail(path: Path) -> tuple[str, list[Event], list[str]]:
    """The site of a trail, its events, and the problems of its hash chain."""
    file = path / "audit.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; name a site's audit trail")
    events, problems = check_chain(file)
    names = {str(e["site"]) for e in events if "site" in e}
    name = names.pop() if len(names) == 1 else file.parent.name or str(file)
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
            break  # the heads of all later events differ for the same reason
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
        value = value.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be written
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return value
