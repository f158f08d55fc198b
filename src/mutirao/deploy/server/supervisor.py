"""Supervise a deployed run until it ends: if its server process dies, a new Flower run resumes it in its folder."""

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
    """Submit a run and wait for its end; returns its summary, with the number of Flower runs it took.

    A SuperLink that does not answer is waited for: its service manager restarts it. `meanwhile` is called repeatedly.
    A run that fails twice in the same round is not tried a third time.
    """
    server = load_server(folder)
    place = run_folder(server.folder, recipe, out)
    settings = list(sets)
    deadline = time.monotonic() + seconds
    submissions = 0
    submitted_at = -START_TIMEOUT
    number = ""  # Flower's, of the last run that was submitted
    rounds = int(dict(settings).get("rounds", 0))
    failures: list[tuple[int, str]] = []
    seen_after = -1  # submissions when the last failure was seen
    while (done := finished_summary(place, rounds)) is None:
        if time.monotonic() > deadline:
            raise MutiraoError(f"the run in {place} did not end within {seconds:g} s")
        meanwhile(place)
        if is_running(place, server.folder) or (
            time.monotonic() - submitted_at < START_TIMEOUT and not (place / ".lock").exists()
        ):
            time.sleep(PAUSE)
            continue
        failed = last_failure(place) or startup_failure(folder, place, number)
        # Once for each submission: while the SuperLink is away, the same failure is seen again and again.
        if failed and seen_after != submissions:
            seen_after = submissions
            # Before the first submission it is a failure of the past, which is tried once more.
            if failed in failures[-1:]:
                when = "the run failed before its first round"
                if failed[0]:
                    when = f"round {failed[0]} failed repeatedly"
                raise MutiraoError(f"{when}: {failed[1]}")
            failures.append(failed)
        try:
            if is_answering(server):
                number = submit(folder, recipe, settings, place, resume=True, timeout=timeout)
                submissions += 1
                submitted_at = time.monotonic()
                wait_for_start(place, server.folder)
        except MutiraoError as error:
            log.warning("%s; trying again", error)
        time.sleep(PAUSE)
    meanwhile(place)
    return done | {"flower_runs": submissions}


def finished_summary(out: Path, rounds: int = 0) -> dict[str, Any] | None:
    """The summary of a run that ended successfully with at least so many rounds; None for any other."""
    if not (out / "summary.json").exists():
        return None
    summary = Folder(out).summary()
    if summary is not None and has_ended(summary, rounds):
        return summary
    return None


def is_running(out: Path, server: Path) -> bool:
    """Whether a process of this server works on the run, or is about to start."""
    return writing_process(out) != 0 or any("flwr-serverapp" in command_line(pid) for pid, _ in processes_of(server))


def command_line(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_for_start(out: Path, server: Path) -> None:
    """Wait until the process of a run that was just submitted appears."""
    deadline = time.monotonic() + START_TIMEOUT
    while not is_running(out, server) and time.monotonic() < deadline and finished_summary(out) is None:
        time.sleep(PAUSE)


def last_failure(out: Path) -> tuple[int, str] | None:
    """The round and the reason, if the last event of the audit trail is a failure."""
    if not (out / "audit.jsonl").exists():
        return None
    last = Folder(out).audit.last
    if last.get("event") == "failed":
        return (int(last["round"]), json.dumps(last.get("reason")))
    return None


def startup_failure(folder: Path, out: Path, number: str) -> tuple[int, str] | None:
    """The reason, with round 0, if a submitted run ended before it wrote anything to its folder."""
    if not number or Folder(out).holds_run():
        return None
    reason = why_app_ended(folder, number)
    if reason:
        return (0, reason)
    return None
