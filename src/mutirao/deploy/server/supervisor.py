"""See a deployed run through to its end: when its server process is gone, a new Flower run goes on in its folder."""

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mutirao.core.fleet import Scalar
from mutirao.deploy.layout import load_server
from mutirao.deploy.processes import is_answering, processes_of
from mutirao.deploy.server.submission import run_folder, submit, why_app_ended, writing_process
from mutirao.errors import MutiraoError
from mutirao.runs.execute import has_ended
from mutirao.runs.run_folder import Folder

log = logging.getLogger("mutirao")

START_TIMEOUT = 20.0  # seconds in which the process of a run that was taken must appear
PAUSE = 0.5


def supervise(
    folder: Path,
    recipe: str,
    sets: Iterable[tuple[str, Scalar]] = (),
    out: Path | None = None,
    timeout: float = 600.0,
    seconds: float = float("inf"),
    meanwhile: Callable[[Path], None] = lambda _: None,
) -> dict[str, Any]:
    """Submit a run and wait for its end; its summary, with how many Flower runs it took.

    A SuperLink that is away is waited for: whoever watches it starts it again. `meanwhile` is called again and again.
    A run that ends by its own fault, twice in the same round, is not tried a third time.
    """
    server = load_server(folder)
    place = run_folder(server.folder, recipe, out)
    settings, started, taken, deadline = list(sets), 0, -START_TIMEOUT, time.monotonic() + seconds
    number = ""  # Flower's, of the last run that was submitted
    rounds, stuck = int(dict(settings).get("rounds", 0)), list[tuple[int, str]]()
    while (done := finished_summary(place, rounds)) is None:
        if time.monotonic() > deadline:
            raise MutiraoError(f"the run in {place} did not end within {seconds:g} s")
        meanwhile(place)
        if is_running(place, server.folder) or (
            time.monotonic() - taken < START_TIMEOUT and not (place / ".lock").exists()
        ):
            time.sleep(PAUSE)
            continue
        if (failed := last_failure(place) or startup_failure(folder, place, number)) and failed not in stuck[-1:]:
            stuck.append(failed)
        elif failed and started:
            when = f"round {failed[0]} failed again and again" if failed[0] else "the run failed before its first round"
            raise MutiraoError(f"{when}: {failed[1]}")
        try:
            if is_answering(server):
                number = submit(folder, recipe, settings, place, resume=True, timeout=timeout)
                started, taken = started + 1, time.monotonic()
                wait_for_start(place, server.folder)
        except MutiraoError as error:
            log.warning("%s; trying again", error)
        time.sleep(PAUSE)
    meanwhile(place)
    return done | {"flower_runs": started}


def finished_summary(out: Path, rounds: int = 0) -> dict[str, Any] | None:
    """The summary of a run that has ended well, with so many rounds at least."""
    summary = Folder(out).summary() if (out / "summary.json").exists() else None
    return summary if summary is not None and has_ended(summary, rounds) else None


def is_running(out: Path, server: Path) -> bool:
    """Whether a process of this server has the run in its hands, or is about to."""
    return writing_process(out) != 0 or any("flwr-serverapp" in command_line(pid) for pid, _ in processes_of(server))


def command_line(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_for_start(out: Path, server: Path) -> None:
    """Wait until the process of a run that was just taken appears."""
    deadline = time.monotonic() + START_TIMEOUT
    while not is_running(out, server) and time.monotonic() < deadline and finished_summary(out) is None:
        time.sleep(PAUSE)


def last_failure(out: Path) -> tuple[int, str] | None:
    """The round and the reason, if the last thing that happened is that the run gave up."""
    last = Folder(out).audit.last if (out / "audit.jsonl").exists() else {}
    return (int(last["round"]), json.dumps(last.get("reason"))) if last.get("event") == "failed" else None


def startup_failure(folder: Path, out: Path, number: str) -> tuple[int, str] | None:
    """The reason, as round 0's, if a run that was submitted ended before it left anything in its folder."""
    if not number or Folder(out).holds_run():
        return None
    reason = why_app_ended(folder, number)
    return (0, reason) if reason else None
