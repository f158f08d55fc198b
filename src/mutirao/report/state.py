"""Whether a run is running, waiting, finished, failed or stopped, told from its folder without touching its lock."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class State:
    """The state of a run: `running`, `waiting`, `finished`, `failed`, `stopped` or `new`, why, and whose it is."""

    name: str
    why: str = ""
    resumed: bool = False
    pid: int = 0  # of the process at work, if it is on this machine and can be proven to be it


def state_of(path: Path, last: dict[str, Any], resumed: bool = False) -> State:
    """The state of the run in `path`, whose last audited event is `last`."""
    event = str(last.get("event", ""))
    if event == "finished":
        return State("finished", resumed=resumed)
    pid, alive = holder(path)
    if alive:
        waits = waiting(path)
        return State("waiting" if waits else "running", waits, resumed, pid)
    if event == "failed":
        return State("failed", str(last.get("reason", "")), resumed)
    return State("stopped" if event else "new", resumed=resumed)


def holder(path: Path) -> tuple[int, bool]:
    """The process that holds the folder, and whether it still does; its id is 0 where that cannot be proven.

    The lock file names the process. Where /proc is at hand it must also have that very file open: a folder
    from elsewhere, or a number that another process got since, must never point at an innocent one.
    """
    file = path / ".lock"
    try:
        host, pid = file.read_text(encoding="utf-8").split()
        number = int(pid)
    except (OSError, ValueError):
        return 0, False
    if host != socket.gethostname() or number <= 1:
        return 0, False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return 0, False
    except OSError:
        return 0, True  # it is there, but not ours
    handles = Path("/proc") / str(number) / "fd"
    if not handles.is_dir():
        return 0, True
    try:
        wanted = file.stat()
        for handle in handles.iterdir():
            try:
                found = handle.stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return number, True
    except OSError:
        return 0, True
    return 0, False


def waiting(path: Path) -> str:
    """What a run at work is waiting for, or nothing: the last thing it said, if no round came after it."""
    log, trail = path / "run.log", path / "audit.jsonl"
    try:
        if log.stat().st_mtime < trail.stat().st_mtime:
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2000))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    last = lines[-1] if lines else ""
    start = last.find("waiting up to ")
    return last[start:] if start >= 0 else ""
