"""A study is a grid of runs, methods x folds x seeds, whose finished cells are kept and whose ends are compared."""

import itertools
import json
import logging
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
from mutirao.runs.column_names import metrics_among
from mutirao.runs.execute import different_settings, execute, name_recipe
from mutirao.runs.reader import Record, text_in
from mutirao.runs.run_folder import is_plain, locked_folder
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_study, mark
from mutirao.studies.published import PublishedValues, read_published_values
from mutirao.studies.shared_data import shared_of
from mutirao.studies.study_workers import SequentialPool, Start, WorkerPool, open_pool

log = logging.getLogger("mutirao")

KEYS = {"recipe", "baseline", "metrics", "seeds", "settings", "over", "methods", "threshold", "last"}
OTHERWISE = "was made with other settings"  # a cell in whose folder another run is
KEYS |= {"shared", "published", "tune"}

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """One run of a study: a method in one place of the grid."""

    method: str
    place: tuple[tuple[str, Any], ...]  # such as (("fold", 1), ("seed", 0)): what is paired over
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The folder of the cell."""
        place = "-".join(f"{k}{v}" for k, v in self.place)
        return f"{self.method}/{place if is_plain(place) and '%' not in place else quote(place, safe='')}"


@dataclass(frozen=True)
class Study:
    r"""What a study file says, or `mutirao.compare` is told.

    >>> text = 'recipe = "quickstart"\n[methods.FedAvg]\n[methods.FedYogi]\naggregate = "fedyogi"\n'
    >>> _ = Path("two.toml").write_text(text)
    >>> study = read_study(Path("two.toml"))
    >>> study.methods, study.baseline, len(study.cells)
    (('FedAvg', 'FedYogi'), 'FedAvg', 2)
    """

    recipe: str | Recipe  # by name, or the object where it has none
    cells: tuple[Cell, ...]
    methods: tuple[str, ...]
    baseline: str
    metrics: tuple[str, ...] = ()
    threshold: Mapping[str, float] = field(default_factory=dict)
    last: int = 20  # rounds over which variability is measured
    file: str = ""  # where it was read from, and what was set besides: so that it can go on
    sets: tuple[str, ...] = ()
    text: str = ""  # of the file, and the code it names
    names: tuple[str, ...] = ()
    shared: float = 0.0  # n_test/n_train, where the cells' data are splits of one set
    published: PublishedValues = PublishedValues()  # what papers say of the methods

    @property
    def called(self) -> str:
        """The recipe's name."""
        return name_recipe(self.recipe)[0]


def read_study(
    path: Path, sets: Sequence[tuple[str, Any]] = (), trust: Trust = distrust, out: Path | None = None
) -> Study:
    r"""Read a study file and check every cell's settings before anything runs; `sets` holds for all cells.

    `seeds`, which counts the seeds or lists them, may be set too. Code that the file names is loaded if `trust` says
    so, or if the user ran the same file into the folder `out` before.

    >>> _ = Path("wrong.toml").write_text('recipe = "quickstart"\n[methods.m]\naggregate = "fedavgg"\n')
    >>> read_study(Path("wrong.toml"))
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: wrong.toml: method 'm': aggregate: no part is called 'fedavgg'; did you mean 'fedavg'?
    """
    table, text = read_toml(path), text_in(path)
    typed = [value for _, value in sets]
    check_trust(path, table, trust, typed, lambda: out is not None and is_own_study(out, text))
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, KEYS)}")
    methods = table.get("methods")
    if not isinstance(methods, dict) or not methods:
        raise ConfigError(f"{path}: name at least one method, such as [methods.fedavg]")
    recipe, over = str(table.get("recipe", "")), dict(table.get("over", {}))
    seeds = dict(sets).get("seeds", table.get("seeds", [0]))
    over["seed"] = list(range(seeds)) if isinstance(seeds, int) else seeds
    baseline = str(table.get("baseline", next(iter(methods))))
    common = flatten(table.get("settings", {}))

    def settle(own: Any, place: Pairs) -> Pairs:
        return (*common, *flatten(own), *(s for s in sets if s[0] != "seeds"), *place)

    metrics, threshold = tuple(table.get("metrics", ())), table.get("threshold", {})
    try:
        config = find(recipe).config
        cells = lay_out(config, methods, over, baseline, settle)
        shared = shared_of(table.get("shared"), over, config)
        published = read_published_values(table.get("published"), methods, metrics, threshold)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    told = tuple(f"{k}={write_value(v)}" for k, v in sets)
    return Study(
        recipe=recipe,
        cells=cells,
        methods=tuple(methods),
        baseline=baseline,
        metrics=metrics,
        threshold=threshold,
        last=int(table.get("last", 20)),
        file=str(path.resolve()),
        sets=told,
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
    """The cells of the grid, each checked before anything runs; `settle` gives the settings of a method in a place."""
    for axis, values in over.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{axis} must be a list of values")
    if baseline not in methods:
        raise ConfigError(f"the baseline {baseline!r} is not one of the methods{nearest(baseline, methods)}")
    cells = []
    for method, own in methods.items():
        if not is_plain(method):
            raise ConfigError(f"method {method!r}: a folder is called so, which must be a plain name")
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
    r"""Run the cells that are not finished yet, one core each; return what went wrong, a line a cell.

    Whatever ends it, such as Ctrl-C, ends its workers at once; called again it goes on with what they left. `start` is
    how they begin: `fork` hands them a recipe that is an object, and `here` there are none, but one cell after another.

    >>> text = 'recipe = "quickstart"\nseeds = 1\n[methods.fedavg]\nrounds = 1\nper_round = 2\n'
    >>> _ = Path("one.toml").write_text(text)
    >>> study, out = read_study(Path("one.toml")), Path("runs/one")
    >>> run_study(study, out, start="here"), [cell.method for cell, _ in results(study, out)]  # nothing went wrong
    ([], ['fedavg'])
    """
    most = min(workers or len(study.cells), len(study.cells))
    with locked_folder(out), open_pool(most, start, study.recipe) as crew:
        named = study.metrics or tuple(metric for _, metric in study.published.claims)
        for _, known, _ in crew.each(declared_metrics, study.cells[:1] if named else ()):
            check_declared(named, known or ())
        plan = plan_of(study) | mark(study.names, out, study.text, *study.sets)
        write_whole(out / "study.json", json.dumps(plan, indent=2) + "\n")
        return run_cells(study, out, crew, watch)


def run_cells(
    study: Study, out: Path, crew: SequentialPool | WorkerPool, watch: Callable[[int, str], None] | None
) -> list[str]:
    """Make the cells, the first of each method before the second of any; return what went wrong."""
    places = list(dict.fromkeys(cell.place for cell in study.cells))
    cells = sorted(study.cells, key=lambda cell: places.index(cell.place))
    for method in study.methods:
        (out / "cells" / method).mkdir(parents=True, exist_ok=True)
    items = [(cell, out / "cells" / cell.name) for cell in cells]
    problems = []
    found: set[str] = set()  # metrics of the first finished cell of each method: not all methods have all
    unknown = set(study.methods)
    for done, ((cell, _), said, fault) in enumerate(crew.each(run_cell, items), 1):
        if problem := said or fault:
            problems.append(f"{cell.name}: {problem}")
        elif cell.method in unknown:
            unknown.remove(cell.method)
            found.update(metrics_among(Record(out / "cells" / cell.name).history.names))
            refuse_unknown([metric for metric in study.metrics if not unknown and metric not in found], found)
        if watch is not None:
            watch(done, cell.name)
    return problems


def declared_metrics(recipe: str | Recipe, cell: Cell) -> tuple[str, ...]:
    """The metrics that a cell's task says it will have; none if it does not say, or cannot even be prepared."""
    try:
        _, found = name_recipe(recipe)
        return found.prepare(resolve(found.config, {}, cell.settings)).metrics
    except Exception:
        return ()  # the cell will say it


def check_declared(metrics: Sequence[str], declared: Sequence[str]) -> None:
    """Refuse metrics that no cell can have; privacy adds its own, and declared ones may be of the worst client, too."""
    stems = {stem(metric) for metric in declared} | {"epsilon"}
    refuse_unknown([metric for metric in metrics if declared and stem(metric) not in stems], declared)


def refuse_unknown(metrics: Sequence[str], valid: Iterable[str]) -> None:
    """End a study that is about metrics nobody measures."""
    if metrics:
        raise ConfigError(f"metrics: no cell has a metric {metrics[0]!r}{nearest(metrics[0], valid)}")


def plan_of(study: Study) -> dict[str, Any]:
    """What the study is going to do, for those who look at its folder."""
    names = {"cells": [cell.name for cell in study.cells], "methods": list(study.methods)}
    told = {"recipe": study.called, "baseline": study.baseline, "metrics": list(study.metrics)}
    return {"schema": 1, **told, **names, "threshold": dict(study.threshold), "file": study.file, "sets": study.sets}


def run_cell(recipe: str | Recipe, place: tuple[Cell, Path]) -> str:
    """Make or finish one run in its folder; an error is the cell's result, not the study's end."""
    from mutirao.training.optimizers import one_thread  # late: it brings torch

    cell, out = place
    name, found = name_recipe(recipe)
    config = resolve(found.config, {}, cell.settings)
    if (out / "config.toml").exists() and not is_run_of(out, name, config):
        return f"{out} {OTHERWISE}; choose another --out, or remove it"
    try:
        with one_thread():
            execute(recipe, config, out, resume=True)
    except BudgetSpent:
        return ""  # a run that its privacy budget ended is finished, too
    except (MutiraoError, OSError) as error:
        return one_line(error)
    except Exception as error:  # of somebody's own part
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
    r"""Each finished cell with what its folder says.

    >>> _ = Path("first.toml").write_text('recipe = "quickstart"\nseeds = 1\n[methods.fedavg]\n')
    >>> list(results(read_study(Path("first.toml")), Path("runs/first")))  # no cell is finished yet
    []
    """
    for cell in study.cells:
        folder = out / "cells" / cell.name
        if (folder / "summary.json").exists():
            yield cell, Record.of(folder)
