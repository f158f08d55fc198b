"""The tables of a study: means with confidence intervals, paired tests against a baseline, and verdicts."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
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

Runs = dict[str, dict[tuple[Any, ...], Record]]  # by method, then by the cell's place in the grid


@dataclass(frozen=True)
class MethodResult:
    """The results of one method by one metric, over all folds and seeds."""

    method: str
    metric: str
    final: Interval
    spread: Interval  # by bootstrap
    best: Interval
    final_std: float  # standard deviation over the last rounds, averaged over runs
    reached: str  # rounds to the threshold
    against: Comparison | None  # with the baseline; None for the baseline itself, and without common cells
    p_holm: float
    values: tuple[float, ...]
    direction: Direction | None  # which way is better
    verdict: str  # better, worse or not shown, compared with the baseline; or why there is none
    published: PublishedValue | None = None

    @property
    def apart(self) -> float:
        """Our mean minus the published value; NaN if there is none."""
        if self.published:
            return self.final.mean - self.published.value
        return math.nan

    @property
    def within(self) -> bool | None:
        """Whether the published value lies in our confidence interval; None if one of them is missing."""
        if math.isnan(self.apart) or math.isnan(self.final.half):
            return None
        return abs(self.apart) <= self.final.half


def compare_methods(study: Study, out: Path) -> list[MethodResult]:
    r"""Compare the finished cells; methods are paired where both have finished.

    >>> text = 'recipe = "quickstart"\nseeds = 1\nmetrics = ["loss"]\n[methods.fedavg]\nrounds = 1\nper_round = 2\n'
    >>> _ = Path("loss.toml").write_text(text)
    >>> from mutirao.studies.study import run_study, read_study
    >>> study = read_study(Path("loss.toml"))
    >>> _ = run_study(study, Path("runs/loss"), start="here")
    >>> [(line.method, line.metric) for line in compare_methods(study, Path("runs/loss"))]
    [('fedavg', 'loss')]
    """
    runs: Runs = {}
    for cell, record in results(study, out):
        runs.setdefault(cell.method, {})[cell.place] = record
    if not runs:
        raise ConfigError(f"{out} contains no finished run of the study")
    found: dict[str, None] = {}
    for record in records_of(runs):
        found |= dict.fromkeys(record.summary["final"])
    lines: list[MethodResult] = []
    for metric in study.metrics or tuple(found):
        results_of_metric = [result_of(study, runs, method, metric) for method in study.methods if method in runs]
        known = {line.method: line.against.p_t for line in results_of_metric if line.against}
        # Holm's correction needs the p-values of all methods by this metric, so it is added to their lines afterwards.
        corrected = holm({method: p for method, p in known.items() if not math.isnan(p)})
        lines += [
            MethodResult(**{**vars(line), "p_holm": corrected.get(line.method, math.nan)}) for line in results_of_metric
        ]
    return lines


def records_of(runs: Runs) -> Iterator[Record]:
    """All runs, method by method."""
    for cells in runs.values():
        yield from cells.values()


def direction_in(runs: Runs, metric: str) -> Direction | None:
    """Which way a metric is better, by the first run that declares it."""
    return next(filter(None, (record.direction(metric) for record in records_of(runs))), None)


def result_of(study: Study, runs: Runs, method: str, metric: str) -> MethodResult:
    """The results of one method by one metric."""
    cells = {place: run for place, run in runs[method].items() if metric in run.summary["final"]}
    ends = {place: run.summary["final"][metric] for place, run in cells.items()}
    curves = [curve_of(run, metric) for run in cells.values()]
    baseline = {place: run.summary["final"] for place, run in runs.get(study.baseline, {}).items()}
    common = [place for place in cells if metric in baseline.get(place, {})]
    direction = direction_in(runs, metric)
    against = None
    if method == study.baseline:
        verdict = "baseline"
    elif direction is None:
        verdict = "direction not declared"
    elif not common:
        verdict = "nothing in common"
    else:
        # With the sign, a positive difference is always an improvement, and one-sided p-values test for that.
        sign = -1.0 if direction == "lower" else 1.0
        ours = np.array([ends[place] for place in common])
        theirs = np.array([baseline[place][metric] for place in common])
        against = paired(sign * ours, sign * theirs, study.shared)
        verdict = against.verdict
    reached = ""
    if direction and metric in study.threshold:
        reached = reached_in(curves, study.threshold[metric], direction == "lower")
    stds = [final_std(curve, study.last) for curve in curves if curve]
    values = list(ends.values())
    return MethodResult(
        method=method,
        metric=metric,
        final=interval(values),
        spread=bootstrap(values, rng(0, 0, "bootstrap", f"{method} {metric}")),
        best=interval([run.summary["best"].get(metric, math.nan) for run in cells.values()]),
        final_std=float(np.mean(stds)) if stds else math.nan,
        reached=reached,
        against=against,
        p_holm=math.nan,
        values=tuple(values),
        direction=direction,
        verdict=verdict,
        published=study.published.claims.get((method, metric)),
    )


def curve_of(run: Record, metric: str) -> list[tuple[int, float]]:
    """The rounds in which a metric was evaluated, and its values."""
    return [(int(row["round"]), row[metric]) for row in run.rows if metric in row]


def reached_in(curves: Sequence[Sequence[tuple[int, float]]], threshold: float, lower: bool = False) -> str:
    """The median number of rounds until a value is at least the threshold (at most, if `lower` values are better).

    Curves are (round, value). Runs that never reach it count as later than their last round.
    """
    sign = -1.0 if lower else 1.0
    times: list[float] = []
    for curve in curves:
        count = rounds_to([sign * value for _, value in curve], sign * threshold)
        # Evaluations may be several rounds apart: what is counted are rounds, not evaluations.
        times.append(math.inf if count is None else curve[count - 1][0])
    known = sum(math.isfinite(time) for time in times)
    median = float(np.median(times)) if times else math.inf
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
BESIDE = (
    "published",
    "ours - published",
    "within",
    "published rounds",
)  # columns with published values, if any


def header_of(lines: Sequence[MethodResult]) -> tuple[str, ...]:
    """The columns of a table: the usual ones, and those of published values that are not empty."""
    rows = [beside(line) for line in lines]
    return (*HEADER, *(name for i, name in enumerate(BESIDE) if any(row[i] for row in rows)))


def row_of(line: MethodResult, header: Sequence[str]) -> tuple[str, ...]:
    """A result as the texts below a header."""
    texts = dict(zip((*HEADER, *BESIDE), (*cells_of(line), *beside(line)), strict=True))
    return tuple(texts[name] for name in header)


def beside(line: MethodResult) -> tuple[str, ...]:
    """The published value, our difference from it, and whether it lies in our confidence interval."""
    published = line.published
    if published is None:
        return ("",) * len(BESIDE)
    apart = "" if math.isnan(line.apart) else f"{line.apart:+.4f}"
    within = "" if not apart else {True: "yes", False: "no", None: "-"}[line.within]
    rounds = "" if math.isnan(published.rounds) else f"{published.rounds:g}"
    return str(published), apart, within, rounds


def cells_of(line: MethodResult) -> tuple[str, ...]:
    """A result as the texts of a table row, without published values."""
    test = line.against
    tested = ("",) * 8
    if test:
        tested = (
            f"{test.difference.mean:+.4f} ± {number(test.difference.half)}",
            p_text(test.p),
            p_text(test.p_two_sided),
            p_text(test.p_t),
            p_text(line.p_holm),
            with_interval(test.r, ".2f"),
            with_interval(test.delta),
            with_interval(test.d),
        )
    return (
        line.method,
        line.metric,
        number(line.final.mean),
        number(line.final.half),
        number(line.spread.half),
        number(line.best.mean),
        number(line.final_std),
        line.reached,
        *tested,
        line.verdict,
    )


def p_text(p: float) -> str:
    """Four digits, or a dash for NaN."""
    if math.isnan(p):
        return "-"
    return f"{p:.4g}"


def with_interval(effect: Effect, form: str = "+.2f") -> str:
    """An effect size with its confidence interval, or a dash for NaN."""
    if math.isnan(effect.value):
        return "-"
    between = "" if math.isnan(effect.low) else f" [{effect.low:{form}}, {effect.high:{form}}]"
    return f"{effect.value:{form}}{between}"


def number(value: float) -> str:
    """Four decimals, or a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}"


def markdown(lines: Sequence[MethodResult]) -> str:
    """The table in Markdown."""
    header = header_of(lines)
    return markdown_table([header, *(row_of(line, header) for line in lines)])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first one is the header."""
    header, *content = rows
    lines = [header, ["---"] * len(header), *content]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def latex(lines: Sequence[MethodResult]) -> str:
    """Mean and interval of each method by metric, the best of a column in bold, for booktabs."""
    methods = list(dict.fromkeys(x.method for x in lines))
    metrics = list(dict.fromkeys(x.metric for x in lines))
    by = {(x.method, x.metric): x for x in lines}
    top: dict[str, MethodResult] = {}
    for x in lines:
        if not x.direction or math.isnan(x.final.mean):
            continue
        best = top.get(x.metric)
        if best is None or (x.final.mean < best.final.mean) == (x.direction == "lower"):
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

    def published(method: str, metric: str) -> str:
        line = by.get((method, metric))
        text = str(line.published) if line and line.published else ""
        return text.replace("±", r"$\pm$") or "--"

    columns: list[tuple[str, Callable[[str, str], str]]] = []
    heads = []
    for metric in metrics:
        columns.append((metric, cell))
        heads.append(escaped(metric))
        if any(x.metric == metric and x.published and str(x.published) for x in lines):
            columns.append((metric, published))
            heads.append("published")
    begin = rf"\begin{{tabular}}{{l{'r' * len(columns)}}}"
    rows = [begin, r"\toprule", " & ".join(["method", *heads]) + r" \\", r"\midrule"]
    for method in methods:
        texts = [text(method, metric) for metric, text in columns]
        rows.append(" & ".join([escaped(method), *texts]) + r" \\")
    return "\n".join([*rows, r"\bottomrule", r"\end{tabular}", ""])


def write_tables(study: Study, lines: Sequence[MethodResult], out: Path) -> None:
    """Write the table as CSV, JSON, Markdown and LaTeX."""
    header = header_of(lines)
    about = study.published
    write_whole(out / "table.csv", write_rows([header, *(row_of(line, header) for line in lines)]))
    text = markdown(lines)
    if about.claims:
        note = f" {about.note}" if about.note else ""
        text += f"\nPublished: {about.source}.{note}\n"
    write_whole(out / "table.md", text)
    write_whole(out / "table.tex", latex(lines))
    rows = [
        {
            "method": x.method,
            "metric": x.metric,
            "mean": x.final.mean,
            "half_t": x.final.half,
            "half_bootstrap": x.spread.half,
            "best": x.best.mean,
            "wobble": x.final_std,
            "rounds_to": x.reached,
            "values": list(x.values),
            **comparison_fields(x),
            **effects_of(x.against),
            "verdict": x.verdict,
            "published": published_of(x),
        }
        for x in lines
    ]
    clean = [without_nan(row) for row in rows]
    directions = {x.metric: x.direction for x in lines if x.direction}
    table: dict[str, Any] = {"schema": 1, "recipe": study.called, "baseline": study.baseline}
    table |= {"directions": directions, "shared": study.shared}
    if about.claims:
        table["published"] = {"source": about.source, "note": about.note}
    table["lines"] = clean
    write_whole(out / "table.json", json.dumps(table, indent=2) + "\n")


def comparison_fields(line: MethodResult) -> dict[str, float | None]:
    """The difference from the baseline and its p-values, None without a test."""
    test = line.against
    if test is None:
        return dict.fromkeys(("difference", "difference_half", "p", "p_two_sided", "p_t", "p_holm"))
    return {
        "difference": test.difference.mean,
        "difference_half": test.difference.half,
        "p": test.p,
        "p_two_sided": test.p_two_sided,
        "p_t": test.p_t,
        "p_holm": line.p_holm,
    }


def effects_of(test: Comparison | None) -> dict[str, Any]:
    """The effect sizes with their confidence intervals, None without a test."""
    if test is None:
        return dict.fromkeys(("r", "delta", "d"))
    sizes = {"r": test.r, "delta": test.delta, "d": test.d}
    values: dict[str, Any] = {name: size.value for name, size in sizes.items()}
    return values | {f"{name}_95": [size.low, size.high] for name, size in sizes.items() if not math.isnan(size.low)}


def published_of(line: MethodResult) -> dict[str, Any] | None:
    """The published value of a result, and our difference from it."""
    published = line.published
    if published is None:
        return None
    values = {"value": published.value, "half": published.half, "rounds": published.rounds, "apart": line.apart}
    return without_nan(values) | {"within": line.within, "source": published.source, "note": published.note}


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON, with None for NaN."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
