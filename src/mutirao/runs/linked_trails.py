"""Two audit trails that know of each other: the server keeps the sites' heads, each site keeps the server's.

Whoever cuts off or rewrites the end of a trail makes it disagree with what the other side was told at the time.
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
    """The name of the site whose trail this is, its events, and what is wrong with its chain."""
    file = path / "audit.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} is not there; name a site's audit trail")
    events, problems = check_chain(file)
    names = {str(e["site"]) for e in events if "site" in e}
    name = names.pop() if len(names) == 1 else file.parent.name or str(file)
    return name, events, [f"{name}: {p}" for p in problems]


def clients_with_trails(path: Path) -> set[str]:
    """The clients whose heads are in a server's trail: their sites keep trails of their own."""
    return {str(client) for event in read_events(path)[0] for client in subtable(event, "heads")}


def count_heads(
    rounds: Mapping[int, Event], rows: Iterable[Mapping[str, str]], known: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Count heads against replies: each of a client whose site keeps a trail must have come with one.

    Those are the clients who sent one in any round, and those `known` to. `rows` are those of `clients.csv`.
    """
    told = {(str(number), client) for number, event in rounds.items() for client in subtable(event, "heads")}
    keepers = {client for _, client in told}.union(known)
    if not keepers:
        return [], []
    made = {str(number) for number in rounds}
    replied = {(r["round"], r["client"]) for r in rows if r.get("replied") == "1" and r.get("client") in keepers}
    counted = {(number, client) for number, client in replied if number in made}
    gone = sorted((int(number), client) for number, client in counted - told)
    if gone:
        return [], [f"audit.jsonl: the reply of {client} in round {n} has no head of its trail" for n, client in gone]
    return [f"heads: each of {len(counted)} replies of sites with trails has its own"] if counted else [], []


def cross_check(server: Sequence[Event], path: Path) -> tuple[list[str], list[str]]:
    """Compare a server's events with a site's trail: what agrees, and what does not."""
    site, events, problems = read_trail(path)
    first = server[0]["hash"] if server else ""
    mine = [e for e in events if subtable(e, "server").get("first") == first]
    told = [(e.get("round"), subtable(subtable(e, "heads"), site)) for e in server if site in subtable(e, "heads")]
    if not mine:
        return [], [*problems, f"{site}: its trail knows nothing of this run"]
    hashes = [str(e["hash"]) for e in events]
    sent = {str(e.get("reply")) for e in mine if e["event"] == "sent"}
    for number, head in told:
        if not has_head(hashes, head):
            problems.append(f"{site}: its trail lost or changed events that the server knew of in round {number}")
        elif not sent.issuperset(str(head.get("reply")).split()):
            problems.append(f"{site}: the server holds a reply of round {number} that the site did not send")
    theirs = [str(e["hash"]) for e in server]
    for event in mine:
        if not has_head(theirs, subtable(event, "server")):
            problems.append(f"audit.jsonl: lost or changed events that {site} knew of (its event {event.get('seq')})")
            break  # all later ones rest on the same loss
    if problems:
        return [], problems
    return [
        f"{site}: {len(mine)} events of this run; {len(told)} heads kept by the server, {len(mine)} by the site, agree"
    ], []


def subtable(event: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table in an event of somebody else's trail; empty if anything else is there."""
    found = event.get(key)
    return found if isinstance(found, dict) else {}


def has_head(hashes: Sequence[str], head: Mapping[str, Any]) -> bool:
    """Whether a trail still has the event that was its last one when the other side was told."""
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
    """A number to sort by; 0 for what is none."""
    return value if isinstance(value, int) else 0


def cell(value: Any) -> Any:
    """A fact as a cell: lists and tables as JSON; no text that a spreadsheet would take for a formula."""
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    value = plain_value(value)
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace").decode()  # half a character is no text
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
