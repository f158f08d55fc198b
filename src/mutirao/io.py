"""Atomic writes of files, arrays on disk with checks for damage, and tables."""

import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError, Damaged

Arrays = dict[str, npt.NDArray[Any]]  # as in `mutirao.core.arrays`, which lies above
LOCK_POSITION = 2**31 - 2  # of a lock on Windows


def write_whole(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Replace a file in one step: readers and crashes see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with name_path_in_errors(path):
        try:
            with part.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                # On disk before the rename: otherwise a power failure could leave the name with half of the content.
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            replace_file(part, path)
        except OSError:
            # What did not fit must not fill the disk.
            part.unlink(missing_ok=True)
            raise


def replace_file(part: Path, path: Path) -> None:
    """Replace a file by another; on Windows, wait up to a second for readers of the old one."""
    for _ in range(50 if sys.platform == "win32" else 0):
        try:
            part.replace(path)
            return
        except PermissionError:
            time.sleep(0.02)
    part.replace(path)


def append_whole(path: Path, content: bytes) -> None:
    """Append bytes to a file; OSError if not all fit, where a plain write may write fewer without an error."""
    with name_path_in_errors(path), path.open("ab", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; on Windows folders cannot be flushed."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError, which a write does not have."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def lock(handle: int, path: Path) -> None:
    """Lock `path`, by an open file, until the process ends; the system frees the lock even after a kill."""
    try:
        if sys.platform == "win32":
            import msvcrt

            # The locked byte is beyond the end of any file, since it cannot be read by others.
            os.lseek(handle, LOCK_POSITION, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"{path} is in use by another process") from error


def plain_value(value: Any) -> Any:
    """A value as CSV and JSON can hold it: NumPy scalars become Python's, text stays on one line."""
    kind = type(value)
    if kind is int or kind is float:  # most cells of a table
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return " ".join(value.split())
    return value


def save_arrays(path: Path, arrays: Arrays, facts: Mapping[str, Any], durable: bool = True) -> int:
    """Write arrays and facts as one safetensors file; return its size."""
    from safetensors.numpy import save

    tidy = {k: np.asarray(v, order="C") for k, v in arrays.items()}
    content = save(tidy, {"mutirao": json.dumps(facts, sort_keys=True)})
    write_whole(path, content, durable)
    return len(content)


def load_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and facts of a file written by `save_arrays`; raises Damaged if it is anything else."""
    from safetensors.numpy import load

    try:
        content = path.read_bytes()
        arrays = load(content)
        # `load` returns arrays alone. The header with the facts is JSON, behind its length in eight bytes.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        facts = json.loads(header["__metadata__"]["mutirao"])
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} was not written by mutirao") from error
    except Exception as error:  # safetensors raises its own kinds for broken headers, and MemoryError for absurd ones
        raise Damaged(f"{path} is corrupt or truncated ({str(error).splitlines()[0][:100]})") from error
    if not isinstance(facts, dict):
        raise Damaged(f"{path} was not written by mutirao")
    return arrays, facts


BOM = b"\xef\xbb\xbf"  # how some Windows programs mark UTF-8


def read_text(path: Path, latin1: bool = False) -> str:
    """The text of a file; `latin1` if its publisher ships it in that encoding."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return decode_text(content.removeprefix(BOM), path, latin1=latin1)


def decode_text(content: bytes, where: Path, first: int = 1, latin1: bool = False) -> str:
    """Whole lines of a file as text, the first of which is line `first`."""
    if (zero := content.find(b"\0")) >= 0:
        raise ConfigError(f"{where}, line {line_at(content, zero, first)}: a zero byte: it is not a text file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if latin1:
            return content.decode("latin-1")
        line = line_at(content, error.start, first)
        byte = content[error.start]
        raise ConfigError(
            f"{where}, line {line}: byte 0x{byte:02x} is not UTF-8 text; right would be a file saved as UTF-8"
        ) from error


def line_at(content: bytes, at: int, first: int) -> int:
    """The line number of a byte."""
    return first + content.count(b"\n", 0, at)


def read_rows(text: str, where: Path, separator: str = ",") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table with the lines they end in; a carriage return ends a line as a line feed does."""
    reader = csv.reader(StringIO(text, newline=""), delimiter=separator)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{where}, line {reader.line_num}: {error}") from error


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table with a header, by column; blank lines are left out, missing cells are empty."""
    rows = read_rows(read_text(path), path)
    _, header = next(rows, (1, []))
    table = []
    for _, cells in rows:
        if cells:
            filled = cells + [""] * (len(header) - len(cells))
            table.append(dict(zip(header, filled, strict=False)))
    return table


def write_rows(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, one a line: a cell's own line breaks, carriage returns among them, become blanks."""
    return write_plain([plain_value(cell) for cell in row] for row in rows)


def write_plain(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV; their cells are `plain` already."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
