"""Check a run, submit it to the running SuperLink as a small Flower app, and follow it to its end."""

import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mutirao.config import resolve, toml_lines, write_value
from mutirao.core.fleet import Scalar, failure_of
from mutirao.datasets.labelled import NAMED, is_embedded
from mutirao.deploy.layout import load_server
from mutirao.deploy.policy.privacy_ledger import append_event
from mutirao.deploy.processes import is_answering, run_flwr, start_id
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.io import write_whole
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.execute import reopen
from mutirao.runs.run_folder import Folder

POLL_FLOWER = 20.0  # seconds after which Flower is asked about a run that says nothing itself
SHOWN = ("round", "seconds", "replied", "failed", "loss")
APP = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "mutirao-app"
version = "1.0.0"
description = "A recipe of Mutirão as a Flower app"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["mutirao_app"]

[tool.flwr.app]
publisher = "mutirao"

[tool.flwr.app.components]
serverapp = "mutirao_app.server_app:app"
clientapp = "mutirao_app.client_app:app"

[tool.flwr.app.config]
recipe = "quickstart"
set = ""
out = ""
resume = false
timeout = 600.0
""",
    "mutirao_app/__init__.py": '"""A recipe of Mutirão as a Flower app."""\n',
    "mutirao_app/server_app.py": "from mutirao.deploy.flower import server_app\n\napp = server_app()\n",
    "mutirao_app/client_app.py": "from mutirao.deploy.flower import client_app\n\napp = client_app()\n",
}


def check_run(recipe: str, sets: Sequence[tuple[str, Scalar]], out: Path, resume: bool) -> None:
    """ConfigError if the folder, a setting, or the server's own data would end the run before its first round.

    Checked before submission, so that the error is printed here instead of in a log on the server.
    """
    found = find(recipe)
    config = resolve(found.config, {}, sets)
    check_folder(out, resume)
    if Folder(out).holds_run():
        config = reopen(recipe, out, list(sets))[1]
    try:
        found.prepare(config).higher_is_better  # noqa: B018  # raises for a monitor without a known direction
    except MutiraoError:
        raise
    except Exception as error:  # whatever reading data raises; the server's process would end by it
        raise ConfigError(f"the server cannot prepare {recipe}: {failure_of(error).reason}") from error


def check_folder(out: Path, resume: bool) -> None:
    """ConfigError if a run cannot be written to this folder."""
    if Folder(out).holds_run() and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
    if pid := writing_process(out):
        raise ConfigError(f"{out} is being written by process {pid}; wait for it, or choose another --out")
    there = next(place for place in (out, *out.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be written: {there} is no folder that this user may write to")


def absolute_paths(sets: Sequence[tuple[str, Scalar]]) -> list[tuple[str, Scalar]]:
    """Settings with existing relative paths made absolute: the server process runs in another folder."""

    def is_place(key: str, value: Scalar) -> bool:
        named = isinstance(value, str) and (
            "/" in value or (key == "data" and not (is_embedded(value) or value in NAMED))
        )
        return named and Path(str(value)).exists()

    absolute: list[tuple[str, Scalar]] = []
    for key, value in sets:
        if is_place(key, value):
            absolute.append((key, str(Path(str(value)).resolve())))
        else:
            absolute.append((key, value))
    return absolute


def writing_process(out: Path) -> int:
    """The process that writes a run folder, by the folder's lock file; 0 if there is none."""
    try:
        pid = int((out / ".lock").read_text(encoding="utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    if start_id(pid):
        return pid
    return 0


def submit(
    folder: Path,
    recipe: str,
    sets: Iterable[tuple[str, Scalar]] = (),
    out: Path | None = None,
    resume: bool = False,
    timeout: float = 600.0,
) -> str:
    """Start a run of a recipe on the server in `folder`; returns Flower's number of the run.

    The run continues by itself and writes `out` (by default `<folder>/runs/RECIPE`); it ends with `summary.json`.
    """
    server = load_server(folder)
    if not is_answering(server):
        raise MutiraoError(
            f"the SuperLink does not answer at {server.here}; start it with: mutirao site up {server.folder}"
        )
    for name, text in APP.items():
        if not (file := server.folder / "app" / name).exists() or file.read_text(encoding="utf-8") != text:
            write_whole(file, text)
    words = shlex.join(f"{key}={setting_text(value)}" for key, value in sets)
    where = str(run_folder(folder, recipe, out))
    config: dict[str, Scalar | None] = {"recipe": recipe, "set": words, "out": where, "resume": resume}
    config["timeout"] = float(timeout)
    with tempfile.TemporaryDirectory(prefix="mutirao-") as place:
        file = Path(place) / "run.toml"
        write_whole(file, "\n".join(toml_lines(config)) + "\n")
        done = run_flwr(
            server, "run", str(server.folder / "app"), "here", "--run-config", str(file), "--format", "json"
        )
    content: dict[str, Any] = {}
    try:
        content = json.loads(done.stdout[done.stdout.index("{") :])
        if done.returncode == 0 and content.get("run-id"):
            append_event(server.trail, "submitted", run=str(content["run-id"]), recipe=recipe, out=where, resume=resume)
            return str(content["run-id"])
    except ValueError:
        pass
    output = str(content.get("error-message") or done.stdout + done.stderr)
    raise MutiraoError(f"Flower did not accept the run: {' '.join(output.split())[:300]}")


def setting_text(value: Scalar) -> str:
    """A value as it stands behind `key=`: a text without quotes."""
    if isinstance(value, str):
        return value
    return write_value(value)


def run_folder(folder: Path, recipe: str, out: Path | None = None) -> Path:
    """Where a run is written: `out`, or `<folder>/runs/RECIPE`."""
    return (out or folder / "runs" / recipe.replace(":", "-").replace("/", "-")).resolve()


class RoundPrinter:
    """Passes each new round of a run's `history.csv` to `watch`, as one line."""

    def __init__(self, out: Path, since: float, watch: Callable[[str], None]) -> None:
        self.table = CsvTable(out / "history.csv")
        self.since = since
        self.watch = watch
        self.printed = 0

    def __call__(self, *_: Any) -> None:
        """Print the rounds since the last call."""
        if not is_newer(self.table.path, self.since):
            return
        rows = self.table.read()
        for row in rows[self.printed :]:
            shown = {k: v for k, v in row.items() if v and (k in SHOWN or "accuracy" in k)}
            self.watch(" ".join(f"{k}={short_number(v)}" for k, v in shown.items()))
        self.printed = max(self.printed, len(rows))


def follow(folder: Path, run: str, out: Path, since: float, seconds: float, watch: Callable[[str], None]) -> None:
    """Wait for the end of a submitted run; MutiraoError says why it failed. `watch` gets a line a round.

    The run folder has all that matters. Flower is polled as well, for a run that ends before it has a folder.
    """
    print_rounds = RoundPrinter(out, since, watch)
    deadline = time.monotonic() + seconds
    next_poll = time.monotonic() + POLL_FLOWER
    while True:
        # Checked before the table is read: the summary is written after the last round, so that no round is missed.
        ended = is_newer(out / "summary.json", since)
        print_rounds()
        if ended:
            return
        if reason := why_failed(out / "audit.jsonl", since):
            raise MutiraoError(f"the run failed: {reason}")
        if time.monotonic() > next_poll:
            status = status_of(folder, run)
            if status.startswith("finished") and not is_newer(out / "summary.json", since):
                if status == "finished:completed":
                    return  # there was nothing left to do
                if reason := why_failed(out / "audit.jsonl", since) or why_app_ended(folder, run):
                    raise MutiraoError(f"the run failed: {reason}")
                log = load_server(folder).logs / "superlink.log"
                raise MutiraoError(f"the run ended as {status}; see {log}")
            next_poll = time.monotonic() + POLL_FLOWER
        if time.monotonic() > deadline:
            raise MutiraoError(f"the run did not end within {seconds:g} s; see {out / 'run.log'}")
        time.sleep(0.3)


def why_app_ended(folder: Path, run: str) -> str:
    """Why the server process of a run ended, from its log, which Flower keeps; empty if the log has no error."""
    return last_error(run_flwr(load_server(folder), "log", run, "here", "--show").stdout)


def last_error(text: str) -> str:
    """The last line of the last traceback in a log, without the name of an error of ours.

    >>> last_error("Traceback (most recent call last):\\n  File x\\nValueError: no rows\\nERROR :  Exit Code: 201")
    'ValueError: no rows'
    """
    _, traceback, lines = text.rpartition("Traceback (most recent")
    found: list[tuple[str, str]] = re.findall(r"^([A-Za-z_][\w.]*): (.+)$", lines, re.MULTILINE)
    if not traceback or not found:
        return ""
    name, said = found[-1]
    if name.startswith("mutirao."):
        return said[:500]
    return f"{name}: {said}"[:500]


def status_of(folder: Path, run: str) -> str:
    """Flower's status of a run: `running`, `finished:completed`, `finished:failed`, ..."""
    done = run_flwr(load_server(folder), "list", "here", "--run-id", run, "--format", "json")
    try:
        return str(json.loads(done.stdout[done.stdout.index("{") :])["runs"][0]["status"])
    except (ValueError, LookupError, TypeError):
        return ""


def is_newer(path: Path, since: float) -> bool:
    """Whether a file was written after a moment."""
    try:
        return path.stat().st_mtime >= since
    except OSError:
        return False


def why_failed(trail: Path, since: float) -> str:
    """The reason of a failed run, from the last event of its audit trail; empty for any other."""
    if not is_newer(trail, since):
        return ""
    try:
        event = json.loads(trail.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):  # it is being written
        return ""
    if isinstance(event, dict) and event.get("event") == "failed":
        return str(event.get("reason", ""))
    return ""


def short_number(text: str) -> str:
    """A number with four significant digits."""
    if "." in text:
        return f"{float(text):.4g}"
    return text
