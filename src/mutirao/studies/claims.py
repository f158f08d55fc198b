"""What papers claim, held against the runs of a study by stated rules: holds, does not hold, or is not shown."""

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
Figures = dict[tuple[Any, ...], float]  # of each run of a method, by its place in the grid

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
SETTLED = 0.05  # a curve is stable where it stays this close to the mean of its last rounds, as a share of it
TEXTS = ("says", "published", "rule", "of", "metric", "method", "only")
KEYS = {*TEXTS, "than", "value", "tolerance"}


@dataclass(frozen=True)
class Figure:
    """One number of a run: `of` says which of its metric, whose `threshold` and `last` rounds are the study's."""

    of: str
    metric: str
    threshold: float
    last: int
    lower: bool

    def __call__(self, record: Record) -> float:
        """The number; NaN if the run does not have it."""
        return float(FIGURES[self.of](self, record))


def final(figure: Figure, record: Record) -> float:
    """The metric after the last round."""
    return float(record.summary["final"].get(figure.metric, math.nan))


def curve_in(figure: Figure, record: Record) -> list[tuple[int, float]]:
    """Rounds and values of the metric, where it was measured."""
    return [(int(row["round"]), row[figure.metric]) for row in record.rows if figure.metric in row]


def wobble(figure: Figure, record: Record) -> float:
    """The standard deviation of the metric over the last rounds."""
    return final_std(curve_in(figure, record), figure.last)


def rounds(figure: Figure, record: Record) -> float:
    """The rounds until the metric is at the threshold; one more than there were if it never is."""
    curve = curve_in(figure, record)
    sign = -1.0 if figure.lower else 1.0
    place = rounds_to([sign * value for _, value in curve], sign * figure.threshold)
    return float(curve[place - 1][0] if place else record.rounds + 1)


def stable(figure: Figure, record: Record) -> float:
    """From which round on the metric stays within 5% of its mean over the last ones; never: one more than all."""
    curve = curve_in(figure, record)
    if not curve:
        return math.nan
    end = float(np.mean([value for round, value in curve if round > curve[-1][0] - figure.last]))
    away = [i for i, (_, value) in enumerate(curve) if abs(value - end) > SETTLED * abs(end)]
    first = away[-1] + 1 if away else 0
    return float(curve[first][0] if first < len(curve) else record.rounds + 1)


def selection_gini(figure: Figure, record: Record) -> float:
    """How unevenly clients were selected: 0 is evenly."""
    return participation_in(record).gini


def gap(figure: Figure, record: Record) -> float:
    """How many times more the client selected most often was selected than the one least often."""
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
    """What a paper says, and how it is held against runs: `method` by a figure, against others or a value."""

    says: str
    method: str
    rule: str
    of: str = "final"
    metric: str = ""
    than: tuple[str, ...] = ()  # the mean of these
    value: float = math.nan
    tolerance: float = 0.0
    published: str = ""
    only: str = ""  # the form it is asked in; empty: in all

    @property
    def methods(self) -> set[str]:
        """All methods that it needs."""
        return {self.method, *self.than}


@dataclass(frozen=True)
class EvaluatedClaim:
    """A claim with its verdict, and the figures it goes by."""

    claim: Claim
    verdict: Verdict
    ours: str


def read_claims(where: str, tables: Any) -> tuple[Claim, ...]:
    """The `[[claims]]` of a file, each with a rule that is known and what that rule needs."""
    return tuple(parse_claim(f"{where}: claim {i}", table) for i, table in enumerate(tables, 1))


def parse_claim(where: str, table: Mapping[str, Any]) -> Claim:
    """One claim, checked."""
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
    """Every claim, held against the runs that are finished."""
    runs: dict[str, dict[tuple[Any, ...], Record]] = {}
    for cell, record in results(study, out):
        runs.setdefault(cell.method, {})[cell.place] = record
    return [evaluate_claim(study, claim, runs) for claim in claims]


def evaluate_claim(study: Study, claim: Claim, runs: Mapping[str, Mapping[tuple[Any, ...], Record]]) -> EvaluatedClaim:
    """One claim."""
    if lacking := sorted(claim.methods - {*runs}):
        return EvaluatedClaim(claim, "not shown", f"no finished run of {', '.join(lacking)}")
    if claim.rule == "leads":
        return EvaluatedClaim(claim, *hold_lead(claim, runs))
    ways = [way for cells in runs.values() for record in cells.values() if (way := record.direction(claim.metric))]
    figure = Figure(claim.of, claim.metric, study.threshold.get(claim.metric, math.nan), study.last, "lower" in ways)
    figures = {m: known(figure, runs[m]) for m in claim.methods}
    if claim.rule not in AMONG:
        return EvaluatedClaim(claim, *hold_value(claim, list(figures[claim.method].values()), study.shared))
    return EvaluatedClaim(
        claim, *hold_pairs(claim, figures[claim.method], [figures[m] for m in claim.than], study.shared)
    )


def known(figure: Figure, cells: Mapping[tuple[Any, ...], Record]) -> Figures:
    """The figure of every run that has it."""
    found = {place: figure(record) for place, record in cells.items()}
    return {place: value for place, value in found.items() if not math.isnan(value)}


def hold_value(claim: Claim, values: Collection[float], shared: float = 0.0) -> tuple[Verdict, str]:
    """Rules `each`, `mean` and `below`."""
    if not values:
        return "not shown", "no run has the figure"
    told = f"{np.mean(list(values)):.4g} (mean of {len(values)}), from {min(values):.4g} to {max(values):.4g}"
    if claim.rule == "below":
        found = interval(list(values), shared=shared)
        told += f", ± {found.half:.2g}"
        if math.isnan(found.half) or found.contains(claim.value):
            return "not shown", told
        return ("holds" if found.mean < claim.value else "does not hold"), told
    off = [abs(v - claim.value) for v in (values if claim.rule == "each" else [float(np.mean(list(values)))])]
    return ("holds" if max(off) <= claim.tolerance + 1e-12 else "does not hold"), told


def hold_pairs(claim: Claim, ours: Figures, theirs: Sequence[Figures], shared: float) -> tuple[Verdict, str]:
    """Rules `more`, `less` and `equal`: pairs of the same place, theirs the mean of several methods."""
    common = [place for place in ours if all(place in other for other in theirs)]
    a = np.array([ours[place] for place in common])
    b = np.array([np.mean([other[place] for other in theirs]) for place in common])
    means = f"{np.mean(a):.4g} against {np.mean(b):.4g}" if common else "no pair has the figure"
    if len(common) < 2:
        return "not shown", f"{means}; {len(common)} pair, and two are needed"
    found = paired(a, b, shared).difference
    told = f"{means}; difference {found.mean:+.4g} ± {found.half:.2g}, {len(common)} pairs"
    if claim.rule == "equal":
        far = abs(found.mean) - claim.tolerance
        return ("holds" if far <= -found.half else "does not hold" if far > found.half else "not shown"), told
    if abs(found.mean) <= found.half or not found.mean:
        return "not shown", told
    return ("holds" if (found.mean > 0) == (claim.rule == "more") else "does not hold"), told


def hold_lead(claim: Claim, runs: Mapping[str, Mapping[tuple[Any, ...], Record]]) -> tuple[Verdict, str]:
    """Rule `leads`: in every place, the rounds that the method leads among those it is compared with."""
    of = [claim.method, *claim.than]
    common = [place for place in runs[claim.method] if all(place in runs[m] for m in of)]
    shares = [dominance({m: [runs[m][place]] for m in of}, claim.metric)[claim.method] for place in common]
    if len(shares) < 2:
        return "not shown", f"{len(shares)} place has runs of all {len(of)}, and two are needed"
    found = interval(shares)
    told = f"leads {found.mean:.0%} ± {found.half:.0%} of the rounds, {len(shares)} places"
    if found.contains(0.5):
        return "not shown", told
    return ("holds" if found.mean > 0.5 else "does not hold"), told
