"""One client per process: workers are forked once, and get models and samples through shared memory.

This helps when steps are so short that threads wait for Python's lock. A worker has the trainer as it was at the fork;
samples come with every request, because data may change. Linux only, and not after torch has used a GPU, which does not
survive a fork.
"""

import contextlib
import ctypes
import mmap
import os
import pickle
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import torch

from mutirao.core.cpu_threads import core_count
from mutirao.core.fleet import ClientId, Failure, Site, failure_of
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.threaded import Timed, clone_module, keep_freed_memory, run_in_threads
from mutirao.training.inputs import map_tensors, tensors_in
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.plain import PlainTrainer
from mutirao.training.samples import Samples

ALIGN = 64  # bytes: where arrays begin
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def fork_fault(jobs: Sequence[Job]) -> str:
    """Why forked workers cannot train these clients; empty if they can."""
    if sys.platform != "linux":
        return "processes are forked on Linux only"
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        return "torch cannot be forked where it may have used a GPU"
    if threading.current_thread() is not threading.main_thread():
        return "only a program's main thread can fork them"
    for job in jobs:
        if isinstance(job.samples.x, LazyInputs):
            return "its samples are read when needed, by the process that opened them"
        if not all(t.is_contiguous() for t in tensors_in(job.samples.x)):
            return "its samples are not contiguous"
    return ""


def train_processes(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Timed]:
    """Train each client in a process of its own; the outcome and the seconds it took."""
    idle = idle_workers(trainer)
    count = idle.qsize()

    def train(job: Job) -> Timed:
        worker = idle.get()
        began = time.perf_counter()
        try:
            x, y = job.samples.batch(slice(0, len(job.samples)))
            data = map_tensors(x, torch.Tensor.numpy), y.numpy()
            outcome, state = worker.do((job.request, job.client, data, job.site.state))
            job.site.state.clear()
            job.site.state.update(state)
        except TrainingProcessDied as error:
            worker = ForkedWorker(trainer)
            outcome = Failure("error", str(error))
        except Exception as error:  # what cannot be sent is this client's failure alone
            outcome = failure_of(error)
        finally:
            idle.put(worker)
        return outcome, time.perf_counter() - began

    longest = sorted(jobs, key=lambda job: (-sum(job.lengths), job.client))
    return {job.client: done for job, done in zip(longest, run_in_threads(count, train, longest), strict=True)}


def idle_workers(trainer: PlainTrainer) -> "queue.SimpleQueue[ForkedWorker]":
    """The queue of the trainer's workers, forked on first use and again in each process."""
    kept = trainer._cache.get("forks")
    if kept is None or kept[0] != os.getpid():
        trainer.thread_module()
        # Give back the memory that threads kept during the trial rounds.
        keep_freed_memory()
        idle: queue.SimpleQueue[ForkedWorker] = queue.SimpleQueue()
        for _ in range(trainer.workers or core_count()):
            idle.put(ForkedWorker(trainer))
        kept = trainer._cache["forks"] = os.getpid(), idle
    found: queue.SimpleQueue[ForkedWorker] = kept[1]
    return found


class TrainingProcessDied(Exception):
    """A worker process ended before it replied."""


class ForkedWorker:
    """A forked process that trains one client at a time."""

    def __init__(self, trainer: PlainTrainer) -> None:
        self.there = SharedBuffer()
        self.back = SharedBuffer()
        self.pipe, theirs = Pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run_training_worker(trainer, theirs, self.there, self.back, parent)
            finally:
                # Skip the parent's exit handlers and buffers, which the child has copies of.
                os._exit(0)
        theirs.close()
        self.end = weakref.finalize(self, kill_worker, self.pid, self.pipe, parent)

    def do(self, item: Any) -> Any:
        """The worker's result for an item: an outcome and the client's state."""
        try:
            self.pipe.send(self.there.put(item))
            return self.back.take(self.pipe.recv(), copy=True)
        except (EOFError, OSError) as error:
            self.end()
            raise TrainingProcessDied("the process that trained it ended") from error


def kill_worker(pid: int, pipe: Connection, parent: int) -> None:
    """End a worker process; only its own parent may do so."""
    if os.getpid() == parent:
        pipe.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_training_worker(
    trainer: PlainTrainer, pipe: Connection, there: "SharedBuffer", back: "SharedBuffer", parent: int
) -> None:
    """A worker's main loop; it ends with its parent and ignores interrupts, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    trainer._thread.module = clone_module(trainer, trainer.thread_module())
    while True:
        pipe.send(back.put(train_in_worker(trainer, *there.take(pipe.recv(), copy=False))))


def train_in_worker(trainer: PlainTrainer, request: Any, client: ClientId, data: Any, state: Any) -> tuple[Any, Any]:
    """Train one client; the outcome and the client's state afterwards."""
    site = Site(client, Samples(*data), {k: v.copy() for k, v in state.items()})
    try:
        return trainer.train(request, site), site.state
    except Exception as error:  # a client may raise anything: it is its own failure alone
        return failure_of(error), state


class BufferLayout(NamedTuple):
    """Where the parts of an object lie in a SharedBuffer."""

    pickled: bytes
    spans: list[tuple[int, int]]
    size: int


class SharedBuffer:
    """Shared memory through which one process hands objects to another; it grows as needed."""

    def __init__(self) -> None:
        self.file = os.memfd_create("mutirao")
        self.close = weakref.finalize(self, os.close, self.file)
        self.memory: mmap.mmap | None = None

    def put(self, thing: Any) -> BufferLayout:
        """Write an object: its arrays to the buffer, the rest into the layout."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(thing, protocol=5, buffer_callback=arrays.append)
        raw = [a.raw() for a in arrays]
        spans = []
        size = 0
        for each in raw:
            spans.append((size, each.nbytes))
            size += -(-each.nbytes // ALIGN) * ALIGN
        if size > os.fstat(self.file).st_size:
            os.ftruncate(self.file, size)
        memory = self._mapped(size)
        for (start, length), each in zip(spans, raw, strict=True):
            memory[start : start + length] = each
        return BufferLayout(pickled, spans, size)

    def take(self, note: BufferLayout, copy: bool) -> Any:
        """Read the object; without `copy` its arrays are views, valid until the next `put`."""
        memory = self._mapped(note.size)
        parts: list[Any] = [memory[start : start + length] for start, length in note.spans]
        return pickle.loads(note.pickled, buffers=map(bytearray, parts) if copy else parts)

    def _mapped(self, size: int) -> memoryview:
        if size and (self.memory is None or len(self.memory) < size):
            self.memory = mmap.mmap(self.file, os.fstat(self.file).st_size)
        if self.memory is not None:
            return memoryview(self.memory)
        return memoryview(b"")
