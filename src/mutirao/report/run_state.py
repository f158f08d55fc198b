"""Whether a run is running, waiting, finished, failed or stopped, read from its folder without touching its lock."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutirao.runs.reader import Record


@dataclass(frozen=True)
class RunState:
    """How a run stands: `running`, `waiting`, `finished`, `failed`, `stopped` or `new`, why, and its process."""

    name: str
    why: str = ""
    resumed: bool = False
    pid: int = 0  # of the process at work, if it is on this machine and can be proven to be it


def state_in(record: Record) -> RunState:
    """The state of a run that was read."""
    resumed = any(e.get("event") == "resumed" for e in record.events)
    return state_of(record.path, record.events[-1] if record.events else {}, resumed)


def state_of(path: Path, last: dict[str, Any], resumed: bool = False) -> RunState:
    """The state of the run in `path` with the last audited event `last`."""
    event = str(last.get("event", ""))
    if event == "finished":
        return RunState("finished", resumed=resumed)
    pid, alive = holder(path)
    if alive:
        waits = waiting(path)
        return RunState("waiting" if waits else "running", waits, resumed, pid)
    if event == "failed":
        return RunState("failed", str(last.get("reason", "")), resumed)
    return RunState("stopped" if event else "new", resumed=resumed)


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
    if sys.platform == "win32":
        return 0, known_to_windows(number)
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return 0, False
    except OSError:
        # The process exists, but belongs to another user.
        return 0, True
    try:
        wanted = file.stat()
        for handle in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(handle.stat(), wanted):
                    return number, True
    except OSError:
        return 0, True
    return 0, False


def known_to_windows(pid: int) -> bool:
    """Whether a process of this number has not ended, on Windows; elsewhere signal 0 is used."""
    if sys.platform != "win32":
        return False
    # `os.kill` with signal 0, the usual test elsewhere, sends Ctrl-C on Windows.
    import ctypes

    kernel = ctypes.windll.kernel32
    code = ctypes.c_ulong()
    handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    if not handle:
        return bool(kernel.GetLastError() == 5)  # ERROR_ACCESS_DENIED: it is there, but not ours
    kernel.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel.CloseHandle(handle)
    return code.value == 259  # STILL_ACTIVE


def last_lines(path: Path, many: int) -> list[str]:
    """The last lines of a file, however long it is."""
    with path.open("rb") as file:
        # A log may be large: lines are assumed to have at most 200 bytes on average.
        file.seek(max(0, path.stat().st_size - 200 * many))
        return file.read().decode("utf-8", errors="replace").splitlines()[-many:]


def waiting(path: Path) -> str:
    """What a run at work is waiting for, or nothing: the last thing it said, if no round came after it."""
    log = path / "run.log"
    trail = path / "audit.jsonl"
    try:
        if log.stat().st_mtime < trail.stat().st_mtime:
            return ""
        lines = last_lines(log, 10)
    except OSError:
        return ""
    return "".join((lines or [""])[-1].partition("waiting up to ")[1:])
