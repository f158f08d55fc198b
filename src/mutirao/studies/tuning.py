"""Hyperparameter tuning: every method gets equally many trials, compared on validation data."""

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
from mutirao.studies.study import (
    OTHER_SETTINGS,
    Cell,
    Pairs,
    Study,
    check_declared,
    declared_metrics,
    has_validation,
    lay_out,
    plan_of,
    read_study,
    run_cells,
)
from mutirao.studies.study_workers import Start, open_pool

KEYS = {"metric", "seeds", "over", "grid", "range", "trials", "own"}
BY_VALIDATION = ("judge_by", "vali")
# Used if only a number of seeds is given. Far from the usual seeds of studies, which must confirm with fresh ones.
FIRST_SEED = 1000
TRIALS = 20


@dataclass(frozen=True)
class Tuning:
    """The `[tune]` table of a study file, checked."""

    study: Study  # the study to confirm
    table: Mapping[str, Any]  # the study file
    metric: str
    axes: Mapping[str, Sequence[Any]]  # the folds and seeds in which each point is tried
    searches: Mapping[str, Search]  # by method
    fixed: Pairs  # settings for all methods, from --set

    @property
    def places(self) -> int:
        """Number of runs of a trial."""
        return math.prod(len(values) for values in self.axes.values())

    @property
    def effort(self) -> int:
        """Number of trials of each method."""
        return next(iter(self.searches.values())).size

    @property
    def runs(self) -> int:
        """Number of all runs."""
        return self.effort * self.places * len(self.searches)


@dataclass(frozen=True)
class Trial:
    """One setting of a method and its metric on validation data; `fault` is the reason if a run did not finish."""

    method: str
    number: int
    point: Point
    values: tuple[float, ...] = ()
    fault: str = ""
    sign: float = 1.0  # -1 if lower values are better

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.method}-{self.number}"

    @property
    def result(self) -> Interval:
        """The mean over its runs with a confidence interval; NaN if a run did not finish."""
        if self.fault:
            return Interval(math.nan, math.nan)
        return interval(self.values)

    @property
    def settings(self) -> str:
        """The point as text."""
        return ", ".join(f"{key} = {write_value(value)}" for key, value in self.point)


def read_tuning(
    path: Path,
    sets: Sequence[tuple[str, Any]] = (),
    trust: Trust = distrust,
    out: Path | None = None,
    trials: int | None = None,
) -> Tuning:
    """Read a study file with a `[tune]` table; errors are reported before anything runs."""
    study = read_study(path, sets, trust, out)
    table = read_toml(path)
    try:
        return parse_tuning(study, table, sets, trials)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_tuning(study: Study, table: dict[str, Any], sets: Sequence[tuple[str, Any]], trials: int | None) -> Tuning:
    """Check the `[tune]` table of a study file."""
    tune_table = table.get("tune")
    if not isinstance(tune_table, Mapping):
        raise ConfigError(
            "there is no [tune] table; add one with the settings to try, such as grid = { lr = [0.1, 0.3] }"
        )
    for key in tune_table:
        if key not in KEYS:
            raise ConfigError(f"tune: unknown key {key!r}{nearest(key, KEYS)}")
    metric = tune_table.get("metric", study.metrics[0] if study.metrics else None)
    if not isinstance(metric, str):
        raise ConfigError('tune: name the metric to compare trials by: metric = "accuracy"')
    check_validation(study)
    axes = axes_of(study, table, tune_table)
    searches = searches_of(study, tune_table, trials)
    fixed = tuple(pair for pair in sets if pair[0] != "seeds")
    found = Tuning(study, table, metric, axes, searches, fixed)
    check_points(found)
    return found


def check_validation(study: Study) -> None:
    """Refuse recipes without validation data, and studies that set `judge_by` themselves."""
    key, value = BY_VALIDATION
    if not has_validation(find(str(study.recipe)).config):
        raise ConfigError(
            f"tune: {study.called} has no validation data, and its test data must not choose settings; "
            f"use a recipe that accepts {key}={value}"
        )
    if any(key in dict(cell.settings) for cell in study.cells):
        raise ConfigError(f"tune: the study sets {key}; remove it: tuning uses {value}, the study the test data")


def axes_of(study: Study, table: Mapping[str, Any], tune_table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The folds and seeds of a trial: the study's own axes, but other seeds."""
    over = dict(tune_table.get("over", table.get("over", {})))
    seeds = tune_table.get("seeds", 2)
    chosen = [FIRST_SEED + i for i in range(seeds)] if isinstance(seeds, int) else seeds
    if not isinstance(chosen, list) or not chosen:
        raise ConfigError("tune.seeds must be a list of seeds, or how many")
    study_seeds = [dict(cell.place).get("seed") for cell in study.cells]
    repeated = [seed for seed in chosen if seed in study_seeds]
    if repeated:
        raise ConfigError(f"tune.seeds: {repeated[0]} is a seed of the study, which must be confirmed with fresh ones")
    return {**over, "seed": chosen}


def searches_of(study: Study, tune_table: Mapping[str, Any], trials: int | None) -> dict[str, Search]:
    """The search of each method, all with equally many points."""
    if ("grid" in tune_table) == ("range" in tune_table):
        raise ConfigError("tune: give a grid of values, or a range that Optuna proposes from: one of them")
    own = tune_table.get("own", {})
    if not isinstance(own, Mapping):
        raise ConfigError("tune.own must be a table of methods")
    for method in own:
        if method not in study.methods:
            raise ConfigError(f"tune.own: the study has no method {method!r}{nearest(method, study.methods)}")
    if "grid" in tune_table:
        if trials is not None or "trials" in tune_table:
            raise ConfigError("tune.trials: a grid is tried completely; trials are for a range")
        common = read_grid("tune.grid", tune_table["grid"])
        grids = {m: Grid(read_grid(f"tune.own.{m}", own[m]) if m in own else common) for m in study.methods}
        first = grids[study.methods[0]]
        for method, grid in grids.items():
            if grid.size != first.size:
                raise ConfigError(
                    f"tune: {method} would have {grid.size} points to try and {study.methods[0]} {first.size}; "
                    "all methods get the same effort"
                )
        return dict(grids)
    count = trials if trials is not None else tune_table.get("trials", TRIALS)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"tune.trials: {count!r} is not a whole number from 1 on")
    check_optuna()
    ranges = read_ranges("tune.range", tune_table["range"])
    return {m: Proposed(read_ranges(f"tune.own.{m}", own[m]) if m in own else ranges, count) for m in study.methods}


def check_points(tuning: Tuning) -> None:
    """Resolve every possible point, or the ends of its ranges, in every fold and seed."""
    for method, search in tuning.searches.items():
        if isinstance(search, Grid):
            points = Grid(search.axes).ask()
        else:
            assert isinstance(search, Proposed)
            points = []
            for key, values in search.ranges.items():
                ends = (values.low, values.high) if isinstance(values, SearchRange) else values
                points += [((key, value),) for value in ends]
        tried = {key for point in points for key, _ in point}
        for key, _ in tuning.fixed:
            if key in tried:
                raise ConfigError(f"tune: {key} is tuned for {method}, so it cannot be set too")
        for number, point in enumerate(points, 1):
            trial_cells(tuning, Trial(method, number, point))


def trial_cells(tuning: Tuning, trial: Trial) -> tuple[Cell, ...]:
    """The runs of a trial: the method with the point's settings, on validation data, in all folds and seeds."""
    common = flatten(tuning.table.get("settings", {}))
    own = flatten(tuning.table["methods"][trial.method])

    def settle(_: Any, place: Pairs) -> Pairs:
        return (*common, *own, *tuning.fixed, *trial.point, BY_VALIDATION, *place)

    config = find(str(tuning.study.recipe)).config
    return lay_out(config, {trial.name: {}}, tuning.axes, trial.name, settle)


def tune(
    tuning: Tuning,
    out: Path,
    workers: int = 0,
    watch: Callable[[int, str], None] | None = None,
    start: Start = "warm",
) -> list[Trial]:
    """Try all points, one core for each run; finished runs are not repeated."""
    done: list[Trial] = []
    ended = 0
    with locked_folder(out), open_pool(min(workers or tuning.runs, tuning.runs), start, tuning.study.recipe) as pool:
        for batch in trial_batches(tuning):
            cells = {trial.name: trial_cells(tuning, trial) for trial in batch}
            part = trial_study(tuning, batch, cells)
            if not done:
                for _, known, _ in pool.each(declared_metrics, part.cells[:1]):
                    check_declared(part.metrics, known or ())
            all_cells = {trial.name: trial_cells(tuning, trial) for trial in done} | cells
            everything = trial_study(tuning, [*done, *batch], all_cells)
            plan = plan_of(everything) | mark(part.names, out, part.text, *part.sets)
            write_whole(out / "study.json", json.dumps(plan, indent=2) + "\n")

            def follow(count: int, name: str, before: int = ended) -> None:
                if watch is not None:
                    watch(before + count, name)

            problems = run_cells(part, out, pool, follow)
            other = [problem for problem in problems if OTHER_SETTINGS in problem]
            # This is not a failed trial, because it was never tried.
            if other:
                raise ConfigError(f"{other[0]}; to widen a search, add values at the end of its last list")
            ended += len(part.cells)
            # Reversed, as a dict keeps the last value of a key, and the first fault of each trial is wanted.
            faults = dict(reversed([problem.split("/", 1) for problem in problems]))
            for trial in batch:
                made = evaluate_trial(trial, tuning.metric, cells[trial.name], out, faults.get(trial.name, ""))
                better = None if made.fault else made.sign * made.result.mean
                tuning.searches[trial.method].tell(trial.point, better)
                done.append(made)
    return sorted(done, key=lambda trial: (tuning.study.methods.index(trial.method), trial.number))


def trial_batches(tuning: Tuning) -> Iterator[list[Trial]]:
    """The trials to run at once: all points of grids, or one proposed point of each method."""
    counts = dict.fromkeys(tuning.searches, 0)
    while True:
        batch = []
        for method, search in tuning.searches.items():
            for point in search.ask():
                counts[method] += 1
                batch.append(Trial(method, counts[method], point))
        if not batch:
            return
        yield batch


def trial_study(tuning: Tuning, trials: Sequence[Trial], cells: Mapping[str, tuple[Cell, ...]]) -> Study:
    """The trials as methods of a study, so that their folder is that of a study."""
    names = tuple(trial.name for trial in trials)
    runs = tuple(cell for name in names for cell in cells[name])
    plain = replace(tuning.study, cells=runs, methods=names, baseline=names[0], metrics=(tuning.metric,))
    return replace(plain, threshold={})


def evaluate_trial(trial: Trial, metric: str, cells: Sequence[Cell], out: Path, fault: str) -> Trial:
    """The trial with the metric of its runs."""
    values: list[float] = []
    sign = 1.0
    for cell in cells:
        if fault or not (out / "cells" / cell.name / "summary.json").exists():
            return replace(trial, fault=fault or f"{cell.name} did not finish")
        record = Record.of(out / "cells" / cell.name)
        value = record.summary["final"].get(metric, math.nan)
        if not isinstance(value, int | float) or not np.isfinite(value):
            return replace(trial, fault=f"{cell.name} has no {metric}")
        direction = record.direction(metric)
        if direction is None:
            raise ConfigError(f"tune.metric: which way {metric!r} is better is not declared")
        sign = -1.0 if direction == "lower" else 1.0
        values.append(float(value))
    return replace(trial, values=tuple(values), sign=sign)


def winners(tuning: Tuning, trials: Sequence[Trial]) -> dict[str, Trial]:
    """The best trial of each method, the first of equals; methods without a finished trial are left out."""
    best: dict[str, Trial] = {}
    for trial in trials:
        if trial.fault:
            continue
        previous = best.get(trial.method)
        if previous is None or trial.sign * trial.result.mean > previous.sign * previous.result.mean:
            best[trial.method] = trial
    return best


def warnings(tuning: Tuning, trials: Sequence[Trial]) -> list[str]:
    """Warnings: best settings at the edge of the search, and methods without a finished trial."""
    best = winners(tuning, trials)
    out = [f"{m}: no trial finished" for m in tuning.study.methods if m not in best]
    for method, trial in best.items():
        for edge in tuning.searches[method].edges(trial.point):
            out.append(f"{method}: {edge}; the best may lie beyond, so widen the search")
    return out
