"""A study is a grid of runs, methods x folds x seeds, whose finished cells are kept and whose ends are compared."""

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from mutirao.config import flattened, nearest, read, resolve, written
from mutirao.core.files import write_whole
from mutirao.errors import BudgetSpent, ConfigError, MutiraoError
from mutirao.recipes.task import find
from mutirao.runs.execute import execute
from mutirao.runs.folder import locked
from mutirao.runs.reader import Record

KEEP_BYTES = 64 * 2**20  # of a cell's checkpoints: a study of hundreds of runs must not fill the disk
KEYS = {"recipe", "baseline", "metrics", "seeds", "settings", "over", "methods", "threshold", "last"}


@dataclass(frozen=True)
class Cell:
    """One run of a study: a method in one place of the grid."""

    method: str
    place: tuple[tuple[str, Any], ...]  # such as (("fold", 1), ("seed", 0)): what is paired over
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The folder of the cell."""
        return "/".join([self.method, "-".join(f"{k}{v}" for k, v in self.place)])


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    recipe: str
    cells: tuple[Cell, ...]
    methods: tuple[str, ...]
    baseline: str
    metrics: tuple[str, ...] = ()
    threshold: Mapping[str, float] = field(default_factory=dict)
    last: int = 20  # rounds over which variability is measured
    file: str = ""  # where it was read from, and what was set besides: so that it can go on
    sets: tuple[str, ...] = ()


def load(path: Path, sets: Sequence[tuple[str, Any]] = ()) -> Study:
    """Read a study file and check every cell's settings before anything runs; `sets` holds for all cells.

    `seeds`, which counts the seeds or lists them, may be set too.
    """
    table = read(path)
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, KEYS)}")
    methods = table.get("methods")
    if not isinstance(methods, dict) or not methods:
        raise ConfigError(f"{path}: name at least one method, such as [methods.fedavg]")
    recipe, over = str(table.get("recipe", "")), dict(table.get("over", {}))
    seeds = dict(sets).get("seeds", table.get("seeds", [0]))
    over["seed"] = list(range(seeds)) if isinstance(seeds, int) else seeds
    for axis, values in over.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: {axis} must be a list of values")
    baseline = str(table.get("baseline", next(iter(methods))))
    if baseline not in methods:
        raise ConfigError(f"{path}: the baseline {baseline!r} is not one of the methods{nearest(baseline, methods)}")
    common = flattened(table.get("settings", {}))
    config = find(recipe).config
    cells = []
    for method, own in methods.items():
        for values in itertools.product(*over.values()):
            place = tuple(zip(over, values, strict=True))
            settings = (*common, *flattened(own), *(s for s in sets if s[0] != "seeds"), *place)
            try:
                resolve(config, {}, settings)
            except ConfigError as error:
                raise ConfigError(f"{path}: method {method!r}: {error}") from error
            cells.append(Cell(method, place, settings))
    return Study(
        recipe=recipe,
        cells=tuple(cells),
        methods=tuple(methods),
        baseline=baseline,
        metrics=tuple(table.get("metrics", ())),
        threshold=table.get("threshold", {}),
        last=int(table.get("last", 20)),
        file=str(path.resolve()),
        sets=tuple(f"{k}={written(v)}" for k, v in sets),
    )


def carry_out(study: Study, out: Path, workers: int = 0, watch: Callable[[int, str], None] | None = None) -> list[str]:
    """Run the cells that are not finished yet, one core each; return what went wrong, a line a cell."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = cores[: workers or len(cores)]
    context = get_context("spawn")
    free = context.Queue()
    for core in cores:
        free.put(core)
    problems, done = [], 0
    pool = ProcessPoolExecutor(len(cores), mp_context=context, initializer=settle_on, initargs=(free,))
    with locked(out), pool:
        write_whole(out / "study.json", json.dumps(plan_of(study), indent=2) + "\n")
        waiting = {pool.submit(run_cell, study.recipe, cell, out / "cells" / cell.name): cell for cell in study.cells}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    cell, done = waiting.pop(future), done + 1
                    if problem := future.result():
                        problems.append(f"{cell.name}: {problem}")
                    if watch is not None:
                        watch(done, cell.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return problems


def plan_of(study: Study) -> dict[str, Any]:
    """What the study is going to do, for those who look at its folder."""
    names = {"cells": [cell.name for cell in study.cells], "methods": list(study.methods)}
    told = {"recipe": study.recipe, "baseline": study.baseline, "metrics": list(study.metrics)}
    return {"schema": 1, **told, **names, "threshold": dict(study.threshold), "file": study.file, "sets": study.sets}


def settle_on(free: Any) -> None:
    """Give this worker a core of its own, so that neither it nor torch takes another's; it ends with the study."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    core = free.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def end_with_parent() -> None:
    """A worker whose study was killed must not go on alone."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_cell(recipe: str, cell: Cell, out: Path) -> str:
    """Make or finish one run; a clear error is the cell's result, not the study's end."""
    import torch

    torch.set_num_threads(1)
    config = resolve(find(recipe).config, {}, cell.settings)
    if (out / "config.toml").exists() and not is_run_of(out, recipe, config):
        return f"{out} was made with other settings; choose another --out, or remove it"
    try:
        execute(recipe, config, out, resume=True, keep_bytes=KEEP_BYTES)
    except BudgetSpent:
        return ""  # a run that its privacy budget ended is finished, too
    except MutiraoError as error:
        return str(error)
    return ""


def is_run_of(out: Path, recipe: str, config: Any) -> bool:
    """Whether the run in a folder has these settings; ones that came later have their defaults in an old run."""
    try:
        table = read(out / "config.toml")
        return bool(table.pop("recipe", "") == recipe and resolve(find(recipe).config, table) == config)
    except ConfigError:
        return False


def results(study: Study, out: Path) -> Iterator[tuple[Cell, Record]]:
    """Each finished cell with what its folder says."""
    for cell in study.cells:
        folder = out / "cells" / cell.name
        if (folder / "summary.json").exists():
            yield cell, Record.of(folder)
