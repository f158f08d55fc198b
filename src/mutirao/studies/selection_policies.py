"""Selection policies side by side: fairness, rounds and costs to targets, and who leads, as tables and pictures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.errors import ConfigError
from mutirao.io import write_whole
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.studies.targets import (
    COSTS,
    best_so_far,
    cost_to,
    count_rounds,
    dominance,
    sign_of,
    values,
    worst_decile,
)

Methods = Mapping[str, Sequence[Record]]
FAIRNESS = ("gini", "jain", "least", "most", "range", "never")


def targets_of(methods: Methods, metric: str) -> list[float]:
    """Two values worth reaching if the user names none: 15% and 5% short of the best value of the weakest run."""
    sign = sign_of(next(iter(methods.values()))[0], metric)
    weakest = sign * min(sign * float(best_so_far(run, metric)[-1]) for runs in methods.values() for run in runs)
    return [round(weakest - sign * short * abs(weakest), 3) for short in (0.15, 0.05)]


def compare_selectors(
    methods: Methods, metric: str = "accuracy", targets: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """One line a method, each figure the mean over its runs."""
    leads = dominance(methods, metric)
    lines = []
    for name, runs in methods.items():
        figures = [participation_in(run).figures for run in runs]
        line: dict[str, Any] = {"method": name, "runs": len(runs), "rounds": min(run.rounds for run in runs)}
        line["final"] = float(np.mean([last_known(values(run, metric)) for run in runs]))
        line["best"] = float(np.mean([best_so_far(run, metric)[-1] for run in runs]))
        line |= {key: float(np.mean([f[key] for f in figures])) for key in FAIRNESS}
        worst = float(np.mean([worst_decile(run, metric) for run in runs]))
        line["worst_decile"] = None if math.isnan(worst) else worst  # clients that hold no test data tell nothing
        line["leads"] = leads[name]
        for target in targets:
            line[f"rounds to {target:g}"] = str(count_rounds(runs, metric, target))
            costs = [cost_to(run, metric, target) for run in runs]
            for kind in COSTS:
                known = [c[kind] for c in costs if c is not None and kind in c]
                line[f"{kind} to {target:g}"] = float(np.mean(known)) if len(known) == len(runs) else None
        lines.append(line)
    return lines


def last_known(by_round: Sequence[float]) -> float:
    """The last value that is one."""
    return next((v for v in reversed(by_round) if not math.isnan(v)), math.nan)


def tables(lines: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> str:
    """The comparison in Markdown: fairness, then what it took to reach the targets."""
    fair = [("policy", "runs", "rounds", "Gini", "Jain", "least", "most", "never", "leads")]
    fair += [
        (
            line["method"],
            str(line["runs"]),
            str(line["rounds"]),
            f"{line['gini']:.4f}",
            f"{line['jain']:.4f}",
            f"{line['least']:g}",
            f"{line['most']:g}",
            f"{line['never']:g}",
            f"{line['leads']:.0%}",
        )
        for line in lines
    ]
    speed = [("policy", "final", "best", "worst decile", *(f"rounds to {t:g}" for t in targets))]
    speed += [
        (
            line["method"],
            *("-" if line[k] is None else f"{line[k]:.4f}" for k in ("final", "best", "worst_decile")),
            *(line[f"rounds to {t:g}"] for t in targets),
        )
        for line in lines
    ]
    spent = [k for k in COSTS if k != "seconds"]  # those depend on this machine, and stand in selection.json
    kinds = [k for k in spent if any(line.get(f"{k} to {t:g}") is not None for line in lines for t in targets)]
    cost = [("policy", *(f"{cost_heading(k)} to {t:g}" for t in targets for k in kinds))]
    cost += [(line["method"], *(amount(line[f"{k} to {t:g}"], k) for t in targets for k in kinds)) for line in lines]
    return "\n".join(markdown(table) for table in (speed, fair, cost) if len(table[0]) > 1)


def cost_heading(kind: str) -> str:
    """A kind of cost as a heading."""
    return {"bytes": "MB", "sim_seconds": "simulated s", "sim_joules": "simulated J"}.get(kind, kind)


def amount(value: float | None, kind: str) -> str:
    """A cost as a table shows it."""
    if value is None:
        return "-"
    return f"{value / 1e6:,.1f}" if kind == "bytes" else f"{value:,.1f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, of which the first is the heading, as a Markdown table."""
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *body])


def require_metric(methods: Methods, metric: str, folder: Path) -> None:
    """ConfigError if not all runs have the metric."""
    if not all(any(metric in row for row in run.rows) for runs in methods.values() for run in runs):
        raise ConfigError(f"not every run below {folder} has a metric {metric!r}")


def write_comparison(methods: Methods, out: Path, metric: str, targets: Sequence[float]) -> list[Path]:
    """Write the comparison as `selection.md` and `selection.json`."""
    lines = compare_selectors(methods, metric, targets)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "selection.md", tables(lines, targets))
    content = {"schema": 1, "metric": metric, "targets": targets, "lines": lines}
    write_whole(out / "selection.json", json.dumps(content, indent=2) + "\n")
    return [out / "selection.md", out / "selection.json"]
