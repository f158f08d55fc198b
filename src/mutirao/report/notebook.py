"""A run as a notebook shows it: its state in a line, and a small curve of each metric."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.core.rounds import Run
from mutirao.metrics import Direction, direction_of
from mutirao.runs.csv_tables import metrics_in_row
from mutirao.runs.reader import Record
from mutirao.runs.run_folder import load_run
from mutirao.templates import macros

WIDE = 220
TALL = 70
MOST = 6
PIECES = "report/assets/notebook.html"


@dataclass(frozen=True)
class View:
    """What a notebook shows in the place of a run."""

    run: Run = field(repr=False)
    directions: Mapping[str, Direction] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """A self-contained piece of HTML; it takes the notebook's own colours."""
        run = self.run
        names = list(dict.fromkeys(k for row in run.history for k in metrics_in_row(row)))[:MOST]
        about = f"round {run.round}, seed {run.seed}, {len(run.roster)} clients, {len(run.arrays)} arrays"
        curves = [box(n, points_of(run.history, n), direction_of(n, self.directions)) for n in names]
        return str(macros(PIECES).run(about, curves))


def show(run: Run | Path | str, directions: Mapping[str, Direction] | None = None) -> View:
    """A run, or the one in a folder, with its curves, for a notebook.

    `directions` says which way metrics of your own are better; a folder says it itself.

    >>> run = Run({}, history=[{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.8}])
    >>> "accuracy: last 0.8, best 0.8" in show(run)._repr_html_()
    True
    """
    if isinstance(run, Run):
        return View(run, directions or {})
    record = Record.of(Path(run))
    known = {name: way for name in record.metrics if (way := record.direction(name))}
    return View(load_run(run), known | dict(directions or {}))


def points_of(history: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Rounds and finite values of a metric."""
    found = [(float(row["round"]), float(row[name])) for row in history if isinstance(row.get(name), int | float)]
    return [(x, y) for x, y in found if math.isfinite(y)]


def box(name: str, points: list[tuple[float, float]], way: Direction | None) -> dict[str, Any]:
    """One curve with its last value, and its best if it is known which way is better; empty without points."""
    if not points:
        return {}
    xs, ys = zip(*points, strict=True)
    low = min(ys)
    high = max(ys)
    first = xs[0]
    last = xs[-1]
    across = (WIDE - 8) / ((last - first) or 1)
    up = (TALL - 8) / ((high - low) or 1)
    path = " ".join(f"{4 + (x - first) * across:.1f},{TALL - 4 - (y - low) * up:.1f}" for x, y in points)
    said = f"{name}: last {ys[-1]:.4g}"
    if way:
        said += f", best {low if way == 'lower' else high:.4g}"
    return {"said": said, "points": path, "width": WIDE, "height": TALL}
