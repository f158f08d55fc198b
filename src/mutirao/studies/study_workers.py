"""The worker processes of a study: one for each core, forked from a process with torch loaded.

A worker that dies loses only its own cell.
"""

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, Literal

from mutirao.core.cpu_threads import available_cores

Start = Literal["warm", "fork", "here"]
Do = Callable[[Any, Any], Any]  # (shared object, item) -> result

WARM = ["mutirao.studies.study", "mutirao.training.trainer"]  # what every cell imports, with torch


@dataclass(eq=False)
class PoolWorker:
    """A worker process, the pipe to it, and its current item."""

    process: Any
    line: Connection
    item: Any = None


class SequentialPool:
    """No workers: this process handles one item after another."""

    def __init__(self, handed: Any) -> None:
        self.handed = handed

    def each(self, do: Do, items: Iterable[Any]) -> Iterator[tuple[Any, Any, str]]:
        """Each item with its result."""
        return ((item, do(self.handed, item), "") for item in items)


class WorkerPool:
    """Worker processes that handle one item after another, each on its own core, with a shared object.

    With `fork`, it can be any object. With `warm`, workers are forked from a process without threads that has imported
    everything needed; they get this process's environment. A worker that dies is replaced.
    """

    def __init__(self, cores: Iterable[int], start: Start, handed: Any) -> None:
        # Elsewhere than on Linux, forking a process with torch is not safe.
        method = "spawn"
        if start == "fork":
            method = "fork"
        elif sys.platform == "linux":
            method = "forkserver"
        self.context: Any = get_context(method)
        if self.context.get_start_method() == "forkserver":
            start_forkserver()
        self.handed = handed
        self.over, self.alive = self.context.Pipe(duplex=False)
        self.workers: dict[int, PoolWorker | None] = dict.fromkeys(cores)

    def is_fork(self) -> bool:
        """Whether workers are copies of this very process."""
        return bool(self.context.get_start_method() == "fork")

    def each(self, do: Do, items: Iterable[Any]) -> Iterator[tuple[Any, Any, str]]:
        """(item, result, "") as items are finished; (item, None, reason) if the worker died."""
        waiting = deque(items)
        busy: list[PoolWorker] = []
        while waiting or busy:
            for core in self.workers:
                if waiting and self.workers[core] not in busy:
                    busy.append(self.give(core, do, waiting.popleft()))
            for line in connection.wait([worker.line for worker in busy]):
                worker = next(worker for worker in busy if worker.line is line)
                busy.remove(worker)
                fault = ""
                try:
                    answer = worker.line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    answer = None
                    fault = exit_reason(worker.process.exitcode)
                yield worker.item, answer, fault

    def give(self, core: int, do: Do, item: Any) -> PoolWorker:
        """Send an item to the worker of a core; a dead worker is replaced first."""
        worker = self.workers[core]
        if worker is None or not worker.process.is_alive():
            worker = self.workers[core] = self.start_worker(core)
        worker.item = item
        # If the worker died just now, reading from the pipe will report it.
        with contextlib.suppress(OSError):
            worker.line.send((do, item))
        return worker

    def start_worker(self, core: int) -> PoolWorker:
        """Start a new worker."""
        line, theirs = self.context.Pipe()
        alive = self.alive if self.is_fork() else None
        args = (theirs, core, self.over, alive, self.handed, dict(os.environ))
        process = self.context.Process(target=worker_loop, args=args)
        process.start()
        theirs.close()
        return PoolWorker(process, line)

    def close(self) -> None:
        """End all workers at once. They notice that the pipe is closed, as they do if this process is killed."""
        self.alive.close()
        for worker in self.workers.values():
            if worker is not None:
                worker.process.join()
                worker.line.close()
        self.over.close()


def start_forkserver() -> None:
    """Start the process that workers are forked from, if there is none yet; it ends with this one.

    Ctrl-C reaches it too, and must not interrupt its imports.
    """
    from multiprocessing import forkserver, resource_tracker  # on Linux alone

    forkserver.set_forkserver_preload(WARM)
    # The tracker is started before the signal is blocked, because its start unblocks SIGINT again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def open_pool(most: int, start: Start, handed: Any) -> Iterator[SequentialPool | WorkerPool]:
    """A pool of at most `most` workers with a core each, for the duration of the block."""
    if start == "here":
        yield SequentialPool(handed)
        return
    pool = WorkerPool(available_cores()[:most], start, handed)
    try:
        yield pool
    finally:
        pool.close()


def exit_reason(code: int | None) -> str:
    """Why a process ended without a result."""
    if code is None or code >= 0:
        return f"its process ended by itself, with code {code}"
    name = f"signal {-code}"
    if -code in {*signal.Signals}:
        name = signal.Signals(-code).name
    reason = f"its process was killed ({name})"
    # The kernel kills a process in this way when memory runs out.
    if name == "SIGKILL":
        reason += ", as it happens where memory runs out"
    return reason


def worker_loop(
    line: Connection, core: int, over: Connection, alive: Connection | None, handed: Any, environment: dict[str, str]
) -> None:
    """Handle items on a core of its own, so that neither this worker nor torch uses another."""
    if alive is not None:  # forked
        alive.close()
        # A progress bar replaces these streams, and a thread of the parent may hold its lock.
        sys.stdout = sys.__stdout__
        sys.stderr = sys.__stderr__
    # Ctrl-C goes to all processes of a terminal, but only the study handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The process that this one was forked from may have an older environment.
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=end_with_study, args=(over,), daemon=True).start()
    # Not every system has this function.
    with contextlib.suppress(AttributeError):
        os.sched_setaffinity(0, {core})
    with contextlib.suppress(EOFError):
        while True:
            do, item = line.recv()
            line.send(do(handed, item))


def end_with_study(over: Connection) -> None:
    """End this worker when its study is stopped or killed: the study's end of the pipe is closed then."""
    connection.wait([over])
    os._exit(1)
