"""The golden files, and how outputs differ from them; figures are compared exactly on the same kind of machine only."""

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = Path(os.environ.get("MUTIRAO_GOLDEN", Path(__file__).parent / "files"))
TOLERANCE = 0.05  # of figures, on another kind of machine


def store(file: str, found: dict[str, Any]) -> list[str]:
    """Write a golden file, unless the case did not run."""
    if "error" in found:
        return [f"{file}: {found['error']}"]
    (FILES / file).write_text(as_text(found))
    return []


def as_text(found: dict[str, Any]) -> str:
    """JSON with a line for each row of a table and each kind of name, so that a diff shows what changed."""
    lines = []
    for key, value in sorted(found.items()):
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {compact(v)}" for k, v in sorted(value.items()))
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        elif isinstance(value, list):
            inner = ",\n".join(f"  {compact(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def compare(file: str, found: dict[str, Any]) -> list[str]:
    """How outputs differ from a golden file; where the machine is of another kind, digests are left out."""
    if not (FILES / file).exists():
        return [f"{file}: nothing is stored; run with --write"]
    stored = json.loads((FILES / file).read_text())
    found = json.loads(json.dumps(found))
    same_machine = stored.pop("machine", None) == found.pop("machine", None)
    if not same_machine:
        print(f"{file}: written on another kind of machine, so figures may differ a little and digests do")
    tolerance = 0.0 if same_machine else TOLERANCE
    return [f"{file}: {line}" for line in differences(stored, found, tolerance)]


def differences(was: Any, now: Any, tolerance: float, where: str = "") -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            if key == "digest" and tolerance:
                continue
            yield from differences(was.get(key), now.get(key), tolerance, f"{where}.{key}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was, now, strict=True)):
            yield from differences(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(was, list) and isinstance(now, list) and all(isinstance(item, str) for item in was + now):
        lost, new = sorted({*was} - {*now}), sorted({*now} - {*was})
        yield f"{where}: lost {lost}, new {new}"
    elif isinstance(was, float) and isinstance(now, float):
        if abs(was - now) > tolerance * max(1, abs(was)):
            yield f"{where}: was {was!r}, is {now!r}"
    elif was != now:
        yield f"{where}: was {was!r}, is {now!r}"


def machine() -> dict[str, str]:
    """What the last digits of a result depend on."""
    import numpy
    import torch

    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind += next((f" {line.partition(':')[2].strip()}" for line in lines if line.startswith("model name")), "")
    except OSError:  # not Linux
        kind += f" {platform.processor()}"
    return {"processor": kind, "torch": torch.__version__, "numpy": numpy.__version__}
