"""Files in the idx format of MNIST and its successors, plain or gzipped.

A header gives type and lengths; the content is checked against it, and no more is read than it declares.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

# The third byte of a file is the type of its numbers, which are big-endian.
TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_BYTES = 4 << 30  # limit after unpacking; the largest published file has 550 MB
MOST_DIMENSIONS = 8
PAIRS = {"train": "train", "test": "t10k"}  # prefixes of the four files
LAYOUT = (
    "a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, plain or .gz"
)


def read_idx(path: Path) -> npt.NDArray[Any]:
    """Read the array in one file; ConfigError says what is wrong with it.

    >>> _ = Path("labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    >>> read_idx(Path("labels-idx1-ubyte"))
    array([7, 2, 1], dtype=uint8)
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            start = file.read(4)
            if len(start) < 4 or start[:2] != b"\0\0":
                raise ConfigError(f"{path} is not an idx file: it does not begin with two zero bytes and a type")
            kind = TYPES.get(start[2])
            dimensions = start[3]
            if kind is None:
                raise ConfigError(f"{path}: the type 0x{start[2]:02x} is not one of the idx format")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise ConfigError(f"{path}: {dimensions} dimensions; expected 1 to {MOST_DIMENSIONS}")
            head = file.read(4 * dimensions)
            shape = tuple(int(n) for n in np.frombuffer(head[: len(head) // 4 * 4], ">u4"))
            if len(shape) < dimensions:
                raise ConfigError(f"{path} ends within its header: it is truncated")
            wanted = math.prod(shape) * np.dtype(kind).itemsize
            if wanted > MOST_BYTES:
                raise ConfigError(f"{path}: its header declares {' x '.join(map(str, shape))} numbers: too many")
            # One byte more than the header declares, so that a longer file is noticed.
            content = _read(file, wanted + 1)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors are OSErrors
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) != wanted:
        there = f"only {len(content):,}"
        if len(content) > wanted:
            there = "more"
        raise ConfigError(f"{path}: its header declares {wanted:,} bytes, and there are {there}: it is damaged")
    return np.frombuffer(content, kind).reshape(shape)


def _read(file: Any, most: int) -> bytearray:
    """Read at most so many bytes in pieces, so that a wrong header costs no more memory than the file has bytes."""
    content = bytearray()
    while len(content) < most and (piece := file.read(min(most - len(content), 1 << 24))):
        content += piece
    return content


def find_idx(folder: Path, which: str, what: str) -> Path | None:
    """Find the images or labels of the training or test set in a folder, under one of the usual names."""
    ending = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}[what]
    for separator in ("-", "."):
        for suffix in ("", ".gz"):
            file = folder / f"{PAIRS[which]}-{what}{separator}{ending}{suffix}"
            if file.is_file():
                return file
    return None


def is_idx_folder(folder: Path) -> bool:
    """Whether a folder contains one of the four files."""
    return any(find_idx(folder, which, what) for which in PAIRS for what in ("images", "labels"))


def read_pair(images: Path, labels: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read images (bytes, samples x height x width) and their labels, which must be as many."""
    x = read_idx(images)
    y = read_idx(labels)
    if x.dtype != np.uint8 or x.ndim != 3 or 0 in x.shape:
        raise ConfigError(f"{images} has {x.dtype} of shape {x.shape}; images are bytes, samples x height x width")
    if y.ndim != 1 or y.dtype.kind not in "ui":
        raise ConfigError(f"{labels} has {y.dtype} of shape {y.shape}; labels are whole numbers, one a sample")
    if len(x) != len(y):
        raise ConfigError(f"{images} has {len(x):,} images but {labels.name} {len(y):,} labels")
    if y.min() < 0 or y.max() > 999:
        raise ConfigError(f"{labels} has a label {y.min() if y.min() < 0 else y.max()}; those of classes are 0 to 999")
    return x, y.astype(np.int64)


def read_split(folder: Path, which: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
    """Read the training or the test set of a folder; None if it has neither images nor labels."""
    images = find_idx(folder, which, "images")
    labels = find_idx(folder, which, "labels")
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        missing = "images" if images is None else "labels"
        raise ConfigError(f"{folder} has no file {PAIRS[which]}-{missing}-...; right would be {LAYOUT}")
    return read_pair(images, labels)


def check_idx(path: Path | str | None) -> list[str]:
    """Describe what is at `path`, for `mutirao data check idx PATH`: a folder, or one file."""
    if path is None:
        raise ConfigError(f"idx needs a path: {LAYOUT}")
    where = Path(path)
    if where.is_file():
        found = read_idx(where)
        return [f"{where}: {found.dtype.name} of shape {' x '.join(map(str, found.shape))}"]
    findings = []
    for which in PAIRS:
        if (pair := read_split(where, which)) is not None:
            x, y = pair
            classes = np.bincount(y)
            each = f"{classes[classes > 0].min():,} to {classes.max():,}"
            findings.append(
                f"{where}: {len(x):,} {which} images of {x.shape[1]} x {x.shape[2]}, labels 0 to {y.max()}, {each} each"
            )
    if not findings:
        raise ConfigError(f"{where} holds no idx files; right would be {LAYOUT}")
    return findings
