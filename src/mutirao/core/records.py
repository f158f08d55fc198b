"""What is recorded of a round: a line of history, and a line for each client that was selected."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
FEW = 3  # clients and reasons that are named; of more it is said how many


@dataclass(frozen=True)
class Round:
    """What is recorded of a round: its line of history and one line for each client selected.

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
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # of packages, as clients told them


def reasons(rows: Sequence[Row]) -> str:
    """The first few reasons why clients of the last try are missing."""
    last = [r for r in rows if r["try"] == rows[-1]["try"] and (r["failure"] or r["rejected"])]
    text = "; ".join(f"{r['client']} {r['failure'] or 'rejected: ' + r['rejected']}" for r in last[:FEW])
    return f" ({text}{'; ...' if len(last) > FEW else ''})" if last else ""


def who_is_lost(lost: Mapping[str, object]) -> Iterator[str]:
    """One line for all clients that are missing for the same reason, the first few of them by name.

    >>> list(who_is_lost({"a": "timed out", "b": "sent NaN", "c": "sent NaN"}))
    ['a timed out', 'b, c sent NaN']
    """
    alike: dict[str, list[str]] = {}
    for client, why in lost.items():
        alike.setdefault(str(why), []).append(client)
    for why, clients in alike.items():
        more = f" and {len(clients) - FEW} more" if len(clients) > FEW else ""
        yield f"{', '.join(clients[:FEW])}{more} {why}"
