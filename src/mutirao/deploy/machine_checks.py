"""Whether a machine has what training needs: room on its disk and in memory, and a graphics card that torch can use."""

import shutil
from collections.abc import Callable
from pathlib import Path

from mutirao.deploy.findings import Finding, measure

GIGABYTE = 2**30


def disk(folder: Path, free: Callable[[Path], int] | None = None) -> Finding:
    """Room for models, logs and trails."""
    left = free(folder) if free else shutil.disk_usage(folder).free
    text, remedy = f"{left / GIGABYTE:.1f} GB free", f"make room on the disk of {folder}"
    return measure("disk", left, GIGABYTE, 5 * GIGABYTE, text, remedy)


def memory(available: float | None = None) -> Finding:
    """Room for torch and the data."""
    left = available if available is not None else memory_left()
    if left is None:
        return Finding("memory", "skip", "cannot be told on this system")
    remedy = "end other programs, or give the machine more; torch alone takes half a gigabyte"
    return measure("memory", left, 0.5 * GIGABYTE, 2 * GIGABYTE, f"{left / GIGABYTE:.1f} GB available", remedy)


def memory_left() -> float | None:
    """Bytes that programs can still get: of the machine, or of the container if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = float(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        return left if most == "max" else min(left, float(most) - used)
    except (OSError, ValueError):
        return left


def gpu() -> Finding:
    """Whether torch can use the graphics card, if there is one."""
    try:
        import torch
    except ImportError:
        return Finding("gpu", "skip", "torch is not installed")
    used = "used by runs with device=auto or cuda"
    if torch.cuda.is_available():
        return Finding("gpu", "ok", f"{torch.cuda.get_device_name(0)}: {used}")
    if torch.backends.mps.is_available():
        return Finding("gpu", "ok", f"Apple's: {used.replace('cuda', 'mps')}")
    if not shutil.which("nvidia-smi"):
        return Finding("gpu", "ok", "none: training uses the processor")
    remedy = "install the torch that fits the driver, or in a container give it the device"
    return Finding("gpu", "warn", "there is an NVIDIA driver, and torch does not see the card", remedy)
