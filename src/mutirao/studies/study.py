"""Studies: a grid of runs (methods x folds x seeds) that can be resumed, and its results compared.

Runs over folds or splits of one set are not independent: any two were trained on mostly the same samples. Nadeau and
Bengio (Machine Learning 52, 2003) add n_test/n_train to 1/J in the variance of a mean over J splits; Bouckaert and
Frank (PAKDD 2004) do the same for folds repeated over seeds.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mutirao.config import Common, flatten, nearest, one_line, read_toml, resolve, write_value
from mutirao.errors import BudgetSpent, ConfigError, MutiraoError
from mutirao.experiments.task import Recipe, find
from mutirao.io import write_whole
from mutirao.metrics import stem
from mutirao.registry import dotted_in
from mutirao.runs.csv_tables import metrics_among
from mutirao.runs.execute import different_settings, execute, name_recipe
from mutirao.runs.reader import Record, text_in
from mutirao.runs.run_folder import is_plain, locked_folder
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_study, mark
from mutirao.studies.published import PublishedValues, read_published_values
from mutirao.studies.study_workers import SequentialPool, Start, WorkerPool, open_pool

FOLD = "fold"  # the axis of splits of one set


def shared_of(given: Any, axes: Mapping[str, Sequence[Any]], config: type[Common]) -> float:
    """n_test/n_train as given in the study file, a number or "1/4"; else that of its folds, or 0 without folds.

    Of k folds one tests and the others train, except another one for validation, if any: 1/(k-1) or 1/(k-2).
    """
    if given is not None:
        return ratio_of(given)
    if FOLD not in axes:
        return 0.0
    fold = {f.name: f for f in dataclasses.fields(config)}.get(FOLD)
    folds = len(axes[FOLD])
    if fold is not None and fold.metadata.get("high"):
        folds = fold.metadata["high"]
    held_out = 2 if has_validation(config) else 1
    return 1.0 / max(1, folds - held_out)


def ratio_of(given: Any) -> float:
    """A non-negative number, or a fraction as text."""
    ratio = math.nan
    if isinstance(given, str) and "/" in given:
        numerator, _, denominator = given.partition("/")
        with contextlib.suppress(ValueError, ZeroDivisionError):
            ratio = float(numerator) / float(denominator)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        ratio = float(given)
    if not 0 <= ratio < math.inf:
        raise ConfigError(f'shared: {given!r} is not test samples for each training sample, such as 0.25 or "1/4"')
    return ratio


def has_validation(config: type[Common]) -> bool:
    """Whether a recipe can be evaluated on validation data: its setting `judge_by` accepts "vali"."""
    setting = {f.name: f for f in dataclasses.fields(config)}.get("judge_by")
    return setting is not None and "vali" in (setting.metadata.get("choices") or ())


log = logging.getLogger("mutirao")

KEYS = {"recipe", "baseline", "metrics", "seeds", "settings", "over", "methods", "threshold", "last"}
OTHER_SETTINGS = "was made with other settings"  # the problem if a cell's folder contains another run
KEYS |= {"shared", "published", "tune"}

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """One run of a study: a method with one fold and seed."""

    method: str
    place: tuple[tuple[str, Any], ...]  # such as (("fold", 1), ("seed", 0)): runs are paired by it
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The folder of the cell."""
        place = "-".join(f"{k}{v}" for k, v in self.place)
        if not is_plain(place) or "%" in place:
            place = quote(place, safe="")
        return f"{self.method}/{place}"


@dataclass(frozen=True)
class Study:
    r"""A study, from a file or from the arguments of `mutirao.compare`.

    >>> text = 'recipe = "quickstart"\n[methods.FedAvg]\n[methods.FedYogi]\naggregate = "fedyogi"\n'
    >>> _ = Path("two.toml").write_text(text)
    >>> study = read_study(Path("two.toml"))
    >>> study.methods, study.baseline, len(study.cells)
    (('FedAvg', 'FedYogi'), 'FedAvg', 2)
    """

    recipe: str | Recipe  # a name, or an object without a name
    cells: tuple[Cell, ...]
    methods: tuple[str, ...]
    baseline: str
    metrics: tuple[str, ...] = ()
    threshold: Mapping[str, float] = field(default_factory=dict)
    last: int = 20  # number of last rounds for the standard deviation
    file: str = ""  # the study file and the settings of --set, so that the study can be resumed
    sets: tuple[str, ...] = ()
    text: str = ""  # the text of the file, and the code that it names
    names: tuple[str, ...] = ()
    shared: float = 0.0  # n_test/n_train, if the cells' data are splits of one set
    published: PublishedValues = PublishedValues()

    @property
    def called(self) -> str:
        """The recipe's name."""
        return name_recipe(self.recipe)[0]


def read_study(
    path: Path, sets: Sequence[tuple[str, Any]] = (), trust: Trust = distrust, out: Path | None = None
) -> Study:
    r"""Read a study file and check every cell's settings before anything runs; `sets` are for all cells.

    They may contain `seeds`, a number or a list. Code that the file names is loaded if `trust` allows it, or if the
    user ran the same file with the folder `out` before.

    >>> _ = Path("wrong.toml").write_text('recipe = "quickstart"\n[methods.m]\naggregate = "fedavgg"\n')
    >>> read_study(Path("wrong.toml"))
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: wrong.toml: method 'm': aggregate: no part is called 'fedavgg'; did you mean 'fedavg'?
    """
    table = read_toml(path)
    text = text_in(path)
    typed = [value for _, value in sets]
    check_trust(path, table, trust, typed, lambda: out is not None and is_own_study(out, text))
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, KEYS)}")
    methods = table.get("methods")
    if not isinstance(methods, dict) or not methods:
        raise ConfigError(f"{path}: name at least one method, such as [methods.fedavg]")
    recipe = str(table.get("recipe", ""))
    over = dict(table.get("over", {}))
    seeds = dict(sets).get("seeds", table.get("seeds", [0]))
    over["seed"] = list(range(seeds)) if isinstance(seeds, int) else seeds
    baseline = str(table.get("baseline", next(iter(methods))))
    common = flatten(table.get("settings", {}))

    def settle(own: Any, place: Pairs) -> Pairs:
        return (*common, *flatten(own), *(s for s in sets if s[0] != "seeds"), *place)

    metrics = tuple(table.get("metrics", ()))
    threshold = table.get("threshold", {})
    try:
        config = find(recipe).config
        cells = lay_out(config, methods, over, baseline, settle)
        shared = shared_of(table.get("shared"), over, config)
        published = read_published_values(table.get("published"), methods, metrics, threshold)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return Study(
        recipe=recipe,
        cells=cells,
        methods=tuple(methods),
        baseline=baseline,
        metrics=metrics,
        threshold=threshold,
        last=int(table.get("last", 20)),
        file=str(path.resolve()),
        sets=tuple(f"{key}={write_value(value)}" for key, value in sets),
        text=text,
        names=tuple(dotted_in([table, typed])),
        shared=shared,
        published=published,
    )


def lay_out(
    config: type[Common],
    methods: Mapping[str, Any],
    over: Mapping[str, Any],
    baseline: str,
    settle: Callable[[Any, Pairs], Pairs],
) -> tuple[Cell, ...]:
    """The cells of the grid, checked before anything runs; `settle` gives the settings of a method in a place."""
    for axis, values in over.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{axis} must be a list of values")
    if baseline not in methods:
        raise ConfigError(f"the baseline {baseline!r} is not one of the methods{nearest(baseline, methods)}")
    cells = []
    for method, own in methods.items():
        if not is_plain(method):
            raise ConfigError(f"method {method!r}: expected a plain name, as its folder is called so")
        for values in itertools.product(*over.values()):
            place = tuple(zip(over, values, strict=True))
            try:
                settings = settle(own, place)
                resolve(config, {}, settings)
            except ConfigError as error:
                raise ConfigError(f"method {method!r}: {error}") from error
            cells.append(Cell(method, place, settings))
    return tuple(cells)


def run_study(
    study: Study,
    out: Path,
    workers: int = 0,
    watch: Callable[[int, str], None] | None = None,
    start: Start = "warm",
) -> list[str]:
    r"""Run the unfinished cells, one core each; return the problems, one line for each failed cell.

    If it is interrupted, as by Ctrl-C, its workers end at once; called again, it continues. `start` is how workers
    start: `fork` is for recipes that are objects, and `here` runs the cells in this process, one after the other.

    >>> text = 'recipe = "quickstart"\nseeds = 1\n[methods.fedavg]\nrounds = 1\nper_round = 2\n'
    >>> _ = Path("one.toml").write_text(text)
    >>> study, out = read_study(Path("one.toml")), Path("runs/one")
    >>> run_study(study, out, start="here"), [cell.method for cell, _ in results(study, out)]  # nothing went wrong
    ([], ['fedavg'])
    """
    count = min(workers or len(study.cells), len(study.cells))
    with locked_folder(out), open_pool(count, start, study.recipe) as pool:
        named = study.metrics or tuple(metric for _, metric in study.published.claims)
        # A metric that the task does not have is found before any cell is run.
        if named:
            for _, known, _ in pool.each(declared_metrics, study.cells[:1]):
                check_declared(named, known or ())
        plan = plan_of(study) | mark(study.names, out, study.text, *study.sets)
        write_whole(out / "study.json", json.dumps(plan, indent=2) + "\n")
        return run_cells(study, out, pool, watch)


def run_cells(
    study: Study, out: Path, pool: SequentialPool | WorkerPool, watch: Callable[[int, str], None] | None
) -> list[str]:
    """Run the cells, the first of each method before the second of any; return the problems."""
    # One cell of each method comes first: after those it is clear whether any method has the metrics.
    places = list(dict.fromkeys(cell.place for cell in study.cells))
    cells = sorted(study.cells, key=lambda cell: places.index(cell.place))
    for method in study.methods:
        (out / "cells" / method).mkdir(parents=True, exist_ok=True)
    items = [(cell, out / "cells" / cell.name) for cell in cells]
    problems = []
    # Metrics of the first finished cell of each method: a metric is unknown only if none of them has it.
    found: set[str] = set()
    unknown = set(study.methods)
    for done, ((cell, _), problem, fault) in enumerate(pool.each(run_cell, items), 1):
        if problem or fault:
            problems.append(f"{cell.name}: {problem or fault}")
        elif cell.method in unknown:
            unknown.remove(cell.method)
            found.update(metrics_among(Record(out / "cells" / cell.name).history.names))
            refuse_unknown([metric for metric in study.metrics if not unknown and metric not in found], found)
        if watch is not None:
            watch(done, cell.name)
    return problems


def declared_metrics(recipe: str | Recipe, cell: Cell) -> tuple[str, ...]:
    """The metrics that a cell's task declares; empty if it declares none or cannot be prepared."""
    try:
        _, found = name_recipe(recipe)
        return found.prepare(resolve(found.config, {}, cell.settings)).metrics
    except Exception:
        # The cell itself will report the error.
        return ()


def check_declared(metrics: Sequence[str], declared: Sequence[str]) -> None:
    """Refuse metrics that no cell can have; privacy adds epsilon, and metrics may have suffixes such as `_worst`."""
    stems = {stem(metric) for metric in declared} | {"epsilon"}
    refuse_unknown([metric for metric in metrics if declared and stem(metric) not in stems], declared)


def refuse_unknown(metrics: Sequence[str], valid: Iterable[str]) -> None:
    """Refuse metrics that no cell has."""
    if metrics:
        raise ConfigError(f"metrics: no cell has a metric {metrics[0]!r}{nearest(metrics[0], valid)}")


def plan_of(study: Study) -> dict[str, Any]:
    """The content of `study.json`, for readers of the folder."""
    names = {"cells": [cell.name for cell in study.cells], "methods": list(study.methods)}
    facts = {"recipe": study.called, "baseline": study.baseline, "metrics": list(study.metrics)}
    return {"schema": 1, **facts, **names, "threshold": dict(study.threshold), "file": study.file, "sets": study.sets}


def run_cell(recipe: str | Recipe, place: tuple[Cell, Path]) -> str:
    """Run or resume one cell in its folder; an error is returned, so that the study continues."""
    from mutirao.training.optimizers import one_thread  # late: it imports torch

    cell, out = place
    name, found = name_recipe(recipe)
    config = resolve(found.config, {}, cell.settings)
    if (out / "config.toml").exists() and not is_run_of(out, name, config):
        return f"{out} {OTHER_SETTINGS}; choose another --out, or remove it"
    try:
        with one_thread():
            execute(recipe, config, out, resume=True)
    except BudgetSpent:
        # A run that its privacy budget stopped is finished.
        return ""
    except (MutiraoError, OSError) as error:
        return one_line(error)
    except Exception as error:  # a user's own part may raise anything
        log.exception("%s", cell.name)
        return f"{type(error).__name__}: {one_line(error)}"
    return ""


def is_run_of(out: Path, recipe: str, config: Any) -> bool:
    """Whether the run in a folder has these settings."""
    try:
        return not different_settings(out, recipe, config)
    except ConfigError:
        return False


def results(study: Study, out: Path) -> Iterator[tuple[Cell, Record]]:
    r"""Each finished cell with its run folder.

    >>> _ = Path("first.toml").write_text('recipe = "quickstart"\nseeds = 1\n[methods.fedavg]\n')
    >>> list(results(read_study(Path("first.toml")), Path("runs/first")))  # no cell is finished yet
    []
    """
    for cell in study.cells:
        folder = out / "cells" / cell.name
        if (folder / "summary.json").exists():
            yield cell, Record.of(folder)
