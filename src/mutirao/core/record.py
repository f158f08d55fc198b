"""What is recorded of a round: a line of history, and a line for each client that was selected."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """What is recorded of a round: its line of history and one line for each client selected."""

    row: Row
    clients: list[Row]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # of packages, as clients told them


def reasons(rows: Sequence[Row]) -> str:
    """The first few reasons why clients of the last try are missing."""
    last = [r for r in rows if r["try"] == rows[-1]["try"] and (r["failure"] or r["rejected"])]
    text = "; ".join(f"{r['client']} {r['failure'] or 'rejected: ' + r['rejected']}" for r in last[:3])
    return f" ({text}{'; ...' if len(last) > 3 else ''})" if last else ""
