"""What a server can know of a run before it is handed over: it is said to who asked for it, not to a log far away."""

import os
from collections.abc import Sequence
from pathlib import Path

from mutirao.config import resolve
from mutirao.core.fleet import Scalar, failure_of
from mutirao.datasets.labelled import NAMED, is_embedded
from mutirao.deploy.server.supervisor import process_holding
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.runs.execute import reopen
from mutirao.runs.run_folder import Folder


def check_run(recipe: str, sets: Sequence[tuple[str, Scalar]], out: Path, resume: bool) -> None:
    """ConfigError if the folder, a setting, or the server's own data would end the run before its first round."""
    found = find(recipe)
    config = resolve(found.config, {}, sets)
    check_folder(out, resume)
    if Folder(out).holds_run():
        config = reopen(recipe, out, list(sets))[1]
    try:
        found.prepare(config).higher_is_better  # noqa: B018  # it refuses a judge whose direction nobody knows
    except MutiraoError:
        raise
    except Exception as error:  # whatever reading data raises; the server's process would end by it
        raise ConfigError(f"the server cannot prepare {recipe}: {failure_of(error).reason}") from error


def check_folder(out: Path, resume: bool) -> None:
    """ConfigError if a run cannot be written to this folder."""
    if Folder(out).holds_run() and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or choose another --out")
    if pid := process_holding(out):
        raise ConfigError(f"{out} is being written by process {pid}; wait for it, or choose another --out")
    there = next(place for place in (out, *out.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be written: {there} is no folder that this user may write to")


def from_here(sets: Sequence[tuple[str, Scalar]]) -> list[tuple[str, Scalar]]:
    """Settings in which paths that are there, seen from this folder, are whole: the server's process is in another."""

    def is_place(key: str, value: Scalar) -> bool:
        named = isinstance(value, str) and (
            "/" in value or (key == "data" and not (is_embedded(value) or value in NAMED))
        )
        return named and Path(str(value)).exists()

    return [(key, str(Path(str(value)).resolve()) if is_place(key, value) else value) for key, value in sets]
