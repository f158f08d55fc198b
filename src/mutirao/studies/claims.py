"""Published claims, checked on the runs of a study by stated rules: holds, does not hold, or not shown."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.metrics import final_std, rounds_to
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.stats import interval, paired
from mutirao.studies.study import Study, results
from mutirao.studies.targets import dominance

Verdict = Literal["holds", "does not hold", "not shown"]
Figures = dict[tuple[Any, ...], float]  # of each run of a method, by its cell's place in the grid

RULES = {
    "more": "the 95% interval of the paired difference lies above zero (below: it does not hold; both: not shown)",
    "less": "the 95% interval of the paired difference lies below zero (above: it does not hold; both: not shown)",
    "equal": "the 95% interval of the paired difference is within the tolerance (outside: does not hold; or not shown)",
    "each": "every run's figure is the value, give or take the tolerance",
    "mean": "the mean over the runs is the value, give or take the tolerance",
    "leads": "the 95% interval of the share of rounds in which its best value so far is the highest of all lies above "
    "a half (below: it does not hold; both: not shown)",
    "below": "the 95% interval of the mean over the runs lies below the value (above: does not hold; else not shown)",
}
AMONG = ("more", "less", "equal", "leads")  # rules that compare with other methods
SETTLED = 0.05  # relative distance from the mean of the last rounds within which a curve is stable
TEXTS = ("says", "published", "rule", "of", "metric", "method", "only")
KEYS = {*TEXTS, "than", "value", "tolerance"}


@dataclass(frozen=True)
class Figure:
    """A figure of a run: `of` names it in FIGURES; `threshold` and `last` rounds are the study's."""

    of: str
    metric: str
    threshold: float
    last: int
    lower: bool

    def __call__(self, record: Record) -> float:
        """The value; NaN if the run does not have it."""
        return float(FIGURES[self.of](self, record))


def final(figure: Figure, record: Record) -> float:
    """The metric after the last round."""
    return float(record.summary["final"].get(figure.metric, math.nan))


def curve_in(figure: Figure, record: Record) -> list[tuple[int, float]]:
    """The rounds in which the metric was evaluated, and its values."""
    return [(int(row["round"]), row[figure.metric]) for row in record.rows if figure.metric in row]


def wobble(figure: Figure, record: Record) -> float:
    """The standard deviation of the metric over the last rounds."""
    return final_std(curve_in(figure, record), figure.last)


def rounds(figure: Figure, record: Record) -> float:
    """The rounds until the metric reaches the threshold; one more than all rounds if it never does."""
    curve = curve_in(figure, record)
    sign = -1.0 if figure.lower else 1.0
    place = rounds_to([sign * value for _, value in curve], sign * figure.threshold)
    if place:
        return float(curve[place - 1][0])
    return float(record.rounds + 1)


def stable(figure: Figure, record: Record) -> float:
    """The round from which the metric stays within 5% of its mean over the last rounds; one more than all if never."""
    curve = curve_in(figure, record)
    if not curve:
        return math.nan
    end = float(np.mean([value for round, value in curve if round > curve[-1][0] - figure.last]))
    away = [i for i, (_, value) in enumerate(curve) if abs(value - end) > SETTLED * abs(end)]
    first = max(away, default=-1) + 1
    if first < len(curve):
        return float(curve[first][0])
    return float(record.rounds + 1)


def selection_gini(figure: Figure, record: Record) -> float:
    """Gini coefficient of the clients' selections: 0 is even."""
    return participation_in(record).gini


def gap(figure: Figure, record: Record) -> float:
    """Selections of the most selected client minus those of the least selected one."""
    times = participation_in(record).times
    return float(times.max() - times.min())


FIGURES: dict[str, Callable[[Figure, Record], float]] = {
    "final": final,
    "wobble": wobble,
    "rounds": rounds,
    "stable": stable,
    "gini": selection_gini,
    "gap": gap,
}


@dataclass(frozen=True)
class Claim:
    """A published claim and its check: a figure of `method`, compared with other methods or with a value."""

    says: str
    method: str
    rule: str
    of: str = "final"
    metric: str = ""
    than: tuple[str, ...] = ()  # methods; their mean is compared
    value: float = math.nan
    tolerance: float = 0.0
    published: str = ""
    only: str = ""  # the size of reproduction it is for; empty: all

    @property
    def methods(self) -> set[str]:
        """All methods that it compares."""
        return {self.method, *self.than}


@dataclass(frozen=True)
class EvaluatedClaim:
    """A claim with its verdict, and our figures as text."""

    claim: Claim
    verdict: Verdict
    ours: str


def read_claims(where: str, tables: Any) -> tuple[Claim, ...]:
    """The `[[claims]]` of a file, checked."""
    return tuple(parse_claim(f"{where}: claim {i}", table) for i, table in enumerate(tables, 1))


def parse_claim(where: str, table: Mapping[str, Any]) -> Claim:
    """One claim; ConfigError if its rule or figure is unknown, or lacks what it needs."""
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, KEYS)}")
    for key, known in (("rule", RULES), ("of", FIGURES)):
        if table.get(key, "final") not in known:
            raise ConfigError(f"{where}: {key} {table.get(key)!r} is not known{nearest(str(table.get(key)), known)}")
    than = table.get("than", ())
    claim = Claim(**{**table, "than": (than,) if isinstance(than, str) else tuple(than)})
    if claim.rule in AMONG and not claim.than:
        raise ConfigError(f"{where}: rule {claim.rule!r} compares with others: than = METHOD")
    if claim.rule not in AMONG and math.isnan(claim.value):
        raise ConfigError(f"{where}: rule {claim.rule!r} compares with a value")
    return claim


def evaluate_claims(study: Study, claims: Sequence[Claim], out: Path) -> list[EvaluatedClaim]:
    """Check every claim on the finished runs."""
    runs: dict[str, dict[tuple[Any, ...], Record]] = {}
    for cell, record in results(study, out):
        runs.setdefault(cell.method, {})[cell.place] = record
    return [evaluate_claim(study, claim, runs) for claim in claims]


def evaluate_claim(study: Study, claim: Claim, runs: Mapping[str, Mapping[tuple[Any, ...], Record]]) -> EvaluatedClaim:
    """Check one claim on the runs, by method and place in the grid."""
    missing = sorted(claim.methods - {*runs})
    if missing:
        return EvaluatedClaim(claim, "not shown", f"no finished run of {', '.join(missing)}")
    if claim.rule == "leads":
        return EvaluatedClaim(claim, *check_lead(claim, runs))
    records = [record for cells in runs.values() for record in cells.values()]
    lower = any(record.direction(claim.metric) == "lower" for record in records)
    figure = Figure(claim.of, claim.metric, study.threshold.get(claim.metric, math.nan), study.last, lower)
    figures = {method: evaluate_figure(figure, runs[method]) for method in claim.methods}
    if claim.rule not in AMONG:
        return EvaluatedClaim(claim, *check_value(claim, list(figures[claim.method].values()), study.shared))
    return EvaluatedClaim(
        claim, *check_pairs(claim, figures[claim.method], [figures[m] for m in claim.than], study.shared)
    )


def evaluate_figure(figure: Figure, cells: Mapping[tuple[Any, ...], Record]) -> Figures:
    """The figure of every run that has it."""
    found = {place: figure(record) for place, record in cells.items()}
    return {place: value for place, value in found.items() if not math.isnan(value)}


def check_value(claim: Claim, values: Collection[float], shared: float = 0.0) -> tuple[Verdict, str]:
    """Rules `each`, `mean` and `below`."""
    if not values:
        return "not shown", "no run has the figure"
    mean = float(np.mean(list(values)))
    ours = f"{mean:.4g} (mean of {len(values)}), from {min(values):.4g} to {max(values):.4g}"
    if claim.rule == "below":
        found = interval(list(values), shared=shared)
        ours += f", ± {found.half:.2g}"
        if math.isnan(found.half) or found.contains(claim.value):
            return "not shown", ours
        return verdict_of(found.mean < claim.value), ours
    compared = values if claim.rule == "each" else [mean]
    # 1e-12: a difference that equals the tolerance on paper may exceed it by rounding.
    difference = max(abs(value - claim.value) for value in compared)
    return verdict_of(difference <= claim.tolerance + 1e-12), ours


def check_pairs(claim: Claim, ours: Figures, theirs: Sequence[Figures], shared: float) -> tuple[Verdict, str]:
    """Rules `more`, `less` and `equal`: runs are paired by fold and seed; theirs are means of several methods."""
    common: list[tuple[Any, ...]] = []
    means_of_theirs: list[float] = []
    for place in ours:
        values = [other[place] for other in theirs if place in other]
        if len(values) == len(theirs):
            common.append(place)
            means_of_theirs.append(float(np.mean(values)))
    a = np.array([ours[place] for place in common])
    b = np.array(means_of_theirs)
    means = f"{np.mean(a):.4g} against {np.mean(b):.4g}" if common else "no pair has the figure"
    if len(common) < 2:
        return "not shown", f"{means}; {len(common)} pair, and two are needed"
    found = paired(a, b, shared).difference
    text = f"{means}; difference {found.mean:+.4g} ± {found.half:.2g}, {len(common)} pairs"
    if claim.rule == "equal":
        # The whole interval must lie inside of the tolerance (holds) or outside of it (does not hold).
        excess = abs(found.mean) - claim.tolerance
        if excess <= -found.half or excess > found.half:
            return verdict_of(excess <= 0), text
        return "not shown", text
    if abs(found.mean) <= found.half or not found.mean:
        return "not shown", text
    return verdict_of((found.mean > 0) == (claim.rule == "more")), text


def check_lead(claim: Claim, runs: Mapping[str, Mapping[tuple[Any, ...], Record]]) -> tuple[Verdict, str]:
    """Rule `leads`: the share of rounds in which the method leads the others, for every fold and seed."""
    methods = [claim.method, *claim.than]
    shares: list[float] = []
    for place in runs[claim.method]:
        if all(place in runs[method] for method in methods):
            records = {method: [runs[method][place]] for method in methods}
            shares.append(dominance(records, claim.metric)[claim.method])
    if len(shares) < 2:
        return "not shown", f"{len(shares)} place has runs of all {len(methods)}, and two are needed"
    found = interval(shares)
    text = f"leads {found.mean:.0%} ± {found.half:.0%} of the rounds, {len(shares)} places"
    if found.contains(0.5):
        return "not shown", text
    return verdict_of(found.mean > 0.5), text


def verdict_of(is_true: bool) -> Verdict:
    """The verdict on a claim that the runs can decide."""
    if is_true:
        return "holds"
    return "does not hold"
