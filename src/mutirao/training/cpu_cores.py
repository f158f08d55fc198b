"""The CPU cores that this process may use, which limit the number of useful threads and processes."""

import os


def available_cores() -> list[int]:
    """The numbers of all cores that the system, a container or `taskset` allows; at least one."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return list(range(os.cpu_count() or 1))


def core_count() -> int:
    """The number of available cores."""
    return len(available_cores())
