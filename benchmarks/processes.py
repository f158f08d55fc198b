"""Run one contender as a process: how long it takes, how much memory all its processes hold, and nothing left over.

Memory is the proportional set size (a page shared by n processes counts 1/n for each), summed over the process tree.
The harness adopts orphans of its children, so that daemons such as Ray's are seen, counted and ended too. Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.1  # seconds between two looks at the memory
SHARE = 0.02  # of the time that looking may take at most
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Finished:
    """What was seen of a process: when it started and ended (monotonic seconds), its peak memory, its words."""

    started: float
    ended: float
    peak_mb: float
    output: str
    errors: str
    status: int


class TookTooLong(Exception):
    """The process was ended because its time was up."""


def run(command: list[str], env: dict[str, str], folder: Path, timeout: float) -> Finished:
    """Run `command` to its end; whatever it started is ended with it, also if this is interrupted."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)
    others = descendants()
    output, errors = folder / "stdout.txt", folder / "stderr.txt"  # files: a daemon could keep a pipe open for ever
    try:
        with output.open("w") as out, errors.open("w") as err:
            started = time.monotonic()
            process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
            peak = watch(process, others, deadline=started + timeout)
            ended = time.monotonic()
            status = process.wait()
    finally:
        end(others)
    return Finished(started, ended, peak / 2**20, output.read_text(), errors.read_text(), status)


def watch(process: subprocess.Popen[bytes], others: set[int], deadline: float) -> int:
    """The largest memory seen until the process ends."""
    handle = os.pidfd_open(process.pid)
    peak, pause = 0, EVERY
    try:
        while not select.select([handle], [], [], pause)[0]:
            if time.monotonic() > deadline:
                raise TookTooLong
            before = time.perf_counter()
            peak = max(peak, sum(map(memory, descendants() - others)))
            pause = max(EVERY, (time.perf_counter() - before) / SHARE)
    finally:
        os.close(handle)
    return peak


def end(others: set[int], patience: float = 10.0) -> None:
    """End every descendant that was not there before: politely, then by force."""
    deadline = time.monotonic() + patience
    for sign in (signal.SIGTERM, signal.SIGKILL):
        asked: set[int] = set()
        while left := reaped(descendants() - others):
            for pid in left - asked:
                send(pid, sign)
            asked |= left
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break
            time.sleep(0.02)


def send(pid: int, sign: signal.Signals) -> None:
    """Signal a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def reaped(pids: Iterable[int]) -> set[int]:
    """Those that still run; adopted children that ended are taken off the process table."""
    running = set()
    for pid in pids:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                running.add(pid)
        except ChildProcessError:  # somebody else's child, who will look after it
            running.add(pid)
    return running


def descendants() -> set[int]:
    """All processes below this one."""
    parents = {int(path.name): parent_of(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def parent_of(process: Path) -> int:
    """The parent of a process, from its line of status; 0 if it just ended."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def memory(pid: int) -> int:
    """Bytes a process holds, shared pages counted in proportion; 0 if it just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
