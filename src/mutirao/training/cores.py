"""How many cores this process may use, which is how many threads or processes are worth having."""

import os


def cores() -> int:
    """All that the system, a container or `taskset` leaves to this process; at least one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
