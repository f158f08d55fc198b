"""Which cores this process may use: so many threads or processes are worth having."""

import os


def available_cores() -> list[int]:
    """The numbers of all cores that the system, a container or `taskset` leaves to this process; at least one."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return list(range(os.cpu_count() or 1))


def core_count() -> int:
    """How many those are."""
    return len(available_cores())
