"""Tuning: every method's settings are chosen with equal effort, by data that neither train nor test the model."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import flatten, nearest, read_toml, write_value
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.io import write_whole
from mutirao.runs.reader import Record
from mutirao.runs.run_folder import locked_folder
from mutirao.runs.trust import Trust, distrust, mark
from mutirao.stats import Interval, interval
from mutirao.studies.search_space import (
    Grid,
    Point,
    Proposed,
    Search,
    SearchRange,
    check_optuna,
    read_grid,
    read_ranges,
)
from mutirao.studies.shared_data import has_validation
from mutirao.studies.study import (
    OTHERWISE,
    Cell,
    Pairs,
    Study,
    check_declared,
    declared_metrics,
    lay_out,
    plan_of,
    read_study,
    run_cells,
)
from mutirao.studies.study_workers import Start, open_pool

KEYS = {"metric", "seeds", "over", "grid", "range", "trials", "own"}
JUDGE = ("judge_by", "vali")
FIRST_SEED = 1000  # of those that are only counted: far from those of any study
TRIALS = 20


@dataclass(frozen=True)
class Tuning:
    """What a study file's `[tune]` asks for."""

    study: Study  # which is to be confirmed
    table: Mapping[str, Any]  # the study file
    metric: str
    axes: Mapping[str, Sequence[Any]]  # the places in which each point is tried: folds and seeds
    searches: Mapping[str, Search]  # by method
    fixed: Pairs  # settings that were set for all

    @property
    def places(self) -> int:
        """Runs of one trial."""
        return math.prod(len(values) for values in self.axes.values())

    @property
    def effort(self) -> int:
        """Trials of each method."""
        return next(iter(self.searches.values())).size

    @property
    def runs(self) -> int:
        """All runs there will be."""
        return self.effort * self.places * len(self.searches)


@dataclass(frozen=True)
class Trial:
    """A point of a method, and what its runs came to on validation data; `fault` is why one of them did not end."""

    method: str
    number: int
    point: Point
    values: tuple[float, ...] = ()
    fault: str = ""
    sign: float = 1.0  # -1 if lower values are better

    @property
    def name(self) -> str:
        """What its cells are filed under."""
        return f"{self.method}-{self.number}"

    @property
    def result(self) -> Interval:
        """The mean over its runs, with its interval; NaN if one of them did not end."""
        return Interval(math.nan, math.nan) if self.fault else interval(self.values)

    @property
    def settings(self) -> str:
        """The point as people read it."""
        return ", ".join(f"{key} = {write_value(value)}" for key, value in self.point)


def read_tuning(
    path: Path,
    sets: Sequence[tuple[str, Any]] = (),
    trust: Trust = distrust,
    out: Path | None = None,
    trials: int | None = None,
) -> Tuning:
    """Read a study file with a `[tune]` table; all that can be wrong is refused before anything runs."""
    study, table = read_study(path, sets, trust, out), read_toml(path)
    try:
        return parse_tuning(study, table, sets, trials)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_tuning(study: Study, table: dict[str, Any], sets: Sequence[tuple[str, Any]], trials: int | None) -> Tuning:
    """What the `[tune]` table of a study file asks for."""
    told = table.get("tune")
    if not isinstance(told, Mapping):
        raise ConfigError(
            "there is no [tune] table; add one with the settings to try, such as grid = { lr = [0.1, 0.3] }"
        )
    for key in told:
        if key not in KEYS:
            raise ConfigError(f"tune: unknown key {key!r}{nearest(key, KEYS)}")
    metric = told.get("metric", study.metrics[0] if study.metrics else None)
    if not isinstance(metric, str):
        raise ConfigError('tune: name the metric that chooses: metric = "accuracy"')
    check_validation(study)
    axes = axes_of(study, table, told)
    searches = searches_of(study, told, trials)
    fixed = tuple(pair for pair in sets if pair[0] != "seeds")
    found = Tuning(study, table, metric, axes, searches, fixed)
    check_points(found)
    return found


def check_validation(study: Study) -> None:
    """Refuse recipes without validation data, and studies that say themselves what judges."""
    key, value = JUDGE
    if not has_validation(find(str(study.recipe)).config):
        raise ConfigError(
            f"tune: {study.called} has no validation data, and its test data must not choose settings; "
            f"a recipe that has takes {key}={value}"
        )
    if any(key in dict(cell.settings) for cell in study.cells):
        raise ConfigError(
            f"tune: {key} is set by the study; leave it out: tuning goes by {value}, the study by the test"
        )


def axes_of(study: Study, table: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The places of a trial: the study's own axes, but for its seeds, which must stay fresh."""
    over = dict(told.get("over", table.get("over", {})))
    seeds = told.get("seeds", 2)
    chosen = [FIRST_SEED + i for i in range(seeds)] if isinstance(seeds, int) else seeds
    if not isinstance(chosen, list) or not chosen:
        raise ConfigError("tune.seeds must be a list of seeds, or how many")
    if again := [seed for seed in chosen if any(("seed", seed) in cell.place for cell in study.cells)]:
        raise ConfigError(f"tune.seeds: {again[0]} is a seed of the study, which must be confirmed with fresh ones")
    return {**over, "seed": chosen}


def searches_of(study: Study, told: Mapping[str, Any], trials: int | None) -> dict[str, Search]:
    """How each method is searched, all with as many points."""
    if ("grid" in told) == ("range" in told):
        raise ConfigError("tune: give a grid of values, or a range that Optuna proposes from: one of them")
    own = told.get("own", {})
    if not isinstance(own, Mapping):
        raise ConfigError("tune.own must be a table of methods")
    for method in own:
        if method not in study.methods:
            raise ConfigError(f"tune.own: the study has no method {method!r}{nearest(method, study.methods)}")
    if "grid" in told:
        if trials is not None or "trials" in told:
            raise ConfigError("tune.trials: a grid is tried whole; trials are for a range")
        common = read_grid("tune.grid", told["grid"])
        grids = {m: Grid(read_grid(f"tune.own.{m}", own[m]) if m in own else common) for m in study.methods}
        first = grids[study.methods[0]]
        for method, grid in grids.items():
            if grid.size != first.size:
                raise ConfigError(
                    f"tune: {method} would have {grid.size} points to try and {study.methods[0]} {first.size}; "
                    "all methods get the same effort"
                )
        return dict(grids)
    count = trials if trials is not None else told.get("trials", TRIALS)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"tune.trials: {count!r} is not a whole number from 1 on")
    check_optuna()
    ranges = read_ranges("tune.range", told["range"])
    return {m: Proposed(read_ranges(f"tune.own.{m}", own[m]) if m in own else ranges, count) for m in study.methods}


def check_points(tuning: Tuning) -> None:
    """Resolve every point that may be tried, or the ends of its ranges, in every place."""
    for method, search in tuning.searches.items():
        if isinstance(search, Grid):
            points = Grid(search.axes).ask()
        else:
            assert isinstance(search, Proposed)
            ends = [(k, (r.low, r.high) if isinstance(r, SearchRange) else tuple(r)) for k, r in search.ranges.items()]
            points = [((key, value),) for key, values in ends for value in values]
        tried = {key for point in points for key, _ in point}
        for key, _ in tuning.fixed:
            if key in tried:
                raise ConfigError(f"tune: {key} is tuned for {method}; it cannot be set, too")
        for number, point in enumerate(points, 1):
            trial_cells(tuning, Trial(method, number, point))


def trial_cells(tuning: Tuning, trial: Trial) -> tuple[Cell, ...]:
    """The runs of a trial: the method with the point's settings, judged by validation data, in all places."""
    common, own = flatten(tuning.table.get("settings", {})), flatten(tuning.table["methods"][trial.method])

    def settle(_: Any, place: Pairs) -> Pairs:
        return (*common, *own, *tuning.fixed, *trial.point, JUDGE, *place)

    config = find(str(tuning.study.recipe)).config
    return lay_out(config, {trial.name: {}}, tuning.axes, trial.name, settle)


def tune(
    tuning: Tuning,
    out: Path,
    workers: int = 0,
    watch: Callable[[int, str], None] | None = None,
    start: Start = "warm",
) -> list[Trial]:
    """Try all points, one core a run; what is finished already is not run again."""
    done: list[Trial] = []
    ended = 0
    with locked_folder(out), open_pool(min(workers or tuning.runs, tuning.runs), start, tuning.study.recipe) as crew:
        for asked in trial_batches(tuning):
            cells = {trial.name: trial_cells(tuning, trial) for trial in asked}
            part = trial_study(tuning, asked, cells)
            if not done:
                for _, known, _ in crew.each(declared_metrics, part.cells[:1]):
                    check_declared(part.metrics, known or ())
            everything = trial_study(tuning, [*done, *asked], {t.name: trial_cells(tuning, t) for t in done} | cells)
            plan = plan_of(everything) | mark(part.names, out, part.text, *part.sets)
            write_whole(out / "study.json", json.dumps(plan, indent=2) + "\n")

            def follow(count: int, name: str, before: int = ended) -> None:
                if watch is not None:
                    watch(before + count, name)

            problems = run_cells(part, out, crew, follow)
            if other := [problem for problem in problems if OTHERWISE in problem]:  # nobody lost: it was not tried
                raise ConfigError(f"{other[0]}; to widen a search, add values at the end of its last list")
            ended += len(part.cells)
            faults = dict(reversed([problem.split("/", 1) for problem in problems]))
            for trial in asked:
                made = evaluate_trial(trial, tuning.metric, cells[trial.name], out, faults.get(trial.name, ""))
                better = None if made.fault else made.sign * made.result.mean
                tuning.searches[trial.method].tell(trial.point, better)
                done.append(made)
    return sorted(done, key=lambda trial: (tuning.study.methods.index(trial.method), trial.number))


def trial_batches(tuning: Tuning) -> Iterator[list[Trial]]:
    """What is tried at once: all points of grids, or one of each method that is proposed."""
    counts = dict.fromkeys(tuning.searches, 0)
    while True:
        asked = []
        for method, search in tuning.searches.items():
            for point in search.ask():
                counts[method] += 1
                asked.append(Trial(method, counts[method], point))
        if not asked:
            return
        yield asked


def trial_study(tuning: Tuning, trials: Sequence[Trial], cells: Mapping[str, tuple[Cell, ...]]) -> Study:
    """The trials as the methods of a study, which its folder says it is."""
    names = tuple(trial.name for trial in trials)
    runs = tuple(cell for name in names for cell in cells[name])
    plain = replace(tuning.study, cells=runs, methods=names, baseline=names[0], metrics=(tuning.metric,))
    return replace(plain, threshold={})


def evaluate_trial(trial: Trial, metric: str, cells: Sequence[Cell], out: Path, fault: str) -> Trial:
    """What the runs of a trial came to."""
    values, sign = [], 1.0
    for cell in cells:
        if fault or not (out / "cells" / cell.name / "summary.json").exists():
            return replace(trial, fault=fault or f"{cell.name} did not end")
        record = Record.of(out / "cells" / cell.name)
        value = record.summary["final"].get(metric, math.nan)
        if not isinstance(value, int | float) or not np.isfinite(value):
            return replace(trial, fault=f"{cell.name} has no {metric}")
        if (way := record.direction(metric)) is None:
            raise ConfigError(f"tune.metric: which way {metric!r} is better is not declared")
        sign = -1.0 if way == "lower" else 1.0
        values.append(float(value))
    return replace(trial, values=tuple(values), sign=sign)


def winners(tuning: Tuning, trials: Sequence[Trial]) -> dict[str, Trial]:
    """The best trial of each method, the first of equals; methods without any that ended are left out."""
    best: dict[str, Trial] = {}
    for trial in trials:
        if trial.fault:
            continue
        held = best.get(trial.method)
        if held is None or trial.sign * trial.result.mean > held.sign * held.result.mean:
            best[trial.method] = trial
    return best


def warnings(tuning: Tuning, trials: Sequence[Trial]) -> list[str]:
    """What must be said loudly: winners at an edge, and methods that have none."""
    best = winners(tuning, trials)
    out = [f"{m}: no setting was tried to the end" for m in tuning.study.methods if m not in best]
    for method, trial in best.items():
        for edge in tuning.searches[method].edges(trial.point):
            out.append(f"{method}: {edge}; the best may lie beyond, so widen the search")
    return out
