"""What was read of a ranking file, kept as arrays that are mapped into memory.

They lie beside the file, or in the user's cache folder if nothing may be written there, until the file's size or time
changes.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger("mutirao")

VERSION = 2  # of the cache
STALE = 3600.0  # seconds after which an unfinished cache has been given up
Arrays = dict[str, npt.NDArray[Any]]  # x, grades, queries, query_ids


def key_of(about: os.stat_result) -> str:
    """The name of a file's cache: another one for every change of the file."""
    return f"v{VERSION}-{about.st_size}-{about.st_mtime_ns}"


def places(file: Path) -> list[Path]:
    """Where what was read of a file may be kept, the best place first."""
    folders = [file.with_name(f"{file.name}.mutirao")]
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return folders
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    return [*folders, base / "mutirao" / "letor" / name]


def keep_arrays(arrays: Arrays, folder: Path, key: str) -> Arrays:
    """Put what was read into a cache, which appears under its name only once it is whole; OSError: it cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    try:
        part.mkdir()
        for name, value in arrays.items():
            np.save(part / f"{name}.npy", value, allow_pickle=False)
        facts = {name: _facts(value) for name, value in arrays.items()}
        (part / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        whole = folder / key
        try:
            part.rename(whole)
        except OSError:  # it is there: somebody else was faster, or it is damaged
            if map_arrays(whole) is None:
                if whole.is_dir():
                    shutil.rmtree(whole)
                else:
                    whole.unlink()
                part.rename(whole)
        found = map_arrays(whole)
        if found is None:
            raise OSError("it does not read back as it was written")
        _tidy(folder, key)
        return found
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # it is in use, as it should be
            folder.rmdir()


def map_arrays(folder: Path) -> Arrays | None:
    """The arrays of a cache, mapped into memory, if all of it is there and nothing in it has changed."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = {}
        for name in ("x", "grades", "queries", "query_ids"):
            value = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            if _facts(value) != facts[name]:
                raise ValueError(f"{name}.npy is not as it was written")
            arrays[name] = value
        return arrays
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a cache, it can be made again
        log.info("the cache %s is damaged and is made again: %s", folder, error)
        return None


def _facts(value: npt.NDArray[Any]) -> dict[str, Any]:
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": zlib.crc32(content)}


def _tidy(folder: Path, key: str) -> None:
    """Remove what was kept of earlier versions of the file, and what was never finished."""
    for child in folder.iterdir():
        old = re.fullmatch(r"v\d+-\d+-\d+", child.name) and child.name != key
        if child.name.startswith(".part-"):
            try:
                old = time.time() - child.stat().st_mtime > STALE
            except OSError:
                continue
        if old:
            shutil.rmtree(child, ignore_errors=True)
