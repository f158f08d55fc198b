"""Run a recipe into a folder: the one path that the command line, Flower and scripts share."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutirao.arrays import digest
from mutirao.config import dump, read, resolve
from mutirao.errors import ConfigError, MutiraoError
from mutirao.files import Table
from mutirao.fleet import Fleet
from mutirao.fleets.local import LocalFleet
from mutirao.recipes import Task, find
from mutirao.report import write_report
from mutirao.rounds import Round, Run
from mutirao.store import Folder, best_row, metrics_of, versions

log = logging.getLogger("mutirao")

MAY_CHANGE = {"rounds", "wait", "min_replies"}  # settings that do not touch the rounds already made
Watch = Callable[[Run, Round, Task], None]


def execute(
    name: str,
    config: Any,
    out: Path,
    *,
    fleet: Fleet | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    pictures: bool = True,
) -> dict[str, Any]:
    """Make the rounds of a recipe, record each in `out`, and return the summary; `fleet` is local by default."""
    recipe = find(name)
    with Folder.open(out) as folder, logged(out):
        if folder.holds_run() and not resume:
            raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or choose another --out")
        done = folder.summary()
        if done is not None and done["rounds"] >= config.rounds:
            if pictures and not (out / "report.html").exists():
                write_report(out)
            return done | {"already": True}
        task = recipe.task(config)
        fleet = fleet or LocalFleet(task.handler, task.population)
        text = dump(name, config)
        found = folder.resume(text) if folder.holds_run() else None
        if found is None:
            run = Run(task.initial(), seed=config.seed)
            folder.begin(run, text)
        else:
            run, states = found
            if isinstance(fleet, LocalFleet):
                fleet.restore(states)
            elif states:
                log.warning("the checkpoint holds states of simulated sites; the sites of this fleet keep their own")
        best = best_row(run.history, task.judge, task.higher_is_better)
        try:
            for round in recipe.flow(fleet, config, task, run):
                now = best_row([r for r in (best, round.row) if r], task.judge, task.higher_is_better)
                states = fleet.snapshot() if isinstance(fleet, LocalFleet) else {}
                folder.commit(run, round, states, best=now is round.row)
                best = now
                if watch is not None:
                    watch(run, round, task)
        except MutiraoError as error:
            folder.fail(run, error)
            raise
        if pictures:
            draw(run, task, out)
        final = metrics_of(run.history[-1]) if run.history else {}
        summary = {
            "recipe": name,
            "final": final,
            "best": metrics_of(best) if best else final,
            "best_round": best["round"] if best else run.round,
            "judge": task.judge,
            "rounds": run.round,
            "seed": run.seed,
            "digest": digest(run.arrays),
            "clients": len(run.roster),
            "bytes_down": sum(r["bytes_down"] for r in run.history),
            "bytes_up": sum(r["bytes_up"] for r in run.history),
            "versions": versions(),
        }
        full = folder.finish(run, summary)
        if pictures:
            write_report(out)
        return full


def continued(name: str | None, out: Path, sets: list[tuple[str, Any]]) -> tuple[str, Any]:
    """The recipe and configuration of the run in `out`, with `sets` applied where that is allowed."""
    table = read(out / "config.toml")
    recipe = str(table.pop("recipe", ""))
    if name is not None and name != recipe:
        raise ConfigError(f"{out} holds a run of {recipe!r}, not of {name!r}")
    kind = find(recipe).config
    before, after = resolve(kind, table), resolve(kind, table, sets)
    for key in sorted(vars(before)):
        if getattr(before, key) != getattr(after, key) and key not in MAY_CHANGE:
            raise ConfigError(f"{key} cannot change in a run that has begun; use another --out")
    return recipe, after


def draw(run: Run, task: Task, out: Path) -> None:
    """Save the pictures of a run; the curves that every run has, and the task's own."""
    from mutirao.plots import draw_curves, draw_weights

    metrics = list(dict.fromkeys([task.judge, *(k for row in run.history for k in metrics_of(row))]))
    if any(task.judge in row for row in run.history):
        draw_curves(run.history, metrics, out / "curves.png")
    clients = Table(out / "clients.csv").read()
    if any("risk" in row for row in clients):
        draw_weights(clients, out / "weights.png")
    for file, picture in task.pictures.items():
        picture(out / file)


@contextlib.contextmanager
def logged(out: Path) -> Iterator[None]:
    """Write what the run says to `run.log` as well."""
    handler = logging.FileHandler(out / "run.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("mutirao")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
