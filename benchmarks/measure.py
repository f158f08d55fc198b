"""Let the contenders do a job in turn, several times, and sum up what was seen."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environments, jobs, machine, processes

MODULES = {"ours": "ours", "flower": "flower_sim", "pfl": "pfl_sim", "blaze": "blaze_sim", "plain": "plain"}
FIGURES = ("round_s", "startup_s", "total_s", "peak_mb")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run, whatever the job."""

    contenders: tuple[str, ...] = tuple(MODULES)
    workers: int = 2
    pfl_workers: int = 2
    engine: str = "auto"
    record: bool = False
    timeout: float = 3600.0


@dataclass(frozen=True)
class Seen:
    """One run of one contender."""

    figures: dict[str, float]
    samples: list[int]
    accuracy: float | None
    versions: dict[str, str]
    load: float  # of the machine, in the minute before


class Failed(Exception):
    """A contender did not finish its job."""


def benchmark(job: jobs.Job, settings: Settings) -> dict[str, Any]:
    """Run a job with each contender, alternating, and return the result as one JSON-like object."""
    where = machine.describe()
    troubles: dict[str, str] = {}
    pythons = {}
    for name in settings.contenders:
        try:
            pythons[name] = environments.python_of(name)
        except environments.CannotInstall as error:
            troubles[name] = str(error)
            say(f"{error}; going on without it")
    seen: dict[str, list[Seen]] = {name: [] for name in pythons}
    with data_of(job) as data:
        for repetition in range(job.repetitions):
            shift = repetition % max(1, len(pythons))  # everyone goes first in turn
            for name in [*pythons][shift:] + [*pythons][:shift]:
                if name in troubles:
                    continue
                try:
                    seen[name].append(again_if_it_fails(name, pythons[name], job, data, settings))
                    figures = seen[name][-1].figures
                    say(f"{job.name} {repetition + 1}/{job.repetitions} {name}: {figures['round_s']:.4f} s a round")
                except Failed as error:
                    troubles[name] = str(error)
                    say(f"{name} failed and is left out: {error}")
    result: dict[str, Any] = {
        "job": job.name,
        "settings": asdict(job) | asdict(settings),
        "machine": where,
        "versions": {k: v for runs in seen.values() for run in runs[:1] for k, v in run.versions.items()},
        "repetitions": job.repetitions,
    }
    for name in settings.contenders:
        runs = seen.get(name, [])
        result[name] = {"error": troubles[name]} if name in troubles else summary(runs)
    return result | {"ratios": ratios(result)}


def again_if_it_fails(name: str, python: Path, job: jobs.Job, data: Path, settings: Settings) -> Seen:
    """One run of one contender, or a second one where the first failed: some crash now and then as they end."""
    try:
        return once(name, python, job, data, settings)
    except Failed as error:
        say(f"{name} failed and is run once more: {error}")
        return once(name, python, job, data, settings)


def once(name: str, python: Path, job: jobs.Job, data: Path, settings: Settings) -> Seen:
    """One run of one contender, from the start of its process to its end."""
    scratch, load = Path(tempfile.mkdtemp(prefix="mb-")), os.getloadavg()[0]  # short: Ray puts sockets below it
    command = [str(python), "-m", f"benchmarks.contenders.{MODULES[name]}", "--data", str(data)]
    workers = settings.pfl_workers if name == "pfl" else settings.workers
    command += ["--scratch", str(scratch), "--rounds", str(job.rounds), "--workers", str(workers)]
    command += ["--engine", settings.engine, *(["--record"] if settings.record else [])]
    env = os.environ | QUIET | {"PYTHONPATH": str(environments.ROOT)}
    try:
        done = processes.run(command, env, scratch, settings.timeout)
    except processes.TookTooLong:
        raise Failed(f"not done after {settings.timeout:g} s") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    lines = [line for line in done.output.splitlines() if line.startswith('{"ends"')]
    if done.status or not lines:
        words = done.errors.strip().splitlines() or ["no output"]
        raise Failed(f"exit code {done.status}: {words[-1]}")
    told = json.loads(lines[-1])
    ends = told["ends"]
    if len(ends) != job.rounds:
        raise Failed(f"{len(ends)} of {job.rounds} rounds done")
    seconds = [b - a for a, b in itertools.pairwise(ends)] or [ends[0] - done.started]
    figures = {
        "round_s": median(seconds),
        "startup_s": ends[0] - done.started,
        "total_s": done.ended - done.started,
        "peak_mb": done.peak_mb,
    }
    return Seen(figures, told["samples"], told["accuracy"], told["versions"], load)


def summary(runs: list[Seen]) -> dict[str, Any]:
    """Medians over the repetitions, with the smallest and the largest as spread."""
    columns = {k: [run.figures[k] for run in runs] for k in FIGURES}
    return {
        **{k: round(median(v), 5) for k, v in columns.items()},
        "spread": {k: [round(min(v), 5), round(max(v), 5)] for k, v in columns.items()},
        "accuracy": median(run.accuracy or 0.0 for run in runs),
        "loads": [round(run.load, 2) for run in runs],
        "samples_a_round": round(sum(sum(run.samples) for run in runs) / sum(len(run.samples) for run in runs)),
    }


def ratios(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times the figure of each other contender is ours."""
    ours = result.get("ours", {})
    others = [name for name in MODULES if name != "ours" and "round_s" in result.get(name, {})]
    if "round_s" not in ours:
        return {}
    names = {"round_s": "round", "startup_s": "startup", "total_s": "total", "peak_mb": "memory"}
    return {name: {names[k]: round(result[name][k] / ours[k], 2) for k in FIGURES} for name in others}


@contextlib.contextmanager
def data_of(job: jobs.Job) -> Iterator[Path]:
    """The job's samples on disk, for as long as they are needed."""
    environments.prepare_folder()
    with tempfile.TemporaryDirectory(prefix="data-", dir=environments.BENCH) as folder:
        jobs.write(job, Path(folder))
        yield Path(folder)


def say(text: str) -> None:
    """Progress goes to the error stream: standard output is for the result."""
    print(text, file=sys.stderr, flush=True)
