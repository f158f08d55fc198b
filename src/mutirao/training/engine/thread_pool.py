"""Threads that outlive a round, with one torch thread each; torch releases Python's lock while it computes."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mutirao.training.cpu_cores import core_count

# Parameters of glibc's mallopt.
MMAP_THRESHOLD = -3
TRIM_THRESHOLD = -1

Item = TypeVar("Item")
Result = TypeVar("Result")


def keep_freed_memory() -> None:
    """Keep freed memory for the next step: glibc would return large blocks and request them again.

    What was freed before, such as copies made while data were read, is given back.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to do
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def run_in_threads(workers: int, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results of `work` for each item, in order; `workers` = 0 means one per core."""
    return list(_pool(workers or core_count(), os.getpid()).map(work, items))


@functools.lru_cache(maxsize=8)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="mutirao", initializer=torch.set_num_threads, initargs=(1,))
