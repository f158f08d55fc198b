"""What is recorded of a round: a line of history, and a row for each selected client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
MOST_NAMED = 3  # clients and reasons that are named; the others are counted


@dataclass(frozen=True)
class Round:
    """The record of a round: its line of history and a row for each selected client.

    >>> import numpy as np
    >>> import mutirao as mu
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import everyone
    >>> fleet = mu.LocalFleet(lambda request, site: mu.Reply(request.arrays, n=site.data), {"ana": 30, "bia": 10})
    >>> done = next(mu.train(mu.Run({"w": np.zeros(1)}), fleet, rounds=1, select=everyone, aggregate=FedAvg()))
    >>> done.row["replied"], [(row["client"], row["weight"]) for row in done.clients]
    (2, [('ana', 0.75), ('bia', 0.25)])
    """

    row: Row
    clients: list[Row]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # of packages, as clients reported them


def reasons(rows: Sequence[Row]) -> str:
    """Why clients are missing from the last attempt: the first few reasons, in parentheses."""
    last = [r for r in rows if r["try"] == rows[-1]["try"] and (r["failure"] or r["rejected"])]
    if not last:
        return ""
    text = "; ".join(f"{r['client']} {r['failure'] or 'rejected: ' + r['rejected']}" for r in last[:MOST_NAMED])
    more = "; ..." if len(last) > MOST_NAMED else ""
    return f" ({text}{more})"


def group_by_reason(lost: Mapping[str, object]) -> Iterator[str]:
    """One line for all clients that are missing for the same reason, the first few of them by name.

    >>> list(group_by_reason({"a": "timed out", "b": "sent NaN", "c": "sent NaN"}))
    ['a timed out', 'b, c sent NaN']
    """
    by_reason: dict[str, list[str]] = {}
    for client, reason in lost.items():
        by_reason.setdefault(str(reason), []).append(client)
    for reason, clients in by_reason.items():
        more = f" and {len(clients) - MOST_NAMED} more" if len(clients) > MOST_NAMED else ""
        yield f"{', '.join(clients[:MOST_NAMED])}{more} {reason}"
