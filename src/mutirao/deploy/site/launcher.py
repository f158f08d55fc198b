"""`flwr-clientapp` in a hundredth of a second: delegate the message to a fork server that has imported everything.

A SuperNode starts this file by its path, with Python's standard library alone, for every message. It passes its
arguments to the site's fork server (`clientapp.py`), which forks a process for them. Without a fork server this process
becomes the ordinary client process, which starts one.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

FORK_SERVER = "forkserver"  # the name of its socket
MOST = 64 * 1024  # bytes of arguments
GREETING_TIMEOUT = 10.0  # seconds in which a fork server or a worker must answer
WORKER_OFF = {"off", "no", "false", "0"}  # values of MUTIRAO_WORKER, and of `worker` in a node's configuration


class WorkerUnavailable(Exception):
    """The worker or fork server ended before it answered, or cannot be trusted."""


def folder_of(parent: int) -> Path:
    """The folder with the sockets of a SuperNode's fork server and worker, accessible to this user alone."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    # The path of a Unix socket has at most 108 bytes.
    if len(str(base)) > 60:
        base = Path("/tmp")
    top = base / f"mutirao-{os.getuid()}"
    folder = top / f"{parent}-{start_ticks(parent)}"
    for place in (top, folder):
        place.mkdir(mode=0o700, exist_ok=True)
        # In /tmp another user may have made it first, open to all or as a link to elsewhere.
        found = place.lstat()
        if not place.is_dir() or place.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise WorkerUnavailable(f"{place} is open to others")
    return folder


def start_ticks(pid: int) -> str:
    """When a process started, which distinguishes it from a later one with its id; empty if it has ended."""
    # Split after the name, which may hold spaces and brackets.
    with contextlib.suppress(OSError):
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        if state in "ZX":
            return ""
        return rest[18]
    if not Path("/proc/self").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return "0"
    return ""


def same_user(link: socket.socket) -> bool:
    """Whether the peer is a process of this user; otherwise the folder's mode protects the socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def parent_in(words: list[str]) -> int:
    """The process that `--parent-pid` names, or else the one that started this one."""
    if "--parent-pid" in words[:-1]:
        value = words[words.index("--parent-pid") + 1]
        if value.isdecimal():
            return int(value)
    return os.getppid()


def delegate(words: list[str]) -> bool:
    """Whether the fork server took the message; its new process confirms it, so that no message is handled twice."""
    with contextlib.suppress(OSError, WorkerUnavailable), socket.socket(socket.AF_UNIX) as link:
        link.settimeout(GREETING_TIMEOUT)
        link.connect(str(folder_of(parent_in(words)) / FORK_SERVER))
        if same_user(link):
            socket.send_fds(link, [json.dumps(words).encode()], [1, 2])
            return link.recv(1) == b"1"
    return False


def main() -> None:
    """Delegate the message, or become the client process."""
    words = sys.argv[1:]
    if os.environ.get("MUTIRAO_WORKER", "on").lower() in WORKER_OFF or not delegate(words):
        os.execv(sys.executable, [sys.executable, "-m", "mutirao.deploy.site.clientapp", *words])


if __name__ == "__main__":
    main()
