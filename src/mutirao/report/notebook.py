"""A run as a notebook shows it: its state in a line, and a small curve of each metric."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mutirao.core.rounds import Run
from mutirao.metrics import lower_is_better
from mutirao.runs.folder import metrics_of

WIDE, TALL = 220, 70
MOST = 6


def run_html(run: Run) -> str:
    """A self-contained piece of HTML; it takes the notebook's own colours."""
    names = list(dict.fromkeys(k for row in run.history for k in metrics_of(row)))[:MOST]
    head = f"<b>Run</b>: round {run.round}, seed {run.seed}, {len(run.roster)} clients, {len(run.arrays)} arrays"
    boxes = "".join(box(name, points_of(run.history, name)) for name in names)
    return f"<div>{head}<div style='display:flex;flex-wrap:wrap;gap:1em'>{boxes}</div></div>"


def points_of(history: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Rounds and finite values of a metric."""
    found = [(float(row["round"]), float(row[name])) for row in history if isinstance(row.get(name), int | float)]
    return [(x, y) for x, y in found if math.isfinite(y)]


def box(name: str, points: list[tuple[float, float]]) -> str:
    """One curve with its last and best value."""
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    best = min(ys) if lower_is_better(name) else max(ys)
    low, high, first, last = min(ys), max(ys), xs[0], xs[-1]
    across, up = (WIDE - 8) / ((last - first) or 1), (TALL - 8) / ((high - low) or 1)
    path = " ".join(f"{4 + (x - first) * across:.1f},{TALL - 4 - (y - low) * up:.1f}" for x, y in points)
    said = f"{name}: last {ys[-1]:.4g}, best {best:.4g}"
    return (
        f"<figure style='margin:.5em 0'><svg role='img' aria-label='{escape(said)}' width={WIDE} height={TALL}>"
        f"<polyline points='{path}' fill='none' stroke='#4477AA' stroke-width='2'/></svg>"
        f"<figcaption>{escape(said)}</figcaption></figure>"
    )
