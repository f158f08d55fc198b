"""The CPU cores that this process may use, and torch limited to one thread without importing it."""

import contextlib
import os
import sys
from collections.abc import Iterator


def available_cores() -> list[int]:
    """The numbers of all cores that the system, a container or `taskset` allows; at least one."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return list(range(os.cpu_count() or 1))


def core_count() -> int:
    """The number of available cores."""
    return len(available_cores())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: results do not depend on the number of cores, and small models are faster.

    Nothing happens if torch has not been imported. The number of torch threads is set per thread.
    """
    torch = sys.modules.get("torch")
    before = 1
    # While another thread imports torch, the module is already there, but its functions may not be.
    if torch is not None and hasattr(torch, "get_num_threads"):
        before = torch.get_num_threads()
    if torch is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
