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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.ranking import blocks
from mutirao.ranking.parsing import Floats, Reader, widen

log = logging.getLogger("mutirao")

VERSION = 1  # of the cache
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


def build(file: Path, folder: Path, key: str, scan: Reader, threads: int) -> Arrays:
    """Read a file into a cache; it appears under its name only once it is whole. OSError: it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    part.mkdir()
    try:
        sink = OnDisk(part / "x.npy")
        with sink.stream:
            columns = blocks.read(file, scan, sink, threads)
            features = sink.finish(columns.width)
        if key != key_of(blocks.stat_of(file)):
            raise ConfigError(f"{file} was changed while it was read; try again once it is whole")
        facts = {"x": features}
        for name in ("grades", "queries", "query_ids"):
            value = getattr(columns, name)
            np.save(part / f"{name}.npy", value, allow_pickle=False)
            facts[name] = {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": _crc(value)}
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
        _remove_if_empty(folder)


def map_arrays(folder: Path) -> Arrays | None:
    """The arrays of a cache, mapped into memory, if all of it is there and nothing in it has changed."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = {}
        for name in ("x", "grades", "queries", "query_ids"):
            value = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            now = {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": _crc(value)}
            if now != facts[name]:
                raise ValueError(f"{name}.npy is not as it was written")
            arrays[name] = value
        return arrays
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a cache, it can be made again
        log.info("the cache %s is damaged and is made again: %s", folder, error)
        return None


def _crc(value: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


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


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # it is in use, as it should be
        return


class OnDisk:
    """Writes the features to x.npy as they come; only if later blocks are wider they are written a second time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = file.open("w+b")
        self.stream.write(_header((0, 0)))
        self.widths: list[int] = []
        self.rows: list[int] = []
        self.sum = 0

    def add(self, x: Floats) -> None:
        """Write these rows."""
        if not self.widths or self.widths[-1] != x.shape[1]:
            self.widths.append(x.shape[1])
            self.rows.append(0)
        self.rows[-1] += len(x)
        content = np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8).data
        self.sum = zlib.crc32(content, self.sum)
        self.stream.write(content)

    def finish(self, width: int) -> dict[str, Any]:
        """Complete the file; what it holds."""
        total = sum(self.rows)
        if self.widths != [width]:
            return self._widened(width).finish(width)
        self.stream.seek(0)
        self.stream.write(_header((total, width)))
        self.stream.close()
        return {"shape": [total, width], "dtype": "<f4", "crc32": self.sum}

    def _widened(self, width: int) -> "OnDisk":
        self.stream.close()
        narrow = self.file.rename(self.file.with_name("narrow.npy"))
        wide = OnDisk(self.file)
        step = max(1, blocks.BLOCK // (4 * width))
        with narrow.open("rb") as stream:
            stream.seek(len(_header((0, 0))))
            for own, rows in zip(self.widths, self.rows, strict=True):
                for at in range(0, rows, step):
                    many = min(step, rows - at)
                    x = np.frombuffer(stream.read(many * own * 4), "<f4").reshape(many, own)
                    wide.add(widen(x, width))
        narrow.unlink()
        return wide


def _header(shape: tuple[int, int]) -> bytes:
    """A header of the .npy format, version 1.0, whose length does not depend on the shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode("ascii") + b"\n"
