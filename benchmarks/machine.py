"""What the figures were taken on: they mean little without it."""

import os
import platform
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
