"""Run a recipe and record it in a folder: the one path that the command line, Flower and scripts share."""

import contextlib
import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mutirao.config import build, dump, flatten, read_toml, resolve, validate
from mutirao.core.arrays import digest
from mutirao.core.exclusion import FleetWithout, parse_names
from mutirao.core.fleet import Fleet
from mutirao.core.records import Round, Row
from mutirao.core.rounds import Run
from mutirao.errors import BudgetSpent, ConfigError, MutiraoError
from mutirao.experiments.party_agreement import run_recipe
from mutirao.experiments.task import NAMES, Recipe, Task, find, recipe_name
from mutirao.io import load_arrays
from mutirao.metrics import direction_of
from mutirao.privacy import NAMES as PRIVACY
from mutirao.privacy import privacy_summary, resolve_privacy, without_resolved
from mutirao.registry import dotted_in
from mutirao.runs.changed_settings import own_defaults
from mutirao.runs.csv_tables import metrics_in_row
from mutirao.runs.run_folder import Folder, versions
from mutirao.runs.trackers import SafeSink, Tracker
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_run
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.lr_schedules import has_same_past

log = logging.getLogger("mutirao")

# Settings that do not affect the rounds already made.
MAY_CHANGE = {"rounds", "wait", "min_replies", "track", "keep", "keep_bytes"}
Watch = Callable[[Run, Round, Task], None]
Draw = Callable[[Run, Task, Path], None]
Report = Callable[[Path], Any]


def execute(
    recipe: Recipe | str,
    config: Any,
    out: Path | str,
    *,
    fleet: Fleet | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    draw: Draw | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Run a recipe, record each round in `out`, and return the summary; `fleet` is local by default.

    `config` is the recipe's configuration, a table of settings, or None for its defaults. `draw` makes the pictures of
    the finished run and `report` its page; `mutirao.execute` passes the usual ones.
    """
    name, recipe = name_recipe(recipe)
    config = validate(recipe.config, config)
    out = Path(out)
    tracker: Tracker = build("track", config.track)
    check_extras(config)
    with Folder.open(out) as folder, logged(out):
        folder.keep = config.keep
        folder.keep_bytes = config.keep_bytes
        if folder.holds_run() and not resume:
            raise ConfigError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
        done = folder.summary()
        if done is not None and has_ended(done, config.rounds):
            if report is not None and not (out / "report.html").exists():
                report(out)
            return done | {"already": True}
        task = recipe.prepare(config)
        # ConfigError, before the run begins, if the direction of the metric is not declared.
        better = max if task.higher_is_better else min
        config = replace(config, privacy=resolve_privacy(config, len(task.population)))
        is_local = fleet is None or isinstance(fleet, LocalFleet)
        fleet = fleet or LocalFleet(task.worker, task.population)
        text = dump(name, config)
        # Checked before `resume`, which already cuts the tables and writes to the audit trail.
        check_facts(folder, task)
        run = None
        if folder.holds_run():
            run = folder.resume(text)
        fresh = run is None
        if run is None:
            run = Run(task.initial(), seed=config.seed)
        if task.check is not None and is_local and run.round < config.rounds:
            task.check(run.arrays, task.population)
        fleet.use_state_store(folder.sites.states)
        if fresh:
            folder.begin(run, text, task.facts, extra_facts(name, config))
        elif run.sites:
            fleet.restore(run.sites)
        fleet.trail(folder.audit.where)
        sink = SafeSink(tracker.open(out, name, dict(flatten(tomllib.loads(text))), run.round))
        stopped: BudgetSpent | None = None
        best = best_row(run.history, task.judge, better)
        try:
            for round in run_recipe(recipe, present_clients(fleet, config), config, task, run):
                now = best_row([r for r in (best, round.row) if r], task.judge, better)
                # `commit` writes the clients' states with the round, so they are collected first.
                run.sites = fleet.snapshot()
                folder.commit(run, round, best=now is round.row, heads=fleet.heads())
                best = now
                sink.round(round.row)
                if watch is not None:
                    watch(run, round, task)
                if task.ending.is_over(run.round, best):
                    break
        except MutiraoError as error:
            if isinstance(error, ConfigError) and fresh and not run.round:
                # A configuration that cannot be run leaves no folder.
                folder.take_back()
                raise
            if not isinstance(error, BudgetSpent) or not run.round:
                folder.fail(run, error)
                raise
            # The rounds made are complete: the run is finished first, then the reason is raised.
            stopped = error
        for file, write in task.exhibits.files.items():
            write(run, out / file)
        if draw is not None:
            draw(run, task, out)
        summary = build_summary(name, config, task, run, best, stopped) | evaluate_best(folder, task, run, best)
        full = folder.finish(run, summary, audited_files(task))
        if report is not None:
            report(out)
        sink.end(full)
        if stopped is not None:
            raise stopped
        return full


def extra_facts(name: str, config: Any) -> dict[str, Any]:
    """What the audit trail records besides the configuration: the defaults of a user's recipe."""
    if name in NAMES:
        return {}
    return {"defaults": own_defaults(type(config))}


def check_facts(folder: Folder, task: Task) -> None:
    """Refuse to resume a run that began with other facts, such as another list of consenting clients."""
    for key, then in folder.audit.began.get("facts", {}).items():
        now = task.facts.get(key)
        if now != then:
            change = f"{json.dumps(then)} then, {json.dumps(now)} now"
            raise ConfigError(
                f"{folder.path}: {key} is not what the run began with: {change}; restore it, or start anew"
            )


def audited_files(task: Task) -> list[str]:
    """The further files that the audit trail covers: the task's own, and the tables of its pictures."""
    beside = [Path(picture).with_suffix(".csv").name for picture in task.exhibits.pictures]
    return list(dict.fromkeys([*task.exhibits.files, *beside, "plane.csv", "partition.csv"]))


def name_recipe(recipe: Recipe | str) -> tuple[str, Recipe]:
    """The recipe and its recorded name."""
    if isinstance(recipe, str):
        return recipe, find(recipe)
    name = recipe_name(recipe)
    if not name:
        log.warning("the recipe is not an attribute of a module, so the run cannot be repeated from its config.toml")
    return name, recipe


def check_extras(config: Any) -> None:
    """Refuse early if the package for privacy accounting is missing; trackers check theirs themselves."""
    if config.privacy.name in PRIVACY and config.privacy.name != "none" and find_spec("opacus") is None:
        raise ConfigError(f"privacy={config.privacy.name} needs Opacus: install mutirao[privacy]")


def present_clients(fleet: Fleet, config: Any) -> Fleet:
    """The fleet without the excluded clients, if it contains any."""
    names = parse_names(config.exclude)
    if not names or (isinstance(fleet, LocalFleet) and names.isdisjoint(fleet.clients())):
        return fleet
    return FleetWithout(fleet, names)


def best_row(history: list[Row], monitor: str, better: Callable[..., Row]) -> Row | None:
    """The row of the best round, the earliest of equals; None if the metric was never evaluated."""
    evaluated = [row for row in history if monitor in row]
    if evaluated:
        return better(evaluated, key=lambda row: row[monitor])
    return None


def build_summary(
    name: str, config: Any, task: Task, run: Run, best: Row | None, stopped: BudgetSpent | None
) -> dict[str, Any]:
    """The content of summary.json."""
    final = metrics_in_row(run.history[-1]) if run.history else {}
    best_metrics = final
    best_round = run.round
    if best:
        best_metrics = metrics_in_row(best)
        best_round = best["round"]
    metrics = dict.fromkeys(k for row in run.history for k in metrics_in_row(row))
    directions = {metric: direction_of(metric, task.directions) for metric in metrics}
    summary = {
        "recipe": name,
        "final": final,
        "best": best_metrics,
        "best_round": best_round,
        "judge": task.judge,
        "directions": {metric: direction for metric, direction in directions.items() if direction},
        "rounds": run.round,
        "seed": run.seed,
        "digest": digest(run.arrays),
        "clients": len(run.roster),
        **task.facts,
    }
    if task.classes:
        summary["classes"] = task.classes
    summary["bytes_down"] = sum(r["bytes_down"] for r in run.history)
    summary["bytes_up"] = sum(r["bytes_up"] for r in run.history)
    if kept := privacy_summary(config.privacy, run):
        summary["privacy"] = kept
    if stopped:
        summary["stopped"] = str(stopped)
    if task.exhibits.findings:
        summary |= task.exhibits.findings(run)
    summary["versions"] = versions()
    return summary


def evaluate_best(folder: Folder, task: Task, run: Run, best: Row | None) -> dict[str, Any]:
    """The test metrics of the best model, if validation data chose it; empty for other runs."""
    if task.ending.final_metrics is None or best is None:
        return {}
    best_model, _ = load_arrays(folder.checkpoints / "best.safetensors")
    found = task.ending.final_metrics(run, best_model)
    final = metrics_in_row(run.history[-1]) | found
    directions = {metric: way for metric in final if (way := direction_of(metric, task.directions))}
    summary = {"final": final, "best": metrics_in_row(best) | found, "directions": directions}
    if task.ending.is_over(run.round, best):
        summary["ended"] = f"after round {run.round}, {run.round - best['round']} rounds after the best"
    return summary


def has_ended(summary: Mapping[str, Any], rounds: int) -> bool:
    """Whether a finished run has all rounds, or stopped early."""
    return summary["rounds"] >= rounds or "ended" in summary


def default_out(name: str, resume: bool) -> Path:
    """runs/RECIPE, or the next free runs/RECIPE-2, -3, ...; with `resume` the latest existing one."""
    stem = re.sub(r"[^\w.@+-]+", "-", name).lstrip(".") or "run"
    candidate = Path("runs") / stem
    number = 1
    while candidate.exists():
        latest = candidate
        number += 1
        candidate = Path("runs") / f"{stem}-{number}"
    if resume and number > 1:
        return latest
    return candidate


def reopen(name: str | None, out: Path, sets: list[tuple[str, Any]], trust: Trust = distrust) -> tuple[str, Any]:
    """The recipe and configuration of the run in `out`, with `sets` applied if they may change.

    Code that it names is loaded if the user ran it here before, names it too, or agrees: see `mutirao.runs.trust`.
    """
    table = read_toml(out / "config.toml")
    typed = [name, *(value for _, value in sets)]
    check_trust(out / "config.toml", table, trust, typed, lambda: is_own_run(out))
    recipe = str(table.pop("recipe", ""))
    if name is not None and name != recipe:
        raise ConfigError(f"{out} holds a run of {recipe!r}, not of {name!r}")
    config_class = find(recipe).config
    before = resolve(config_class, table)
    after = resolve(config_class, table, sets)
    for key in sorted(vars(before)):
        if vars(before)[key] != vars(after)[key] and key not in MAY_CHANGE:
            raise ConfigError(f"{key} cannot change in a started run; use another --out")
    check_past(before, after)
    return recipe, after


def different_settings(out: Path, name: str, config: Any) -> list[str]:
    """The settings that differ in the run in `out`; settings newer than that run have their defaults there.

    No code is imported that `config` does not name too.
    """
    table = read_toml(out / "config.toml")
    known = dotted_in(tomllib.loads(dump(name, config)))
    unknown = [key for key, value in table.items() if not {*dotted_in({key: value})} <= {*known}]
    if unknown:
        return unknown
    if table.pop("recipe", "") != name:
        return ["recipe"]
    made = resolve(type(config), table)
    # A run writes down the noise that it worked out for its privacy budget: compare without that.
    then = vars(replace(made, privacy=without_resolved(made.privacy)))
    now = vars(replace(config, privacy=without_resolved(config.privacy)))
    return [key for key in now if then[key] != now[key]]


def check_past(before: Any, after: Any) -> None:
    """Refuse another number of rounds if the learning rates of those already made depend on it."""
    if not has_same_past(after.schedule, before.rounds, after.rounds):
        raise ConfigError(
            f"rounds cannot change in a started run with schedule={after.schedule.name}, as its rates depend on "
            "them; use another --out, and give the schedule a length of its own"
        )


class RunLog(logging.FileHandler):
    """A log file that silently drops lines on a full disk: the run itself reports the error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Do not print a traceback for a line that could not be written."""


@contextlib.contextmanager
def logged(out: Path) -> Iterator[None]:
    """Write log messages to `run.log` too."""
    handler = RunLog(out / "run.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("mutirao")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
