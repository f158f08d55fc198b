"""The trials of `mutirao drill`: attacks on the updates of your own federation, and what they found."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.config import nearest
from mutirao.errors import ConfigError, MutiraoError

# Descriptions stand here, so that `mutirao drill --list` imports no attack.
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
        if self.good:
            return "good"
        return "BAD"


Drill = Callable[[Path, Trial], None]


def run_trials(names: Sequence[str], folder: Path | None, drills: Mapping[str, Drill]) -> Iterator[Trial]:
    """Run the named trials in this order.

    Without a `folder` they write to a temporary one, which is deleted unless a trial is bad.
    """
    for name in names:
        if name not in drills:
            raise ConfigError(f"no trial is called {name!r}{nearest(name, drills)}")
    root = Path(tempfile.mkdtemp(prefix="mutirao-drill-")) if folder is None else folder.resolve()
    all_good = True
    for name in names:
        start = time.monotonic()
        trial = Trial(name, TRIALS[name])
        try:
            drills[name](root / name, trial)
        except MutiraoError as error:
            trial.good = False
            trial.happened = f"{trial.happened} FAILED: {error}".strip()
        trial.seconds = round(time.monotonic() - start, 1)
        all_good = all_good and trial.good
        yield trial
    if folder is None and all_good:
        shutil.rmtree(root, ignore_errors=True)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns.

    >>> align_columns([["rule", "read"], ["plain", "98%"]])
    ['rule   read', 'plain  98%']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
