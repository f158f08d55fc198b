"""CIFAR-100 as its publisher ships it: a hundred classes, or the twenty kinds that they belong to."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mutirao.datasets.cifar_files import Images, Labels, pickled, records, unpickle
from mutirao.errors import ConfigError
from mutirao.io import read_text

log = logging.getLogger("mutirao")

FOLDERS = ("cifar-100-binary", "cifar-100-python")
SIDES = {"train": 50_000, "test": 10_000}
CLASSES = {"fine": 100, "coarse": 20}
LAYOUT = "a folder cifar-100-binary with train.bin and test.bin, or cifar-100-python with train, test and meta"


class Cifar100(NamedTuple):
    """The two sets and the names of the classes."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    names: tuple[str, ...]


def read_cifar100(path: Path | str, coarse: bool = False) -> Cifar100:
    """Read the binary or the Python version, from its folder or the folder above; both give the same arrays.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    >>> read_cifar100("nowhere")
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: nowhere does not hold CIFAR-100; right would be a folder cifar-100-binary ...
    """
    folder, ending = locate(Path(path))
    kind = "coarse" if coarse else "fine"
    (x, y), (x_test, y_test) = (_read(folder / f"{side}{ending}", kind) for side in SIDES)
    return Cifar100(x, y, x_test, y_test, _names(folder, kind))


def locate(path: Path) -> tuple[Path, str]:
    """The folder that holds both files, and how their names end: `.bin`, or nothing for pickles."""
    for folder in (path, *(path / name for name in FOLDERS)):
        for ending in (".bin", ""):
            if all((folder / f"{side}{ending}").is_file() for side in SIDES):
                return folder, ending
    raise ConfigError(f"{path} does not hold CIFAR-100; right would be {LAYOUT}")


def holds_cifar100(path: Path) -> bool:
    """Whether both files are there, in this folder or in one of the published names below it."""
    try:
        locate(path)
    except ConfigError:
        return False
    return True


def check_cifar100(path: Path | str | None) -> list[str]:
    """What is found at `path`: how many images, of which classes."""
    if path is None:
        raise ConfigError(f"cifar100 needs a path: {LAYOUT}")
    folder, ending = locate(Path(path))
    fine, coarse = read_cifar100(folder), read_cifar100(folder, coarse=True)
    findings = [f"{folder}: the {'binary' if ending else 'Python'} version"]
    for what, labels in (("training", fine.y_train), ("test", fine.y_test)):
        per = np.bincount(labels, minlength=len(fine.names))
        each = f"{per.min():,}" if per.min() == per.max() else f"{per.min():,} to {per.max():,}"
        findings.append(f"{per.sum():,} {what} images of 3 x 32 x 32, {len(per)} classes, {each} a class")
    return [*findings, f"kinds of classes: {', '.join(coarse.names)}"]


def _read(file: Path, kind: str) -> tuple[Images, Labels]:
    """The images of one side, and their labels of one kind."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if file.suffix == ".bin":
        x, (coarse, fine) = records(file, content, 2)
    else:
        x, (coarse, fine) = pickled(file, content, "coarse_labels", "fine_labels")
    if not len(x):
        raise ConfigError(f"{file} holds no images; the published file holds {SIDES[file.stem]:,}")
    for name, labels in (("coarse", coarse), ("fine", fine)):
        if labels.max() >= CLASSES[name]:
            raise ConfigError(
                f"{file} has a {name} label {labels.max()}; those of CIFAR-100 are 0 to {CLASSES[name] - 1}"
            )
    if len(x) != SIDES[file.stem]:
        log.warning("%s holds %d images, the published file %d", file, len(x), SIDES[file.stem])
    return x, coarse if kind == "coarse" else fine


def _names(folder: Path, kind: str) -> tuple[str, ...]:
    """The class names as published; without the file that lists them, their numbers."""
    text, packed = folder / f"{kind}_label_names.txt", folder / "meta"
    if text.is_file():
        names = tuple(read_text(text).split())
    elif packed.is_file():
        found, key = unpickle(packed, packed.read_bytes()), f"{kind}_label_names"
        listed = found.get(key.encode(), found.get(key)) if isinstance(found, Mapping) else None
        names = tuple(v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in listed or ())
    else:
        return tuple(map(str, range(CLASSES[kind])))
    if len(names) != CLASSES[kind]:
        where = text if text.is_file() else packed
        raise ConfigError(f"{where} lists {len(names)} {kind} classes; CIFAR-100 has {CLASSES[kind]}")
    return names
