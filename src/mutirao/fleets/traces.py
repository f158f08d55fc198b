"""FedScale's traces of devices: how quick each was, and when it was there.

A trace is a pickled dictionary with an entry a device, as FedScale ships them (`client_device_capacity`,
`client_behave_trace`), or the same as JSON. A pickle can be a program: here it may hold dictionaries, lists, numbers
and text, and one that names anything else is refused before that is looked up.
"""

import functools
import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError

LARGEST = 2**30  # bytes of a trace
Intervals = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]  # from, until, and when it begins again


class Plain(pickle.Unpickler):
    """Reads a pickle of plain data alone: no class, no function, nothing to call."""

    def find_class(self, module: str, name: str) -> Any:
        """Refused, whatever it is."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refused: there is nothing outside the file."""
        raise pickle.UnpicklingError("it refers to what is not in it")


@functools.lru_cache(maxsize=4)
def read_entries(file: str, key: str) -> dict[str, Any]:
    """The entries of a trace by the device's name; `key` is the setting that names the file."""
    path = Path(file).expanduser()
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{key}: {file} is larger than a trace can be ({LARGEST} bytes)")
        content = path.read_bytes()
        held = json.loads(content) if content.lstrip()[:1] == b"{" else Plain(io.BytesIO(content)).load()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    except ConfigError:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise ConfigError(f"{key}: {file} is no plain FedScale trace: {error}; JSON of the same would do") from error
    if not isinstance(held, dict) or not held:
        raise ConfigError(f"{key}: {file} holds no dictionary with an entry a device")
    return {str(name): entry for name, entry in held.items()}


def capacities(file: str) -> tuple[list[ClientId], npt.NDArray[np.float64]]:
    """Devices and, of each, milliseconds a sample (of a forward pass) and kbit a second."""
    rows, entries = [], read_entries(file, "devices.file")
    for name, entry in entries.items():
        pair: Any = entry
        if isinstance(entry, Mapping):
            pair = entry.get("computation"), entry.get("communication")
        if not (is_list(pair) and len(pair) == 2 and all(is_number(x) and x > 0 for x in pair)):
            right = "numbers above 0 as 'computation' (ms a sample) and 'communication' (kbit/s)"
            raise ConfigError(f"devices.file: {file}, device {name[:40]!r} must have {right}")
        rows.append([float(x) for x in pair])
    return list(entries), np.array(rows)


@functools.lru_cache(maxsize=4)
def behaviours(file: str) -> dict[ClientId, Intervals]:
    """Devices and, of each, the seconds from and until which it is there, and after which all begins again."""
    out: dict[ClientId, Intervals] = {}
    for name, entry in read_entries(file, "available.file").items():
        held: Any = entry if isinstance(entry, Mapping) else {}
        since, until, end = (held.get(k) for k in ("active", "inactive", "finish_time"))
        listed = all(is_list(x) and all(map(is_number, x)) for x in (since, until))
        if not (listed and is_number(end) and end > 0):
            right = "lists of seconds as 'active' and 'inactive', and a 'finish_time' above 0"
            raise ConfigError(f"available.file: {file}, device {name[:40]!r} must have {right}")
        both = min(len(since), len(until))
        out[name] = np.array(since[:both], np.float64), np.array(until[:both], np.float64), float(end)
    return out


def is_there(intervals: Intervals, seconds: float) -> bool:
    """Whether a device is there at a time, which goes round and round."""
    since, until, end = intervals
    now = seconds % end
    return bool(((since <= now) & (now <= until)).any())


def is_list(value: object) -> bool:
    """Whether it is a sequence and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
