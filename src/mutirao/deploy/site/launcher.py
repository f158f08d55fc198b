"""`flwr-clientapp` in a hundredth of a second: hand the message to a process that has imported everything already.

A SuperNode starts this file, by its path and with Python's standard library alone, for every message. It passes its
arguments to the site's herald (`clientapp.py`), which forks a process for them. If there is no herald, or it says no,
this process becomes the ordinary client process, which starts one.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

MOST = 64 * 1024  # bytes of arguments
GREETING_TIMEOUT = 10.0  # seconds in which a herald or a worker says whether it is the right one
WORKER_OFF = {"off", "no", "false", "0"}  # values of MUTIRAO_WORKER, and of `worker` in a node's configuration


class WorkerDied(Exception):
    """Whoever should do the work went away before it answered, or cannot be trusted."""


def folder_of(parent: int) -> Path:
    """The folder of a SuperNode's herald and worker: nobody else may look into it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(str(base)) > 60:  # a socket's path has some hundred letters at most
        base = Path("/tmp")
    top = base / f"mutirao-{os.getuid()}"
    folder = top / f"{parent}-{start_ticks(parent)}"
    for place in (top, folder):
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if not place.is_dir() or place.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise WorkerDied(f"{place} is open to others")
    return folder


def start_ticks(pid: int) -> str:
    """When a process began, so that another one with its number is not taken for it; empty if it has ended."""
    with contextlib.suppress(OSError):
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return "" if state in "ZX" else rest[18]
    if not Path("/proc/self").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return "0"
    return ""


def same_user(link: socket.socket) -> bool:
    """Whether the process at the other end is ours; where the system cannot say, the folder's mode must do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def parent_in(words: list[str]) -> int:
    """The process that `--parent-pid` names, or else the one that started this one."""
    value = words[words.index("--parent-pid") + 1] if "--parent-pid" in words[:-1] else ""
    return int(value) if value.isdecimal() else os.getppid()


def delegate(words: list[str]) -> bool:
    """Whether the herald took the message: its new process says so itself, so that nobody does it twice."""
    with contextlib.suppress(OSError, WorkerDied), socket.socket(socket.AF_UNIX) as link:
        link.settimeout(GREETING_TIMEOUT)
        link.connect(str(folder_of(parent_in(words)) / "herald"))
        if same_user(link):
            socket.send_fds(link, [json.dumps(words).encode()], [1, 2])
            return link.recv(1) == b"1"
    return False


def main() -> None:
    """Hand over, or do it the long way."""
    words = sys.argv[1:]
    if os.environ.get("MUTIRAO_WORKER", "on").lower() in WORKER_OFF or not delegate(words):
        os.execv(sys.executable, [sys.executable, "-m", "mutirao.deploy.site.clientapp", *words])


if __name__ == "__main__":
    main()
