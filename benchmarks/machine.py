"""What the figures were taken on: they mean little without it."""

import os
import platform
import resource
from datetime import date
from pathlib import Path


def describe() -> dict[str, object]:
    """Processor, cores, memory, system, and how busy it was with other things."""
    return {
        "date": date.today().isoformat(),
        "cpu": field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": cores(),
        "memory_gb": round(int(field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def field(path: str, name: str) -> str:
    """The first value of a field in one of the system's tables."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def peak_mb() -> float:
    """The most memory the process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb() -> float:
    """The memory the process has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def written() -> int:
    """Bytes that the process has handed to the system to write, to whatever file."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(lines["wchar"])
