"""Experiment trackers: `--set track=mlflow` or `track=tensorboard`.

A tracker is a frozen dataclass with a method `open(folder, recipe, config, round)`, which returns a sink with `round`
and `end`. Constructing it fails if its package is missing. The run folder stays the record: the first failure of a
tracker is logged, and the run continues without it.
"""

import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mutirao.errors import ConfigError
from mutirao.io import write_whole

log = logging.getLogger("mutirao")


class Sink(Protocol):
    """An open tracker."""

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a round."""
        ...

    def end(self, summary: Mapping[str, Any]) -> None:
        """Log the summary of a finished run."""
        ...


class Tracker(Protocol):
    """Opens a sink for one run."""

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """Start tracking, or continue after `round`."""
        ...


@dataclass(frozen=True)
class NoTracker:
    """No tracker.

    >>> from mutirao.config import Common, resolve
    >>> resolve(Common, {}).track.name, NAMES["none"] is NoTracker  # by default
    ('none', True)
    """

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """A sink that ignores everything."""
        return SilentSink()


class SilentSink:
    """A sink that ignores everything."""

    def round(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class TensorBoard:
    """Event files in `tensorboard/` of the run folder: `tensorboard --logdir runs`.

    >>> sink = TensorBoard().open(Path("runs/board"), "quickstart", {}, 0)
    >>> sink.round({"round": 1, "accuracy": 0.5})
    >>> sink.end({"rounds": 1})
    >>> len(list(Path("runs/board/tensorboard").iterdir()))
    1
    """

    def __post_init__(self) -> None:
        require_package("tensorboard", "tensorboard")

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """An event file. Rounds after `round`, which an interrupted run wrote, are dropped on resuming."""
        writer = require_package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(folder / "tensorboard"), purge_step=round + 1 if round else None
        )
        writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in config.items()), 0)
        return Board(writer)


@dataclass
class Board:
    """An open event file."""

    writer: Any

    def round(self, row: Mapping[str, Any]) -> None:
        """One scalar for each figure."""
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, int(row["round"]))
        self.writer.flush()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self.writer.add_text("summary", "    " + json.dumps(summary), int(summary["rounds"]))
        self.writer.close()


@dataclass(frozen=True)
class MLflow:
    """A run in MLflow; `uri` and `experiment` are MLflow's; empty is its own default.

    >>> MLflow(uri="sqlite:///runs.db", experiment="wards")
    MLflow(uri='sqlite:///runs.db', experiment='wards')
    """

    uri: str = ""
    experiment: str = "mutirao"

    def __post_init__(self) -> None:
        require_package("mlflow", "mlflow")

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """A new MLflow run, or the one that this folder started."""
        flow = require_package("mlflow", "mlflow")
        client = flow.MlflowClient(tracking_uri=self.uri or None)
        known = folder / "mlflow.json"
        try:
            return Flow(client, flow.entities, json.loads(known.read_text(encoding="utf-8"))["run"], folder)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # The folder starts its first run, or its note of the earlier one cannot be read.
            pass
        found = client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else client.create_experiment(self.experiment)
        run = client.create_run(place, run_name=folder.name, tags={"recipe": recipe}).info.run_id
        params = [flow.entities.Param(spell(k), str(v)[:500]) for k, v in config.items()]
        client.log_batch(run, params=params)
        write_whole(known, json.dumps({"uri": self.uri, "run": run}) + "\n")
        return Flow(client, flow.entities, run, folder)


@dataclass
class Flow:
    """An open run of MLflow."""

    client: Any
    entities: Any
    run: str
    folder: Path

    def round(self, row: Mapping[str, Any]) -> None:
        """One batch of metrics for each round."""
        now = int(time.time() * 1000)
        step = int(row["round"])
        metrics = [self.entities.Metric(spell(name), value, now, step) for name, value in numbers(row).items()]
        self.client.log_batch(self.run, metrics=metrics)

    def end(self, summary: Mapping[str, Any]) -> None:
        """The summary and the files that explain the run, then its end."""
        self.client.set_tag(self.run, "digest", str(summary["digest"]))
        for name in ("config.toml", "summary.json", "report.html"):
            if (self.folder / name).exists():
                self.client.log_artifact(self.run, str(self.folder / name))
        self.client.set_terminated(self.run)


NAMES = {"none": NoTracker, "mlflow": MLflow, "tensorboard": TensorBoard}


def require_package(module: str, package: str) -> Any:
    """Import a module of an optional package; ConfigError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"track={package} needs a package; install it with: pip install 'mutirao[{package}]'"
        ) from error


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite figures of a row."""
    found = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "round"}
    return {k: v for k, v in found.items() if math.isfinite(v)}


def spell(name: str) -> str:
    """A name as MLflow accepts it: `ndcg@5` is `ndcg_at_5`."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name.replace("@", "_at_"))[:200]


class SafeSink:
    """A sink that is dropped after its first failure, so that the run continues."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def round(self, row: Mapping[str, Any]) -> None:
        """Log a round, if the tracker has not failed."""
        self._try(self.sink.round, row)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Log the end, if the tracker has not failed."""
        self._try(self.sink.end, summary)

    def _try(self, send: Callable[[Mapping[str, Any]], None], content: Mapping[str, Any]) -> None:
        try:
            send(content)
        # A tracker may raise anything, from a full disk to a server that is gone.
        except Exception as error:
            log.warning("tracking ends here, the run goes on: %s", " ".join(str(error).split())[:300])
            self.sink = SilentSink()
