"""CIFAR-10 and CIFAR-100 as their publisher ships them: the binary version, or the pickles of the Python version.

Pickles are read without running code: only plain values and arrays of bytes are accepted. Images stay bytes: 50,000 of
them take 150 MB, as float32 they would take 600 MB.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import read_text

log = logging.getLogger("mutirao")

Images = npt.NDArray[np.uint8]  # samples x 3 x 32 x 32
Labels = npt.NDArray[np.int64]

PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_LAYOUT = "a folder cifar-10-batches-bin (or cifar-10-batches-py) with data_batch_1 to 5 and test_batch"
CIFAR10_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
IMAGES_PER_FILE = 10_000
MD5 = {  # of the six files of the binary version
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}

CIFAR100_LAYOUT = "a folder cifar-100-binary with train.bin and test.bin, or cifar-100-python with train, test and meta"
CIFAR100_FOLDERS = ("cifar-100-binary", "cifar-100-python")
CIFAR100_FILES = {"train": 50_000, "test": 10_000}  # and how many images each holds
CIFAR100_CLASSES = {"fine": 100, "coarse": 20}


class CifarData(NamedTuple):
    """Training and test images with their labels, and the names of the classes."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    names: tuple[str, ...]


# ---- CIFAR-10 --------------------------------------------------------------------------------------------------------


def read_cifar10(path: Path | str) -> CifarData:
    """Read the binary or the Python version, from its folder or the folder above; both give the same arrays.

    >>> read_cifar10("nowhere")
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: there is no folder nowhere; right would be a folder cifar-10-batches-bin ...
    """
    folder, suffix = find_cifar10(Path(path))
    batches = [read_cifar10_file(folder / f"{name}{suffix}") for name in (*TRAIN_FILES, TEST_FILE)]
    x_train = np.concatenate([x for x, _ in batches[:-1]])
    y_train = np.concatenate([y for _, y in batches[:-1]])
    return CifarData(x_train, y_train, *batches[-1], cifar10_class_names(folder))


def find_cifar10(path: Path) -> tuple[Path, str]:
    """Return the folder that contains the six files, and their suffix: `.bin`, or nothing for pickles."""
    if path.is_file():
        raise ConfigError(f"{path} is a file; right would be {CIFAR10_LAYOUT}, unpacked")
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; right would be {CIFAR10_LAYOUT}")
    for folder in (path, *(path / name for name in CIFAR10_FOLDERS)):
        for suffix in (".bin", ""):
            present = [name for name in (*TRAIN_FILES, TEST_FILE) if (folder / f"{name}{suffix}").is_file()]
            if len(present) == len(TRAIN_FILES) + 1:
                return folder, suffix
            if present:
                missing = next(name for name in (*TRAIN_FILES, TEST_FILE) if name not in present)
                raise ConfigError(f"{folder / (missing + suffix)} is missing; right would be {CIFAR10_LAYOUT}")
    raise ConfigError(f"{path} does not hold CIFAR-10; right would be {CIFAR10_LAYOUT}")


def is_cifar10_folder(path: Path) -> bool:
    """Whether one of the six files is in this folder, or in a folder of the published name below it."""
    for folder in (path, *(path / name for name in CIFAR10_FOLDERS)):
        for name in (*TRAIN_FILES, TEST_FILE):
            if (folder / f"{name}.bin").is_file() or (folder / name).is_file():
                return True
    return False


def check_cifar10(path: Path | str | None) -> list[str]:
    """Describe the copy at `path`: number of images, classes, and whether the files are the published ones."""
    if path is None:
        raise ConfigError(f"cifar10 needs a path: {CIFAR10_LAYOUT}")
    folder, suffix = find_cifar10(Path(path))
    names = cifar10_class_names(folder)
    labels: dict[str, Labels] = {}
    different = []
    for name in (*TRAIN_FILES, TEST_FILE):
        x, y = read_cifar10_file(folder / f"{name}{suffix}")
        labels[name] = y
        # The pickles hold the same records as the binary files, so one list of sums serves both.
        records = np.concatenate([y[:, None].astype(np.uint8), x.reshape(len(x), PIXELS)], axis=1)
        if hashlib.md5(records.tobytes(), usedforsecurity=False).hexdigest() != MD5[name]:
            different.append(f"{name}{suffix}")
    findings = [f"{folder}: the {version_name(suffix)} version"]
    findings.append(describe_labels("training", np.concatenate([labels[name] for name in TRAIN_FILES]), len(names)))
    findings.append(describe_labels("test", labels[TEST_FILE], len(names)))
    findings.append(f"classes: {', '.join(names)}")
    if different:
        findings.append(f"MD5 of the records differs from the published one: {', '.join(different)}")
    else:
        findings.append("MD5 of the records in all six files is as published")
    return findings


def read_cifar10_file(file: Path) -> tuple[Images, Labels]:
    """Read the images and labels of one of the six files."""
    content = read_file(file)
    if file.suffix == ".bin":
        x, (y,) = read_records(file, content, 1)
    else:
        x, (y,) = read_pickle(file, content, "labels")
    if not len(y):
        raise ConfigError(f"{file} holds no images; a published file holds {IMAGES_PER_FILE:,}")
    if y.min() < 0 or y.max() >= len(CIFAR10_CLASSES):
        raise ConfigError(f"{file} has a label {y.max() if y.max() > 9 else y.min()}; those of CIFAR-10 are 0 to 9")
    if len(y) != IMAGES_PER_FILE:
        log.warning("%s holds %d images, the published file %d", file, len(y), IMAGES_PER_FILE)
    return x, y


def cifar10_class_names(folder: Path) -> tuple[str, ...]:
    """Read the class names from the published file; without that file, return the usual names."""
    where = folder / "batches.meta.txt"
    packed = folder / "batches.meta"
    if where.is_file():
        names = tuple(read_text(where).split())
    elif packed.is_file():
        where = packed
        names = names_in_pickle(packed, "label_names")
    else:
        return CIFAR10_CLASSES
    if len(names) != len(CIFAR10_CLASSES):
        raise ConfigError(f"{where} lists {len(names)} classes; CIFAR-10 has {len(CIFAR10_CLASSES)}")
    return names


# ---- CIFAR-100 -------------------------------------------------------------------------------------------------------


def read_cifar100(path: Path | str, coarse: bool = False) -> CifarData:
    """Read 100 classes, or with `coarse` the 20 superclasses, from the binary or the Python version.

    >>> read_cifar100("nowhere")
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: nowhere does not hold CIFAR-100; right would be a folder cifar-100-binary ...
    """
    folder, suffix = find_cifar100(Path(path))
    kind = "coarse" if coarse else "fine"
    x, y = read_cifar100_file(folder / f"train{suffix}", kind)
    x_test, y_test = read_cifar100_file(folder / f"test{suffix}", kind)
    return CifarData(x, y, x_test, y_test, cifar100_class_names(folder, kind))


def find_cifar100(path: Path) -> tuple[Path, str]:
    """Return the folder that contains both files, and their suffix: `.bin`, or nothing for pickles."""
    for folder in (path, *(path / name for name in CIFAR100_FOLDERS)):
        for suffix in (".bin", ""):
            if all((folder / f"{name}{suffix}").is_file() for name in CIFAR100_FILES):
                return folder, suffix
    raise ConfigError(f"{path} does not hold CIFAR-100; right would be {CIFAR100_LAYOUT}")


def is_cifar100_folder(path: Path) -> bool:
    """Whether both files are in this folder, or in a folder of the published name below it."""
    try:
        find_cifar100(path)
    except ConfigError:
        return False
    return True


def check_cifar100(path: Path | str | None) -> list[str]:
    """Describe the copy at `path`: number of images, and classes."""
    if path is None:
        raise ConfigError(f"cifar100 needs a path: {CIFAR100_LAYOUT}")
    folder, suffix = find_cifar100(Path(path))
    fine = read_cifar100(folder)
    coarse = read_cifar100(folder, coarse=True)
    findings = [f"{folder}: the {version_name(suffix)} version"]
    findings.append(describe_labels("training", fine.y_train, len(fine.names)))
    findings.append(describe_labels("test", fine.y_test, len(fine.names)))
    findings.append(f"superclasses: {', '.join(coarse.names)}")
    return findings


def read_cifar100_file(file: Path, kind: str) -> tuple[Images, Labels]:
    """Read the images of one of the two files, and their labels of one kind: `fine` or `coarse`."""
    content = read_file(file)
    if file.suffix == ".bin":
        x, (coarse, fine) = read_records(file, content, 2)
    else:
        x, (coarse, fine) = read_pickle(file, content, "coarse_labels", "fine_labels")
    expected = CIFAR100_FILES[file.stem]
    if not len(x):
        raise ConfigError(f"{file} holds no images; the published file holds {expected:,}")
    found = {"coarse": coarse, "fine": fine}
    for name, labels in found.items():
        last = CIFAR100_CLASSES[name] - 1
        if labels.max() > last:
            raise ConfigError(f"{file} has a {name} label {labels.max()}; those of CIFAR-100 are 0 to {last}")
    if len(x) != expected:
        log.warning("%s holds %d images, the published file %d", file, len(x), expected)
    return x, found[kind]


def cifar100_class_names(folder: Path, kind: str) -> tuple[str, ...]:
    """Read the class names from the published file; without that file, return their numbers."""
    where = folder / f"{kind}_label_names.txt"
    packed = folder / "meta"
    if where.is_file():
        names = tuple(read_text(where).split())
    elif packed.is_file():
        where = packed
        names = names_in_pickle(packed, f"{kind}_label_names")
    else:
        return tuple(map(str, range(CIFAR100_CLASSES[kind])))
    if len(names) != CIFAR100_CLASSES[kind]:
        raise ConfigError(f"{where} lists {len(names)} {kind} classes; CIFAR-100 has {CIFAR100_CLASSES[kind]}")
    return names


# ---- files of both sets ----------------------------------------------------------------------------------------------


def version_name(suffix: str) -> str:
    """The publisher's name of the version with this suffix of its files."""
    if suffix:
        return "binary"
    return "Python"


def describe_labels(part: str, labels: Labels, classes: int) -> str:
    """One line about a part of a set: number of images, of classes, and of images in each class."""
    counts = np.bincount(labels, minlength=classes)
    each = f"{counts.min():,} to {counts.max():,}"
    if counts.min() == counts.max():
        each = f"{counts.min():,}"
    return f"{counts.sum():,} {part} images of 3 x 32 x 32, {len(counts)} classes, {each} a class"


def read_file(file: Path) -> bytes:
    """Read a whole file; ConfigError if that is not possible."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def read_records(file: Path, content: bytes, label_bytes: int) -> tuple[Images, list[Labels]]:
    """Parse the binary version: records of one or several label bytes, followed by the pixels."""
    size = label_bytes + PIXELS
    if len(content) % size:
        raise ConfigError(
            f"{file} has {len(content):,} bytes, not whole records of {size:,}: it is truncated or not CIFAR's "
            f"binary version"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    images = np.ascontiguousarray(rows[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, [rows[:, k].astype(np.int64) for k in range(label_bytes)]


def read_pickle(file: Path, content: bytes, *label_keys: str) -> tuple[Images, list[Labels]]:
    """Parse the Python version: the images, and the labels under each of the given keys."""
    found = unpickle(file, content)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}, not the dict of CIFAR's Python version")
    table = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    x = getattr(table.get("data"), "values", None)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        raise ConfigError(f"{file} has no 'data' of bytes, {PIXELS:,} an image, as CIFAR's Python version has")
    labels = [checked_labels(file, table.get(key), key, len(x)) for key in label_keys]
    return np.ascontiguousarray(x).reshape(-1, 3, 32, 32), labels


def checked_labels(file: Path, labels: Any, key: str, images: int) -> Labels:
    """The labels of a pickle as an array; ConfigError if they are no labels, or not one for each image."""
    if not isinstance(labels, list) or not all(type(v) is int and 0 <= v < 256 for v in labels):
        raise ConfigError(f"{file} has no {key!r}, numbers from 0 on, as CIFAR's Python version has")
    if len(labels) != images:
        raise ConfigError(f"{file} has {images:,} images but {len(labels):,} labels: it is damaged")
    return np.array(labels, np.int64)


def names_in_pickle(file: Path, key: str) -> tuple[str, ...]:
    """The class names that a pickle lists under a key; none if it does not."""
    found = unpickle(file, file.read_bytes())
    listed: Sequence[Any] | None = None
    if isinstance(found, Mapping):
        listed = found.get(key.encode(), found.get(key))
    return tuple(v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in listed or ())


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
        # A fresh function each time: a pickle may set attributes of what it is given.
        return lambda *values: make(*values)


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
