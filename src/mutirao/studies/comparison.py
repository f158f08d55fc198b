"""The tables of a study: means with intervals, paired tests against a baseline, and what they allow to say."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.metrics import Direction, final_std, rounds_to
from mutirao.randomness import rng
from mutirao.runs.reader import Record
from mutirao.stats import Comparison, Effect, Interval, bootstrap, holm, interval, paired
from mutirao.studies.published import PublishedValue
from mutirao.studies.study import Study, results

Runs = dict[str, dict[tuple[Any, ...], Record]]  # by method, then by place in the grid


@dataclass(frozen=True)
class MethodResult:
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
    claim: PublishedValue | None = None  # what a paper says

    @property
    def apart(self) -> float:
        """Ours minus the published value; NaN if there is none."""
        return self.final.mean - self.claim.value if self.claim else math.nan

    @property
    def within(self) -> bool | None:
        """Whether the published value lies in the interval of ours; None if one of them is not there."""
        if math.isnan(self.apart) or math.isnan(self.final.half):
            return None
        return abs(self.apart) <= self.final.half


def compare_methods(study: Study, out: Path) -> list[MethodResult]:
    r"""Compare the finished cells; methods are paired where both have finished.

    >>> text = 'recipe = "quickstart"\nseeds = 1\nmetrics = ["loss"]\n[methods.fedavg]\nrounds = 1\nper_round = 2\n'
    >>> _ = Path("loss.toml").write_text(text)
    >>> from mutirao.studies.study import run_study, read_study
    >>> study = read_study(Path("loss.toml"))
    >>> _ = carry_out(study, Path("runs/loss"), start="here")
    >>> [(line.method, line.metric) for line in compare_methods(study, Path("runs/loss"))]
    [('fedavg', 'loss')]
    """
    runs: Runs = {}
    for cell, record in results(study, out):
        runs.setdefault(cell.method, {})[cell.place] = record
    if not runs:
        raise ConfigError(f"{out} holds no finished run of the study")
    found = dict.fromkeys(k for cells in runs.values() for record in cells.values() for k in record.summary["final"])
    lines: list[MethodResult] = []
    for metric in study.metrics or tuple(found):
        of_metric = [result_of(study, runs, method, metric) for method in study.methods if method in runs]
        known = {line.method: line.against.p_t for line in of_metric if line.against}
        corrected = holm({method: p for method, p in known.items() if not math.isnan(p)})
        lines += [MethodResult(**{**vars(line), "p_holm": corrected.get(line.method, math.nan)}) for line in of_metric]
    return lines


def direction_in(runs: Runs, metric: str) -> Direction | None:
    """Which way a metric is better, as the first run says that does."""
    return next((way for cells in runs.values() for run in cells.values() if (way := run.direction(metric))), None)


def result_of(study: Study, runs: Runs, method: str, metric: str) -> MethodResult:
    """What is known of one method by one metric."""
    cells = {place: run for place, run in runs[method].items() if metric in run.summary["final"]}
    ends = {place: run.summary["final"][metric] for place, run in cells.items()}
    timed = [[(int(row["round"]), row[metric]) for row in run.rows if metric in row] for run in cells.values()]
    theirs = {p: run.summary["final"] for p, run in runs.get(study.baseline, {}).items()}
    common = [p for p in cells if metric in theirs.get(p, {})]
    against, way = None, direction_in(runs, metric)
    if method != study.baseline and common and way:
        sign = -1.0 if way == "lower" else 1.0
        both = np.array([ends[p] for p in common]), np.array([theirs[p][metric] for p in common])
        against = paired(sign * both[0], sign * both[1], study.shared)
    missing = "direction not declared" if way is None else "nothing in common"
    values = list(ends.values())
    return MethodResult(
        method=method,
        metric=metric,
        final=interval(values),
        spread=bootstrap(values, rng(0, 0, "bootstrap", f"{method} {metric}")),
        best=interval([run.summary["best"].get(metric, math.nan) for run in cells.values()]),
        wobble=float(np.mean([final_std(curve, study.last) for curve in timed if curve])) if any(timed) else math.nan,
        reached=reached_in(timed, study.threshold[metric], way == "lower") if way and metric in study.threshold else "",
        against=against,
        p_holm=math.nan,
        values=tuple(values),
        way=way,
        verdict="baseline" if method == study.baseline else against.verdict if against else missing,
        claim=study.published.claims.get((method, metric)),
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
    "p two-sided",
    "p t",
    "p Holm",
    "r",
    "delta",
    "d",
    "verdict",
)
BESIDE = ("published", "ours - published", "within", "published rounds")  # columns of what papers say, where they do


def header_of(lines: Sequence[MethodResult]) -> tuple[str, ...]:
    """The columns of a table: those that all have, and of published values as many as there are."""
    rows = [beside(line) for line in lines]
    return (*HEADER, *(name for i, name in enumerate(BESIDE) if any(row[i] for row in rows)))


def row_of(line: MethodResult, header: Sequence[str]) -> tuple[str, ...]:
    """A line as the texts below a header."""
    texts = dict(zip((*HEADER, *BESIDE), (*cells_of(line), *beside(line)), strict=True))
    return tuple(texts[name] for name in header)


def beside(line: MethodResult) -> tuple[str, ...]:
    """What is published, how far ours is from it, and whether it lies in the interval of ours."""
    claim = line.claim
    if claim is None:
        return ("",) * len(BESIDE)
    apart = "" if math.isnan(line.apart) else f"{line.apart:+.4f}"
    within = "" if not apart else {True: "yes", False: "no", None: "-"}[line.within]
    return str(claim), apart, within, "" if math.isnan(claim.rounds) else f"{claim.rounds:g}"


def cells_of(line: MethodResult) -> tuple[str, ...]:
    """A line as the texts of a table row, without what is published."""
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
        *((p_text(test.p), p_text(test.p_two_sided), p_text(test.p_t), p_text(line.p_holm)) if test else ("",) * 4),
        *((spanned(test.r, ".2f"), spanned(test.delta), spanned(test.d)) if test else ("",) * 3),
        line.verdict,
    )


def p_text(p: float) -> str:
    """Four digits, or a dash for what is not known."""
    return "-" if math.isnan(p) else f"{p:.4g}"


def spanned(effect: Effect, form: str = "+.2f") -> str:
    """An effect size with its interval, or a dash for what is not known."""
    if math.isnan(effect.value):
        return "-"
    between = "" if math.isnan(effect.low) else f" [{effect.low:{form}}, {effect.high:{form}}]"
    return f"{effect.value:{form}}{between}"


def number(value: float) -> str:
    """Four decimals, or a dash for what is not known."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def markdown(lines: Sequence[MethodResult]) -> str:
    """The table in Markdown."""
    header = header_of(lines)
    rows = [header, tuple("---" for _ in header), *(row_of(line, header) for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def latex(lines: Sequence[MethodResult]) -> str:
    """Mean and interval of each method by metric, the best of a column in bold, for booktabs."""
    methods, metrics = list(dict.fromkeys(x.method for x in lines)), list(dict.fromkeys(x.metric for x in lines))
    by = {(x.method, x.metric): x for x in lines}
    top: dict[str, MethodResult] = {}
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

    def told(method: str, metric: str) -> str:
        claim = by[method, metric].claim if (method, metric) in by else None
        return str(claim).replace("±", r"$\pm$") if claim and str(claim) else "--"

    columns: list[tuple[str, Callable[[str, str], str]]] = []
    heads = []
    for metric in metrics:
        columns.append((metric, cell))
        heads.append(escaped(metric))
        if any(x.metric == metric and x.claim and str(x.claim) for x in lines):
            columns.append((metric, told))
            heads.append("published")
    body = [" & ".join([escaped(m), *(text(m, k) for k, text in columns)]) + r" \\" for m in methods]
    head = " & ".join(["method", *heads]) + r" \\"
    begin, end = rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end, ""])


def write_tables(study: Study, lines: Sequence[MethodResult], out: Path) -> None:
    """Write the table as CSV, JSON, Markdown and LaTeX."""
    header, about = header_of(lines), study.published
    write_whole(out / "table.csv", write_rows([header, *(row_of(line, header) for line in lines)]))
    said = f"\nPublished: {about.source}.{f' {about.note}' if about.note else ''}\n" if about.claims else ""
    write_whole(out / "table.md", markdown(lines) + said)
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
            "p_two_sided": x.against.p_two_sided if x.against else None,
            "p_t": x.against.p_t if x.against else None,
            "p_holm": x.p_holm if x.against else None,
            **effects_of(x.against),
            "verdict": x.verdict,
            "published": published_of(x),
        }
        for x in lines
    ]
    clean = [without_nan(row) for row in rows]
    ways = {x.metric: x.way for x in lines if x.way}
    told = {"recipe": study.called, "baseline": study.baseline, "directions": ways, "shared": study.shared}
    if about.claims:
        told["published"] = {"source": about.source, "note": about.note}
    table = {"schema": 1, **told, "lines": clean}
    write_whole(out / "table.json", json.dumps(table, indent=2) + "\n")


def effects_of(test: Comparison | None) -> dict[str, Any]:
    """The effect sizes with the ends of their intervals, None where there is no test."""
    sizes = {"r": test.r, "delta": test.delta, "d": test.d} if test else {}
    values: dict[str, Any] = {name: sizes[name].value if test else None for name in ("r", "delta", "d")}
    return values | {f"{name}_95": [size.low, size.high] for name, size in sizes.items() if not math.isnan(size.low)}


def published_of(line: MethodResult) -> dict[str, Any] | None:
    """What is published of a line, and how ours lies to it."""
    if line.claim is None:
        return None
    told = {"value": line.claim.value, "half": line.claim.half, "rounds": line.claim.rounds, "apart": line.apart}
    return without_nan(told) | {"within": line.within, "source": line.claim.source, "note": line.claim.note}


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON, which has no word for what is not a number."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
