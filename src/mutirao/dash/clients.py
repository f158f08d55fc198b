"""The clients of a run, one line each, counted from `clients.csv`, which may have a hundred thousand rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mutirao.runs.reader import Columns

SORTS: dict[str, Callable[["Client"], Any]] = {
    "client": lambda c: c.name,
    "selected": lambda c: (-c.selected, c.name),
    "lost": lambda c: (-(c.selected - c.replied), c.name),
    "last": lambda c: (-c.last, c.name),
    "weight": lambda c: (-c.weight, c.name),
}
PAGE = 100


@dataclass
class Client:
    """What is known of one client."""

    name: str
    selected: int = 0
    replied: int = 0
    last: int = 0
    n: int = 0
    weight: float = 0.0
    group: str = ""
    failure: str = ""  # the last one
    failed: int = 0  # the round of it


def clients_of(table: Columns) -> list[Client]:
    """Every client that was ever selected."""
    found: dict[str, Client] = {}
    texts = [table.texts(n) for n in ("client", "replied", "failure", "rejected", "group")]
    numbers = [table.numbers(n).tolist() for n in ("round", "n", "weight")]
    for name, replied, failure, rejected, group, round, n, weight in zip(*texts, *numbers, strict=True):
        client = found.setdefault(name, Client(name))
        client.selected += 1
        at = int(round) if round == round else 0
        client.last = max(client.last, at)
        client.group = group or client.group
        if replied == "1" and not rejected:
            client.replied += 1
            client.n = int(n) if n == n else 0
            client.weight = weight if weight == weight else 0.0
        else:
            client.failure, client.failed = failure or f"rejected: {rejected}", at
    return list(found.values())


def page_of(clients: list[Client], search: str, sort: str, start: int) -> dict[str, Any]:
    """A hundred of them: those whose name or failure holds the text, in the order asked for."""
    wanted = search.lower()
    kept = [c for c in clients if wanted in c.name.lower() or wanted in c.failure.lower()] if wanted else clients
    ordered = sorted(kept, key=SORTS.get(sort, SORTS["client"]))
    rows = [vars(c) for c in ordered[start : start + PAGE]]
    return {"total": len(clients), "found": len(kept), "start": start, "page": PAGE, "rows": rows}
