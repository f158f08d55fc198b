"""Trackers: where the rounds of a run are told besides its folder. `--set track=mlflow` or `track=tensorboard`.

A tracker is a frozen dataclass whose `open(folder, recipe, config, round)` gives a sink with `round` and `end`; to make
one is to ask for its package.
The run folder stays the record: a tracker that fails is named in the log once and left alone.
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
        """Tell a line of history."""
        ...

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the end of a run that finished."""
        ...


class Tracker(Protocol):
    """Opens a sink for one run."""

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """Begin to track, or go on after `round`."""
        ...


@dataclass(frozen=True)
class NoTracker:
    """No tracker.

    >>> from mutirao.config import Common, resolve
    >>> resolve(Common, {}).track.name, NAMES["none"] is Nothing  # by default
    ('none', True)
    """

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """Nobody listens."""
        return SilentSink()


class SilentSink:
    """Nobody listens."""

    def round(self, row: Mapping[str, Any]) -> None:
        """Say nothing."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Say nothing."""


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
        """An event file; rounds after `round` that an interrupted run wrote are dropped when it goes on."""
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
        """One scalar a figure."""
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, int(row["round"]))
        self.writer.flush()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self.writer.add_text("summary", "    " + json.dumps(summary), int(summary["rounds"]))
        self.writer.close()


@dataclass(frozen=True)
class MLflow:
    """A run in MLflow; `uri` and `experiment` as MLflow knows them (empty: MLflow's own default).

    >>> MLflow(uri="sqlite:///runs.db", experiment="wards")
    MLflow(uri='sqlite:///runs.db', experiment='wards')
    """

    uri: str = ""
    experiment: str = "mutirao"

    def __post_init__(self) -> None:
        require_package("mlflow", "mlflow")

    def open(self, folder: Path, recipe: str, config: Mapping[str, Any], round: int) -> Sink:
        """A new run, or the one that this folder began."""
        flow = require_package("mlflow", "mlflow")
        client = flow.MlflowClient(tracking_uri=self.uri or None)
        known = folder / "mlflow.json"
        try:
            return Flow(client, flow.entities, json.loads(known.read_text(encoding="utf-8"))["run"], folder)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
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
        """One batch of metrics a round."""
        now, step = int(time.time() * 1000), int(row["round"])
        told = [self.entities.Metric(spell(k), v, now, step) for k, v in numbers(row).items()]
        self.client.log_batch(self.run, metrics=told)

    def end(self, summary: Mapping[str, Any]) -> None:
        """The summary and the files that explain the run, then its end."""
        self.client.set_tag(self.run, "digest", str(summary["digest"]))
        for name in ("config.toml", "summary.json", "report.html"):
            if (self.folder / name).exists():
                self.client.log_artifact(self.run, str(self.folder / name))
        self.client.set_terminated(self.run)


NAMES = {"none": NoTracker, "mlflow": MLflow, "tensorboard": TensorBoard}


def require_package(module: str, package: str) -> Any:
    """A module of an optional package, or how to get it."""
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
    """A name as MLflow takes it: `ndcg@5` is `ndcg_at_5`."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name.replace("@", "_at_"))[:200]


class SafeSink:
    """A sink whose first failure is its last: the run goes on without it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def round(self, row: Mapping[str, Any]) -> None:
        """Tell a round, if the tracker still listens."""
        self._try(self.sink.round, row)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the end, if the tracker still listens."""
        self._try(self.sink.end, summary)

    def _try(self, tell: Callable[[Mapping[str, Any]], None], content: Mapping[str, Any]) -> None:
        try:
            tell(content)
        except Exception as error:  # a tracker may raise anything, from a full disk to a server that is gone
            log.warning("tracking ends here, the run goes on: %s", " ".join(str(error).split())[:300])
            self.sink = SilentSink()
