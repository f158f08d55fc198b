"""Compare client selectors: fairness, rounds and costs to target values, and the share of rounds each one leads."""

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
from mutirao.studies.comparison import markdown_table
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
    """The default target values: 15% and 5% short of the best value of the weakest run."""
    all_runs = [run for runs in methods.values() for run in runs]
    sign = sign_of(all_runs[0], metric)
    weakest = sign * min(sign * float(best_so_far(run, metric)[-1]) for run in all_runs)
    return [round(weakest - sign * short * abs(weakest), 3) for short in (0.15, 0.05)]


def compare_selectors(
    methods: Methods, metric: str = "accuracy", targets: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """One line for each method; figures are means over its runs."""
    leads = dominance(methods, metric)
    lines = []
    for name, runs in methods.items():
        figures = [participation_in(run).figures for run in runs]
        line: dict[str, Any] = {"method": name, "runs": len(runs), "rounds": min(run.rounds for run in runs)}
        line["final"] = float(np.mean([last_known(values(run, metric)) for run in runs]))
        line["best"] = float(np.mean([best_so_far(run, metric)[-1] for run in runs]))
        line |= {key: float(np.mean([f[key] for f in figures])) for key in FAIRNESS}
        worst = float(np.mean([worst_decile(run, metric) for run in runs]))
        # NaN, which JSON does not have, if no client was evaluated.
        line["worst_decile"] = None if math.isnan(worst) else worst
        line["leads"] = leads[name]
        for target in targets:
            line[f"rounds to {target:g}"] = str(count_rounds(runs, metric, target))
            costs = [cost_to(run, metric, target) for run in runs]
            for kind in COSTS:
                # A mean over only those runs that reached the target would favour a method that mostly fails.
                known = [c[kind] for c in costs if c is not None and kind in c]
                line[f"{kind} to {target:g}"] = float(np.mean(known)) if len(known) == len(runs) else None
        lines.append(line)
    return lines


def last_known(by_round: Sequence[float]) -> float:
    """The last value that is not NaN."""
    return next((v for v in reversed(by_round) if not math.isnan(v)), math.nan)


def tables(lines: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> str:
    """The comparison in Markdown: values and rounds to targets, fairness, and costs."""
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
    # Wall-clock seconds depend on the machine, so they are not compared here.
    columns = [(kind, target) for target in targets for kind in COSTS if kind != "seconds"]
    known_kinds = {kind for kind, target in columns for line in lines if line.get(f"{kind} to {target:g}") is not None}
    columns = [(kind, target) for kind, target in columns if kind in known_kinds]
    cost = [("policy", *(f"{cost_heading(kind)} to {target:g}" for kind, target in columns))]
    for line in lines:
        cost.append((line["method"], *(amount(line[f"{kind} to {target:g}"], kind) for kind, target in columns)))
    return "\n".join(markdown_table(table) for table in (speed, fair, cost) if len(table[0]) > 1)


def cost_heading(kind: str) -> str:
    """The heading of a kind of cost."""
    return {"bytes": "MB", "sim_seconds": "simulated s", "sim_joules": "simulated J"}.get(kind, kind)


def amount(value: float | None, kind: str) -> str:
    """A cost as a cell of a table."""
    if value is None:
        return "-"
    if kind == "bytes":
        return f"{value / 1e6:,.1f}"
    return f"{value:,.1f}"


def require_metric(methods: Methods, metric: str, folder: Path) -> None:
    """ConfigError if not all runs have the metric."""
    for runs in methods.values():
        for run in runs:
            if not any(metric in row for row in run.rows):
                raise ConfigError(f"not every run below {folder} has a metric {metric!r}")


def write_comparison(methods: Methods, out: Path, metric: str, targets: Sequence[float]) -> list[Path]:
    """Write the comparison as `selection.md` and `selection.json`."""
    lines = compare_selectors(methods, metric, targets)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "selection.md", tables(lines, targets))
    content = {"schema": 1, "metric": metric, "targets": targets, "lines": lines}
    write_whole(out / "selection.json", json.dumps(content, indent=2) + "\n")
    return [out / "selection.md", out / "selection.json"]
