"""Run `mutirao` in this process as if it were on another system, as far as Python shows it; tests start this file.

    python elsewise.py win32 '[["run", "quickstart"], ["site", "up", "x"]]'

Packages of others are loaded first, since they are built for the system that is really there. Then what the other
system lacks is taken away, and what behaves otherwise there behaves so here. The answer is JSON: of each command the
exit code and what it said on stderr.
"""

import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import signal
import socket
import stat
import sys
import types
import warnings
from pathlib import Path
from typing import Any

OTHERS = (
    "asyncio concurrent.futures multiprocessing.connection multiprocessing.context "
    "multiprocessing.popen_spawn_posix multiprocessing.resource_tracker multiprocessing.synchronize subprocess "
    "tempfile importlib.metadata platform zoneinfo click numpy torch scipy.stats scipy.optimize scipy.sparse "
    "scipy.special scipy.cluster.hierarchy sklearn.datasets sklearn.cluster sklearn.metrics safetensors.numpy "
    "matplotlib.figure matplotlib.pyplot matplotlib.backends.backend_agg matplotlib.backends.backend_svg "
    "rich.console rich.progress rich.live rich.table fastapi fastapi.testclient uvicorn"
)
LACKS = {
    "win32": {
        os: "fork forkpty getuid geteuid getgid killpg getpgid setsid sched_getaffinity sched_setaffinity memfd_create"
        " mkfifo chown getloadavg nice sysconf statvfs uname",
        signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD pthread_sigmask setitimer alarm",
        socket: "AF_UNIX SO_PEERCRED send_fds recv_fds",
    },
    "darwin": {os: "sched_getaffinity sched_setaffinity memfd_create", socket: "SO_PEERCRED"},
}
MODULES = {"win32": ["fcntl", "resource", "pwd", "grp", "termios", "tty"], "darwin": []}


def become_windows() -> None:
    """What Windows has under the same names, and does in its own way."""
    kill, open_, fsync = os.kill, os.open, os.fsync
    pair, family = socket.socketpair, socket.AF_UNIX  # an event loop's own pair is made of other sockets there
    socket.socketpair = lambda *_: pair(family)

    def kill_there(pid: int, number: int) -> None:
        assert number, "signal 0 is Ctrl-C there"
        kill(pid, number)

    def open_there(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if os.path.isdir(path):  # noqa: PTH112 - any kind of path
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, flags, mode, **more)

    def fsync_there(handle: int) -> None:
        if not fcntl.fcntl(handle, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
            raise OSError(9, "Bad file descriptor")
        fsync(handle)

    def lock_there(handle: int, mode: int, bytes_: int) -> None:
        assert os.lseek(handle, 0, os.SEEK_CUR) >= os.fstat(handle).st_size, "nobody could read what is locked"
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def code_there(handle: int, code: Any) -> None:
        code._obj.value = 259 if os.path.exists(f"/proc/{handle}") else 0  # noqa: PTH110

    kernel = types.SimpleNamespace(
        OpenProcess=lambda access, inherit, pid: pid,
        GetExitCodeProcess=code_there,
        CloseHandle=lambda handle: None,
        GetLastError=lambda: 0,
    )
    os.kill, os.open, os.fsync = kill_there, open_there, fsync_there
    ctypes.windll = types.SimpleNamespace(kernel32=kernel)
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    vars(sys.modules["msvcrt"]).update(LK_NBLCK=2, locking=lock_there)
    assert stat.S_ISDIR(os.stat("/").st_mode)  # noqa: PTH116 - what was not taken away still works


def become(system: str, others: str = OTHERS) -> None:
    """Take away what a system lacks; text whose encoding is left to the system is an error from here on."""
    for name in others.split():
        importlib.import_module(name)
    if system == "win32":
        become_windows()
    for module, names in LACKS[system].items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = system
    warnings.filterwarnings("error", category=EncodingWarning, module="mutirao")


def look(folder: str) -> tuple[int, str]:
    """The first status that is not 200 of the live page over a folder, else 0; and what it lists."""
    from fastapi.testclient import TestClient

    from mutirao.dashboard.app import make_app

    app = make_app(Path(folder), "token", None)
    app.state.watcher.start()
    client = TestClient(app, headers={"X-Mutirao-Token": "token"})
    answers = [client.get(place) for place in ("/", "/api/runs")]
    app.state.watcher.stop()
    return next((a.status_code for a in answers if a.status_code != 200), 0), answers[-1].text


def call(words: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it said on stderr; `look FOLDER` opens the live page instead."""
    from mutirao.cli import main

    if words[0] == "look":
        return look(words[1])

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


if __name__ == "__main__":
    become(sys.argv[1])
    told = [call(words) for words in json.loads(sys.argv[2])]
    sys.stdout.flush()
    os.write(3, json.dumps(told).encode())
