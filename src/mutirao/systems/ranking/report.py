"""Compare the methods of a study with its baseline query by query, which a test over folds cannot.

Each query is in the test part of one fold, and so is evaluated once a seed. Its values are averaged over seeds first,
so that each query counts once; then queries are the pairs. This tests whether a lead generalises to other queries, with
models such as these; the test over folds says whether it generalises to other training data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.io import read_csv, write_rows, write_whole
from mutirao.report.plot_kinds import file_in
from mutirao.report.plots import INK, blank, save, tidy
from mutirao.runs.reader import Record
from mutirao.stats import Comparison, holm, paired
from mutirao.studies.study import Study, results
from mutirao.systems.ranking.metrics import AVERSION, RankerComparison, compare_rankers

Floats = npt.NDArray[np.float64]
QueryValues = Mapping[Any, Mapping[str, Mapping[str, float]]]  # by place, then by query: its metrics
PLAIN = ("query", "documents", "relevant")  # columns of queries.csv that are no metrics
TESTS = ("method", "metric", "queries", "wins", "losses", "ties", "difference", "p t", "p Holm", "URisk", "TRisk")
HEADER = (*TESTS, "GeoRisk", "GeoRisk of the baseline", "verdict")


@dataclass(frozen=True)
class QueryLine:
    """One method by one metric against the baseline, over queries."""

    method: str
    metric: str
    ours: Floats
    theirs: Floats
    test: Comparison
    against: RankerComparison
    p_holm: float


def read_queries(path: Path) -> dict[str, dict[str, float]]:
    """The metrics of each query, from a run's `queries.csv`."""
    rows = read_csv(path)
    return {row["query"]: _metric_columns(row) for row in rows}


def _metric_columns(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name not in PLAIN}


def gather_queries(study: Study, out: Path) -> dict[str, dict[tuple[Any, ...], dict[str, dict[str, float]]]]:
    """The queries of all finished runs that have `queries.csv`, by method and place."""
    found: dict[str, dict[tuple[Any, ...], dict[str, dict[str, float]]]] = {}
    for cell, record in results(study, out):
        if (path := record.path / "queries.csv").exists():
            found.setdefault(cell.method, {})[cell.place] = read_queries(path)
    return found


def pair_queries(ours: QueryValues, theirs: QueryValues, metric: str) -> tuple[Floats, Floats]:
    """Each query's values of ours and of theirs, averaged over the places where both have it, in order of names."""
    both: dict[str, list[tuple[float, float]]] = {}
    for place in ours:
        for query, row in ours[place].items():
            if place in theirs and query in theirs[place]:
                both.setdefault(query, []).append((row[metric], theirs[place][query][metric]))
    # A query counts once, however many seeds evaluated it: repeated measurements are no independent pairs.
    table = np.array([np.mean(both[query], axis=0) for query in sorted(both)]).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def compare_queries(study: Study, out: Path, aversion: float = AVERSION) -> list[QueryLine]:
    """Every method against the baseline by every metric of the study; empty where runs have no queries."""
    found = gather_queries(study, out)
    if study.baseline not in found:
        return []
    theirs = found[study.baseline]
    first = next(iter(next(iter(theirs.values())).values()))
    lines: list[QueryLine] = []
    for metric in (m for m in first if m in (study.metrics or first)):
        pairs: dict[str, tuple[Floats, Floats]] = {}
        for method in study.methods:
            if method in found and method != study.baseline:
                pair = pair_queries(found[method], theirs, metric)
                if len(pair[0]) > 1:
                    pairs[method] = pair
        tests = {m: paired(a, b) for m, (a, b) in pairs.items()}
        corrected = holm({m: test.p_t for m, test in tests.items() if not np.isnan(test.p_t)})
        for m, (a, b) in pairs.items():
            against = compare_rankers(a, b, aversion)
            lines.append(QueryLine(m, metric, a, b, tests[m], against, corrected.get(m, float("nan"))))
    return lines


def query_table_rows(lines: Sequence[QueryLine]) -> Iterator[tuple[str, ...]]:
    """The lines as cells of a table."""
    for line in lines:
        d = line.test.difference
        a = line.against
        counts = (str(len(line.ours)), str(a.wins), str(a.losses), str(a.ties))
        tests = (f"{d.mean:+.4f} ± {d.half:.4f}", f"{line.test.p_t:.4g}", f"{line.p_holm:.4g}")
        risks = (f"{a.u_risk:+.4f}", f"{a.t_risk:+.2f}", f"{a.geo_risk:.4f}", f"{a.their_geo_risk:.4f}")
        yield (line.method, line.metric, *counts, *tests, *risks, line.test.verdict)


def write_query_tables(study: Study, out: Path) -> list[QueryLine]:
    """Write `queries.csv` and `queries.md` into the study's folder, if its runs have queries."""
    lines = compare_queries(study, out)
    if lines:
        rows = list(query_table_rows(lines))
        write_whole(out / "queries.csv", write_rows([HEADER, *rows]))
        text = "".join(f"| {' | '.join(row)} |\n" for row in (HEADER, ["---"] * len(HEADER), *rows))
        note = (
            f"\nAgainst {study.baseline}, each query once (its mean over seeds); losses count {1 + AVERSION:g} times.\n"
        )
        write_whole(out / "queries.md", text + note)
    return lines


WON = "#4477AA"
LOST = "#CC6677"


def draw_wins(differences: Mapping[str, npt.NDArray[np.float64]], label: str, path: Path | str) -> None:
    """Draw one panel a method: a bar a query, by falling gain, with the numbers of queries won and lost."""
    across = min(3, len(differences))
    down = -(-len(differences) // across)
    figure, grid = blank(3.3 * across, 2.7 * down + 0.3, down, across, squeeze=False, sharey=True)
    for axes, (method, values) in zip(grid.flat, differences.items(), strict=False):
        ordered = np.sort(values)[::-1]
        place = np.arange(len(ordered))
        axes.fill_between(place, np.maximum(ordered, 0), step="mid", color=WON, linewidth=0)
        axes.fill_between(place, np.minimum(ordered, 0), step="mid", color=LOST, linewidth=0)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_title(f"{method}\n{(values > 0).sum()} won, {(values < 0).sum()} lost", fontsize=8)
        tidy(axes, grid="y")
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    for axes in grid.flat[: len(differences)]:
        axes.set_xlabel("queries, the greatest gain first")
    for axes in grid.flat[len(differences) :]:
        axes.remove()
    save(figure, path)


def plot_wins(folder: Path, out: Path, metric: str = "", against: str = "") -> list[Path]:
    """Plot the queries that a run wins and loses against another run on the same test queries."""
    if not against:
        raise ConfigError("wins: name another run on the same queries, with --against FOLDER")
    sides: list[dict[str, dict[str, float]]] = []
    for place in (folder, Path(against)):
        if not (place / "queries.csv").is_file():
            raise ConfigError(f"{place} has no queries.csv; expected the folder of a finished ranking run")
        sides.append(read_queries(place / "queries.csv"))
    ours, theirs = sides
    metric = metric or Record.begun(folder).monitor.removeprefix("vali_")
    for side in sides:
        if metric not in (known := next(iter(side.values()), {})):
            raise ConfigError(f"no query has a metric {metric!r}{nearest(metric, known)}")
    a, b = pair_queries({0: ours}, {0: theirs}, metric)
    if not len(a):
        raise ConfigError(f"{folder} and {against} have no test queries in common")
    found = compare_rankers(a, b)
    name = f"{folder.name} against {Path(against).name}\nURisk {found.u_risk:+.4f}, TRisk {found.t_risk:+.2f}"
    path = file_in(out, "wins.png")
    draw_wins({name: a - b}, f"{metric}, difference", path)
    return [path]


def draw_queries(study: Study, out: Path) -> list[Path]:
    """Write the comparison of queries, and draw wins and losses against the baseline by the first metric."""
    lines = write_query_tables(study, out)
    if not lines:
        return []
    metric = lines[0].metric
    path = out / "wins.png"
    differences = {line.method: line.ours - line.theirs for line in lines if line.metric == metric}
    draw_wins(differences, f"{metric}, difference", path)
    return [path]
