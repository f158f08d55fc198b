"""The workers of a study: a process a core, forked off one that has torch loaded; who dies takes its cell alone."""

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

from mutirao.training.cpu_cores import available_cores

Start = Literal["warm", "fork", "here"]
Do = Callable[[Any, Any], Any]  # of what all were handed, and an item

WARM = ["mutirao.studies.study", "mutirao.training.trainer"]  # what every cell imports, and torch with them


@dataclass(eq=False)
class PoolWorker:
    """A process of a crew, the line to it, and the item it is at."""

    process: Any
    line: Connection
    item: Any = None


class SequentialPool:
    """No workers: this process does one item after another."""

    def __init__(self, handed: Any) -> None:
        self.handed = handed

    def each(self, do: Do, items: Iterable[Any]) -> Iterator[tuple[Any, Any, str]]:
        """Items as they are done, each with the answer."""
        return ((item, do(self.handed, item), "") for item in items)


class WorkerPool:
    """Workers that do one item after another, each on its own core, and know what they were handed when they began.

    `fork` hands over any object. `warm` ones are forks, too, but of a process that has imported what all need and has
    no threads: theirs is the environment of this one. A place whose worker died gets another.
    """

    def __init__(self, cores: Iterable[int], start: Start, handed: Any) -> None:
        linux = sys.platform == "linux"  # elsewhere a fork of torch is not safe
        self.context: Any = get_context("fork" if start == "fork" else "forkserver" if linux else "spawn")
        if self.context.get_start_method() == "forkserver":
            start_forkserver()
        self.handed = handed
        self.over, self.alive = self.context.Pipe(duplex=False)
        self.workers: dict[int, PoolWorker | None] = dict.fromkeys(cores)

    def is_fork(self) -> bool:
        """Whether workers are copies of this very process."""
        return bool(self.context.get_start_method() == "fork")

    def each(self, do: Do, items: Iterable[Any]) -> Iterator[tuple[Any, Any, str]]:
        """Items as they are done, each with the answer; or with None, and how the worker that was at it ended."""
        waiting, busy = deque(items), list[PoolWorker]()
        while waiting or busy:
            for core in self.workers:
                if waiting and self.workers[core] not in busy:
                    busy.append(self.give(core, do, waiting.popleft()))
            for line in connection.wait([worker.line for worker in busy]):
                worker = next(worker for worker in busy if worker.line is line)
                busy.remove(worker)
                try:
                    answer, fault = worker.line.recv(), ""
                except (EOFError, OSError):
                    worker.process.join()
                    answer, fault = None, exit_reason(worker.process.exitcode)
                yield worker.item, answer, fault

    def give(self, core: int, do: Do, item: Any) -> PoolWorker:
        """Let the worker of a core begin with an item, or a new one if there is none."""
        worker = self.workers[core]
        if worker is None or not worker.process.is_alive():
            worker = self.workers[core] = self.hire(core)
        worker.item = item
        with contextlib.suppress(OSError):  # it died just now: its line says so, too
            worker.line.send((do, item))
        return worker

    def hire(self, core: int) -> PoolWorker:
        """A new worker."""
        line, theirs = self.context.Pipe()
        told = (theirs, core, self.over, self.alive if self.is_fork() else None, self.handed, dict(os.environ))
        process = self.context.Process(target=worker_loop, args=told)
        process.start()
        theirs.close()
        return PoolWorker(process, line)

    def dismiss(self) -> None:
        """End all workers at once, whatever they are at; they see it, as they do if this process is killed."""
        self.alive.close()
        for worker in self.workers.values():
            if worker is not None:
                worker.process.join()
                worker.line.close()
        self.over.close()


def start_forkserver() -> None:
    """Start the process that workers are forked off, if there is none yet; it ends with this one.

    Ctrl-C reaches it, too, which it must not take for itself while it imports.
    """
    from multiprocessing import forkserver, resource_tracker  # on Linux alone

    forkserver.set_forkserver_preload(WARM)
    resource_tracker.ensure_running()  # first: it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def open_pool(most: int, start: Start, handed: Any) -> Iterator[SequentialPool | WorkerPool]:
    """Workers with a core each, at most so many, for as long as the block lasts."""
    if start == "here":
        yield SequentialPool(handed)
        return
    crew = WorkerPool(available_cores()[:most], start, handed)
    try:
        yield crew
    finally:
        crew.dismiss()


def exit_reason(code: int | None) -> str:
    """What is known of a process that ended before it answered."""
    if code is None or code >= 0:
        return f"its process ended by itself, with code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"its process was killed ({name}){', as it happens where memory runs out' * (name == 'SIGKILL')}"


def worker_loop(
    line: Connection, core: int, over: Connection, alive: Connection | None, handed: Any, environment: dict[str, str]
) -> None:
    """Do what is asked on a core of its own, so that neither this worker nor torch takes another's."""
    if alive is not None:  # forked
        alive.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a bar's, whose lock a thread left behind may hold
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the study decides
    os.environ.clear()
    os.environ.update(environment)  # that of the process it was forked off may be older
    threading.Thread(target=end_with_study, args=(over,), daemon=True).start()
    with contextlib.suppress(AttributeError):  # not on every system
        os.sched_setaffinity(0, {core})
    with contextlib.suppress(EOFError):
        while True:
            do, item = line.recv()
            line.send(do(handed, item))


def end_with_study(over: Connection) -> None:
    """A worker whose study was stopped or killed must not go on alone: its end of the pipe is closed then."""
    connection.wait([over])
    os._exit(1)
