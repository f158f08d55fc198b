"""A study is a grid of runs, methods x folds x seeds, whose finished cells are kept and whose ends are compared."""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from mutirao.config import Common, flatten, nearest, one_line, read, resolve, write_value
from mutirao.core.files import write_whole
from mutirao.errors import BudgetSpent, ConfigError, MutiraoError
from mutirao.metrics import stem
from mutirao.naming import dotted_in
from mutirao.recipes.task import Recipe, find
from mutirao.runs.execute import differing, execute, name_recipe
from mutirao.runs.folder import is_plain, locked
from mutirao.runs.reader import Record, text_of
from mutirao.runs.schema import metrics_among
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_study, mark

KEEP_BYTES = 64 * 2**20  # of a cell's checkpoints: a study of hundreds of runs must not fill the disk
HANDED: list[str | Recipe] = []  # of a worker: the recipe it was handed when it began
KEYS = {"recipe", "baseline", "metrics", "seeds", "settings", "over", "methods", "threshold", "last"}

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
    """What a study file says, or `mutirao.compare` is told."""

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

    @property
    def called(self) -> str:
        """The recipe's name."""
        return name_recipe(self.recipe)[0]


def read_study(
    path: Path, sets: Sequence[tuple[str, Any]] = (), trust: Trust = distrust, out: Path | None = None
) -> Study:
    """Read a study file and check every cell's settings before anything runs; `sets` holds for all cells.

    `seeds`, which counts the seeds or lists them, may be set too. Code that the file names is loaded if `trust` says
    so, or if the user ran the same file into the folder `out` before.
    """
    table, text = read(path), text_of(path)
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

    try:
        cells = lay_out(find(recipe).config, methods, over, baseline, settle)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    told = tuple(f"{k}={write_value(v)}" for k, v in sets)
    return Study(
        recipe=recipe,
        cells=cells,
        methods=tuple(methods),
        baseline=baseline,
        metrics=tuple(table.get("metrics", ())),
        threshold=table.get("threshold", {}),
        last=int(table.get("last", 20)),
        file=str(path.resolve()),
        sets=told,
        text=text,
        names=tuple(dotted_in([table, typed])),
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


def carry_out(
    study: Study,
    out: Path,
    workers: int = 0,
    watch: Callable[[int, str], None] | None = None,
    start: Literal["spawn", "fork", "here"] = "spawn",
) -> list[str]:
    """Run the cells that are not finished yet, one core each; return what went wrong, a line a cell.

    Whatever ends it, such as Ctrl-C, ends its workers at once; called again it goes on with what they left. `start` is
    how they begin: `fork` hands them a recipe that is an object, and `here` there are none, but one cell after another.
    """
    with locked(out), crew(study, workers, start) as pool:
        if study.metrics:
            first = study.cells[0]
            known = pool.submit(metrics_here, first).result() if pool else declared_metrics(study.recipe, first)
            check_declared(study.metrics, known)
        plan = plan_of(study) | mark(study.names, out, study.text, *study.sets)
        write_whole(out / "study.json", json.dumps(plan, indent=2) + "\n")
        return run_cells(study, out, pool, watch)


@contextlib.contextmanager
def crew(study: Study, workers: int, start: str) -> Iterator[Executor | None]:
    """Workers with a core each, who know the recipe; None if cells are made by this process."""
    if start == "here":
        yield None
        return
    context = get_context(start)
    free, (over, alive) = context.Queue(), context.Pipe(duplex=False)
    cores = own_cores()[: workers or None][: len(study.cells)]
    for core in cores:
        free.put(core)
    told = (free, over, alive if start == "fork" else None, study.recipe)  # a fork has it anyway, and must close it
    with ProcessPoolExecutor(len(cores), mp_context=context, initializer=settle_on, initargs=told) as pool:
        try:
            yield pool
        except BaseException:
            alive.close()  # the workers see it, as they do if this process is killed
            raise


def run_cells(study: Study, out: Path, pool: Executor | None, watch: Callable[[int, str], None] | None) -> list[str]:
    """Make the cells, the first of each method before the second of any; return what went wrong."""
    places = list(dict.fromkeys(cell.place for cell in study.cells))
    cells = sorted(study.cells, key=lambda cell: places.index(cell.place))
    for method in study.methods:
        (out / "cells" / method).mkdir(parents=True, exist_ok=True)
    in_turn = ((cell, run_cell(study.recipe, cell, out / "cells" / cell.name)) for cell in cells)
    problems = []
    found: set[str] = set()  # metrics of the first finished cell of each method: not all methods have all
    unknown = set(study.methods)
    for done, (cell, problem) in enumerate(in_pool(pool, cells, out) if pool else in_turn, 1):
        if problem:
            problems.append(f"{cell.name}: {problem}")
        elif cell.method in unknown:
            unknown.remove(cell.method)
            found.update(metrics_among(Record(out / "cells" / cell.name).history.names))
            refuse_unknown([metric for metric in study.metrics if not unknown and metric not in found], found)
        if watch is not None:
            watch(done, cell.name)
    return problems


def in_pool(pool: Executor, cells: Sequence[Cell], out: Path) -> Iterator[tuple[Cell, str]]:
    """Cells as the workers finish them, with what went wrong."""
    waiting = {pool.submit(make_here, cell, out / "cells" / cell.name): cell for cell in cells}
    while waiting:
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future), future.result()


def own_cores() -> list[int]:
    """The cores this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return list(range(os.cpu_count() or 1))


def declared_metrics(recipe: str | Recipe, cell: Cell) -> tuple[str, ...]:
    """The metrics that a cell's task says it will have; none if it does not say, or cannot even be prepared."""
    try:
        _, found = name_recipe(recipe)
        return found.prepare(resolve(found.config, {}, cell.settings)).metrics
    except MutiraoError:
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


def settle_on(free: Any, over: Connection, alive: Connection | None, recipe: str | Recipe) -> None:
    """Give this worker a core of its own, so that neither it nor torch takes another's; it ends with the study."""
    if alive is not None:  # forked
        alive.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a bar's, whose lock a thread left behind may hold
    HANDED[:] = [recipe]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the study decides
    threading.Thread(target=end_with_study, args=(over,), daemon=True).start()
    core = free.get()
    with contextlib.suppress(AttributeError):  # not on every system
        os.sched_setaffinity(0, {core})


def end_with_study(over: Connection) -> None:
    """A worker whose study was stopped or killed must not go on alone: its end of the pipe is closed then."""
    connection.wait([over])
    os._exit(1)


def metrics_here(cell: Cell) -> tuple[str, ...]:
    """`declared_metrics`, asked of a worker."""
    return declared_metrics(HANDED[0], cell)


def make_here(cell: Cell, out: Path) -> str:
    """`run_cell`, asked of a worker."""
    return run_cell(HANDED[0], cell, out)


def run_cell(recipe: str | Recipe, cell: Cell, out: Path) -> str:
    """Make or finish one run; a clear error is the cell's result, not the study's end."""
    from mutirao.training.descent import one_thread  # late: it brings torch

    name, found = name_recipe(recipe)
    config = resolve(found.config, {}, cell.settings)
    if (out / "config.toml").exists() and not is_run_of(out, name, config):
        return f"{out} was made with other settings; choose another --out, or remove it"
    try:
        with one_thread():
            execute(recipe, config, out, resume=True, keep_bytes=KEEP_BYTES)
    except BudgetSpent:
        return ""  # a run that its privacy budget ended is finished, too
    except (MutiraoError, OSError) as error:
        return one_line(error)
    return ""


def is_run_of(out: Path, recipe: str, config: Any) -> bool:
    """Whether the run in a folder has these settings."""
    try:
        return not differing(out, recipe, config)
    except ConfigError:
        return False


def results(study: Study, out: Path) -> Iterator[tuple[Cell, Record]]:
    """Each finished cell with what its folder says."""
    for cell in study.cells:
        folder = out / "cells" / cell.name
        if (folder / "summary.json").exists():
            yield cell, Record.of(folder)
