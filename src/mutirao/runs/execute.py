"""Run a recipe into a folder: the one path that the command line, Flower and scripts share."""

import contextlib
import logging
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutirao.config import build, dump, flattened, read, resolve
from mutirao.core.arrays import digest
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.errors import BudgetSpent, ConfigError, MutiraoError
from mutirao.fleets.local import LocalFleet
from mutirao.fleets.without import FleetWithout, names_in
from mutirao.privacy import promise
from mutirao.recipes.task import Task, find
from mutirao.report import write_report
from mutirao.runs.folder import Folder, best_row, metrics_of, versions
from mutirao.runs.tables import Table
from mutirao.runs.trackers import Gentle, Tracker

log = logging.getLogger("mutirao")

MAY_CHANGE = {"rounds", "wait", "min_replies", "track"}  # settings that do not touch the rounds already made
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
    keep_bytes: int | None = None,
) -> dict[str, Any]:
    """Make the rounds of a recipe, record each in `out`, and return the summary; `fleet` is local by default."""
    recipe = find(name)
    with Folder.open(out) as folder, logged(out):
        folder.keep_bytes = keep_bytes
        if folder.holds_run() and not resume:
            raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or choose another --out")
        done = folder.summary()
        if done is not None and done["rounds"] >= config.rounds:
            if pictures and not (out / "report.html").exists():
                write_report(out)
            return done | {"already": True}
        task = recipe.prepare(config)
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
        names = names_in(config.exclude)
        local = isinstance(fleet, LocalFleet) and names.isdisjoint(fleet.clients())  # they are not in its population
        seen = FleetWithout(fleet, names) if names and not local else fleet
        if hasattr(fleet, "trail"):
            fleet.trail(folder.audit.where)  # its head goes with every request, and sites keep it
        tracker: Tracker = build("track", config.track)
        sink = Gentle(tracker.open(out, name, dict(flattened(tomllib.loads(text))), run.round))
        stopped: BudgetSpent | None = None
        try:
            for round in recipe.flow(seen, config, task, run):
                now = best_row([r for r in (best, round.row) if r], task.judge, task.higher_is_better)
                states = fleet.snapshot() if isinstance(fleet, LocalFleet) else {}
                folder.commit(run, round, states, best=now is round.row, heads=getattr(fleet, "heads", dict)())
                best = now
                sink.round(round.row)
                if watch is not None:
                    watch(run, round, task)
        except MutiraoError as error:
            if not isinstance(error, BudgetSpent) or not run.round:
                folder.fail(run, error)
                raise
            stopped = error  # what was made is whole: it is finished as any run, and the reason is passed on
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
            **({"classes": task.classes} if task.classes else {}),
            "bytes_down": sum(r["bytes_down"] for r in run.history),
            "bytes_up": sum(r["bytes_up"] for r in run.history),
            **({"privacy": kept} if (kept := promise(config.privacy, run)) else {}),
            **({"stopped": str(stopped)} if stopped else {}),
            **(task.findings(run) if task.findings else {}),
            "versions": versions(),
        }
        full = folder.finish(run, summary)
        if pictures:
            write_report(out)
        sink.end(full)
        if stopped is not None:
            raise stopped
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
    from mutirao.drawing.participation import draw_participation
    from mutirao.drawing.plots import draw_curves, draw_weights
    from mutirao.studies.participation import participation

    metrics = list(dict.fromkeys([task.judge, *(k for row in run.history for k in metrics_of(row))]))
    metrics = [m for m in metrics if m not in task.constant]
    if any(task.judge in row for row in run.history):
        draw_curves(run.history, metrics, out / "curves.png")
    clients = Table(out / "clients.csv").read()
    if any("risk" in row for row in clients):
        draw_weights(clients, out / "weights.png")
    if any(row["selected"] < len(run.roster) for row in run.history):
        draw_participation(participation(clients, len(run.roster), run.round), out / "participation.png")
    for file, picture in task.pictures.items():
        picture(out / file)
    for file, make in task.files.items():
        make(run, out / file)


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
