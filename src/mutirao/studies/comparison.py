"""The tables of a study: means with intervals, paired tests against a baseline, and what they allow to say."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.core.files import write_whole
from mutirao.core.text import write_rows
from mutirao.errors import ConfigError
from mutirao.metrics import Direction, rounds_to
from mutirao.randomness import rng
from mutirao.runs.reader import Record
from mutirao.stats import Comparison, Interval, bootstrap, holm, interval, paired
from mutirao.studies.study import Study, results

Runs = dict[str, dict[tuple[Any, ...], Record]]  # by method, then by place in the grid


@dataclass(frozen=True)
class Line:
    """One method by one metric, over all places of the grid."""

    method: str
    metric: str
    final: Interval
    spread: Interval  # of the bootstrap
    best: Interval
    wobble: float  # standard deviation over the last rounds, averaged over runs
    reached: str  # rounds to the threshold
    against: Comparison | None  # the baseline; None for itself, and if there is nothing to go by
    p_holm: float
    values: tuple[float, ...]
    way: Direction | None  # which way is better
    verdict: str  # better, worse or not shown, against the baseline; or why there is none


def compare(study: Study, out: Path) -> list[Line]:
    """Compare the finished cells; methods are paired where both have finished."""
    runs: Runs = {}
    for cell, record in results(study, out):
        runs.setdefault(cell.method, {})[cell.place] = record
    if not runs:
        raise ConfigError(f"{out} holds no finished run of the study")
    found = dict.fromkeys(k for cells in runs.values() for record in cells.values() for k in record.summary["final"])
    lines: list[Line] = []
    for metric in study.metrics or tuple(found):
        of_metric = [line_of(study, runs, method, metric) for method in study.methods if method in runs]
        corrected = holm({line.method: line.against.p for line in of_metric if line.against})
        lines += [Line(**{**vars(line), "p_holm": corrected.get(line.method, math.nan)}) for line in of_metric]
    return lines


def way_of(runs: Runs, metric: str) -> Direction | None:
    """Which way a metric is better, as the first run says that does."""
    return next((way for cells in runs.values() for run in cells.values() if (way := run.direction(metric))), None)


def line_of(study: Study, runs: Runs, method: str, metric: str) -> Line:
    """What is known of one method by one metric."""
    cells = {place: run for place, run in runs[method].items() if metric in run.summary["final"]}
    ends = {place: run.summary["final"][metric] for place, run in cells.items()}
    timed = [[(int(row["round"]), row[metric]) for row in run.rows if metric in row] for run in cells.values()]
    curves = [[value for _, value in curve] for curve in timed]
    theirs = {p: run.summary["final"] for p, run in runs.get(study.baseline, {}).items()}
    common = [p for p in cells if metric in theirs.get(p, {})]
    against, way = None, way_of(runs, metric)
    if method != study.baseline and common and way:
        sign = -1.0 if way == "lower" else 1.0
        against = paired(
            sign * np.array([ends[p] for p in common]), sign * np.array([theirs[p][metric] for p in common])
        )
    missing = "direction not declared" if way is None else "nothing in common"
    values = list(ends.values())
    return Line(
        method=method,
        metric=metric,
        final=interval(values),
        spread=bootstrap(values, rng(0, 0, "bootstrap", f"{method} {metric}")),
        best=interval([run.summary["best"].get(metric, math.nan) for run in cells.values()]),
        wobble=float(np.mean([np.std(c[-study.last :]) for c in curves if c])) if any(curves) else math.nan,
        reached=reached_in(timed, study.threshold[metric], way == "lower") if way and metric in study.threshold else "",
        against=against,
        p_holm=math.nan,
        values=tuple(values),
        way=way,
        verdict="baseline" if method == study.baseline else against.verdict if against else missing,
    )


def reached_in(curves: Sequence[Sequence[tuple[int, float]]], threshold: float, lower: bool = False) -> str:
    """The median number of rounds until a value is at least the threshold (at most, if `lower` values are better).

    Curves are (round, value); runs that never get there count as later than their last round.
    """
    sign = -1.0 if lower else 1.0
    places = [rounds_to([sign * value for _, value in curve], sign * threshold) for curve in curves]
    times = [None if place is None else curve[place - 1][0] for curve, place in zip(curves, places, strict=True)]
    known = sum(t is not None for t in times)
    median = float(np.median([math.inf if t is None else t for t in times])) if times else math.inf
    last = max((curve[-1][0] for curve in curves if curve), default=0)
    text = f"{median:g}" if math.isfinite(median) else f"> {last}"
    return f"{text} ({known} of {len(times)})"


HEADER = (
    "method",
    "metric",
    "mean",
    "95% t",
    "95% bootstrap",
    "best",
    "wobble",
    "rounds to",
    "difference",
    "p",
    "p Holm",
    "r",
    "delta",
    "verdict",
)


def cells_of(line: Line) -> tuple[str, ...]:
    """A line as the texts of a table row."""
    test = line.against
    return (
        line.method,
        line.metric,
        number(line.final.mean),
        number(line.final.half),
        number(line.spread.half),
        number(line.best.mean),
        number(line.wobble),
        line.reached,
        f"{test.difference.mean:+.4f} ± {number(test.difference.half)}" if test else "",
        f"{test.p:.4g}" if test else "",
        number(line.p_holm) if test else "",
        f"{test.r:.3f}" if test else "",
        f"{test.delta:+.2f}" if test else "",
        line.verdict,
    )


def number(value: float) -> str:
    """Four decimals, or a dash for what is not known."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def markdown(lines: Sequence[Line]) -> str:
    """The table in Markdown."""
    rows = [HEADER, tuple("---" for _ in HEADER), *(cells_of(line) for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def latex(lines: Sequence[Line]) -> str:
    """Mean and interval of each method by metric, the best of a column in bold, for booktabs."""
    methods, metrics = list(dict.fromkeys(x.method for x in lines)), list(dict.fromkeys(x.metric for x in lines))
    by = {(x.method, x.metric): x for x in lines}
    top: dict[str, Line] = {}
    for x in lines:
        best, known = top.get(x.metric), x.way and not math.isnan(x.final.mean)
        if known and (best is None or (x.final.mean < best.final.mean) == (x.way == "lower")):
            top[x.metric] = x

    def cell(method: str, metric: str) -> str:
        line = by.get((method, metric))
        if line is None:
            return "--"
        mean = f"{line.final.mean:.3f}"
        half = "" if math.isnan(line.final.half) else rf" $\pm$ {line.final.half:.3f}"
        return (rf"\textbf{{{mean}}}" if top.get(metric) is line else mean) + half

    def escaped(text: str) -> str:
        return text.replace("_", r"\_").replace("%", r"\%")

    body = [" & ".join([escaped(m), *(cell(m, k) for k in metrics)]) + r" \\" for m in methods]
    head = " & ".join(["method", *map(escaped, metrics)]) + r" \\"
    begin, end = rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end, ""])


def write_tables(study: Study, lines: Sequence[Line], out: Path) -> None:
    """Write the table as CSV, JSON, Markdown and LaTeX."""
    write_whole(out / "table.csv", write_rows([HEADER, *(cells_of(line) for line in lines)]))
    write_whole(out / "table.md", markdown(lines))
    write_whole(out / "table.tex", latex(lines))
    rows = [
        {
            "method": x.method,
            "metric": x.metric,
            "mean": x.final.mean,
            "half_t": x.final.half,
            "half_bootstrap": x.spread.half,
            "best": x.best.mean,
            "wobble": x.wobble,
            "rounds_to": x.reached,
            "values": list(x.values),
            "difference": x.against.difference.mean if x.against else None,
            "difference_half": x.against.difference.half if x.against else None,
            "p": x.against.p if x.against else None,
            "p_holm": x.p_holm if x.against else None,
            "r": x.against.r if x.against else None,
            "delta": x.against.delta if x.against else None,
            "verdict": x.verdict,
        }
        for x in lines
    ]
    clean = [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]
    ways = {x.metric: x.way for x in lines if x.way}
    told = {"recipe": study.called, "baseline": study.baseline, "directions": ways}
    table = {"schema": 1, **told, "lines": clean}
    write_whole(out / "table.json", json.dumps(table, indent=2) + "\n")
