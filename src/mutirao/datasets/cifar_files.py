"""How CIFAR-10 and CIFAR-100 are written: records of bytes, or pickles, of which only plain values are read."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Images = npt.NDArray[np.uint8]  # samples x 3 x 32 x 32
Labels = npt.NDArray[np.int64]

PIXELS = 3 * 32 * 32


def records(file: Path, content: bytes, labels: int) -> tuple[Images, list[Labels]]:
    """The images of the binary version, and the labels of one or several kinds that stand before each."""
    size = labels + PIXELS
    if len(content) % size:
        raise ConfigError(
            f"{file} has {len(content):,} bytes, not whole records of {size:,}: it is truncated or not CIFAR's "
            f"binary version"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    images = np.ascontiguousarray(rows[:, labels:]).reshape(-1, 3, 32, 32)
    return images, [rows[:, k].astype(np.int64) for k in range(labels)]


def pickled(file: Path, content: bytes, *kinds: str) -> tuple[Images, list[Labels]]:
    """The images of the Python version, and the labels of the kinds asked for."""
    found = unpickle(file, content)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}, not the dict of CIFAR's Python version")
    table = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    x = getattr(table.get("data"), "values", None)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        raise ConfigError(f"{file} has no 'data' of bytes, {PIXELS:,} an image, as CIFAR's Python version has")
    out = []
    for kind in kinds:
        labels = table.get(kind)
        if not isinstance(labels, list) or not all(type(v) is int and 0 <= v < 256 for v in labels):
            raise ConfigError(f"{file} has no {kind!r}, numbers from 0 on, as CIFAR's Python version has")
        if len(labels) != len(x):
            raise ConfigError(f"{file} has {len(x):,} images but {len(labels):,} labels: it is damaged")
        out.append(np.array(labels, np.int64))
    return np.ascontiguousarray(x).reshape(-1, 3, 32, 32), out


class _Bytes:
    """Stands in for `numpy.dtype`, and is always uint8: a type made by a crafted state could crash NumPy."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        if name not in ("u1", b"u1", "|u1", "uint8"):
            raise pickle.UnpicklingError(f"an array of {name!r}")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands in for the array while it is unpickled; `values` is the real one."""

    values: Images

    def __setstate__(self, state: Any) -> None:
        _, shape, _, columns_first, content = state
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _array(content: Any, kind: _Bytes, shape: Any, order: str) -> _Array:
    """An array as pickles of protocol 5 have it."""
    made = _Array()
    made.__setstate__((1, shape, kind, order in ("F", b"F"), content))
    return made


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as Python 3 writes them into pickles of protocol 2."""
    return text.encode("latin-1")


# All that a pickle may name, and what it gets instead: nothing here can run code or touch NumPy's inside.
ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy.core.numeric", "_frombuffer"): _array,
    ("numpy._core.numeric", "_frombuffer"): _array,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """Reads numbers, text, lists, dicts and arrays of bytes; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        make = ALLOWED[module, name]
        return lambda *values: make(*values)  # a fresh one each time: a pickle may write to what it is given


def unpickle(file: Path, content: bytes) -> Any:
    """What a pickle of numbers, text, lists, dicts and arrays of bytes holds; one with anything else is refused."""
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{file} is refused: it asks for {str(error)[:80]!r}, which CIFAR's Python version has no need of; "
            f"get the set from its publisher"
        ) from error
    except Exception as error:  # a broken pickle may end in almost any kind
        raise ConfigError(f"{file} is truncated, or not a file of CIFAR's Python version") from error
