"""What can be drilled, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# What can be drilled, said here so that listing it imports nothing.
TRIALS = {
    "leak": "a server reads samples out of an update: plain, under a policy, with noise",
    "ratings": "a server reads a recommender's users: plain, noised, masked",
}


@dataclass
class Trial:
    """What was tried, what happened, and whether it ended as it should."""

    name: str
    done: str
    happened: str = ""
    good: bool = False
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "good" if self.good else "BAD"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns.

    >>> in_columns([["rule", "read"], ["plain", "98%"]])
    ['rule   read', 'plain  98%']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
