"""CIFAR-10 as its publisher ships it, and a stand-in for those who do not have it.

Images stay bytes at rest: 50,000 of them take 150 MB, as float32 they would take 600 MB.
"""

import hashlib
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.datasets.cifar_files import PIXELS, Images, Labels, pickled, records, unpickle
from mutirao.errors import ConfigError
from mutirao.io import read_text
from mutirao.randomness import rng as generator

log = logging.getLogger("mutirao")

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
PER_FILE = 10_000
MD5 = {  # of the six files of the binary version
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
LAYOUT = "a folder cifar-10-batches-bin (or cifar-10-batches-py) with data_batch_1 to 5 and test_batch"


class Cifar10(NamedTuple):
    """The two sets and the names of the classes."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    names: tuple[str, ...]


def read_cifar10(path: Path | str) -> Cifar10:
    """Read the binary or the Python version, from its folder or the folder above; both give the same arrays.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    >>> read_cifar10("nowhere")
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: there is no folder nowhere; right would be a folder cifar-10-batches-bin ...
    """
    folder, ending = locate(Path(path))
    batches = [_read(folder / f"{name}{ending}") for name in (*TRAIN, TEST)]
    x_train = np.concatenate([x for x, _ in batches[:-1]])
    y_train = np.concatenate([y for _, y in batches[:-1]])
    return Cifar10(x_train, y_train, *batches[-1], _names(folder))


def locate(path: Path) -> tuple[Path, str]:
    """The folder that holds the six files, and how their names end: `.bin`, or nothing for pickles."""
    if path.is_file():
        raise ConfigError(f"{path} is a file; right would be {LAYOUT}, unpacked")
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; right would be {LAYOUT}")
    for folder in (path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py"):
        for ending in (".bin", ""):
            there = [name for name in (*TRAIN, TEST) if (folder / f"{name}{ending}").is_file()]
            if len(there) == len(TRAIN) + 1:
                return folder, ending
            if there:
                missing = next(name for name in (*TRAIN, TEST) if name not in there)
                raise ConfigError(f"{folder / (missing + ending)} is missing; right would be {LAYOUT}")
    raise ConfigError(f"{path} does not hold CIFAR-10; right would be {LAYOUT}")


def holds_cifar10(path: Path) -> bool:
    """Whether one of the six files is there, in this folder or in one of the published names below it."""
    folders = (path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py")
    return any((f / f"{name}{end}").is_file() for f in folders for name in (*TRAIN, TEST) for end in (".bin", ""))


def check_cifar10(path: Path | str | None) -> list[str]:
    """What is found at `path`: how many images, of which classes, and whether the files are the published ones."""
    if path is None:
        raise ConfigError(f"cifar10 needs a path: {LAYOUT}")
    folder, ending = locate(Path(path))
    names = _names(folder)
    counts, differ = {}, []
    for name in (*TRAIN, TEST):
        x, y = _read(folder / f"{name}{ending}")
        counts[name] = np.bincount(y, minlength=len(names))
        # The pickles hold the same records as the binary files, so one list of sums serves both.
        records = np.concatenate([y[:, None].astype(np.uint8), x.reshape(len(x), PIXELS)], axis=1)
        if hashlib.md5(records.tobytes(), usedforsecurity=False).hexdigest() != MD5[name]:
            differ.append(f"{name}{ending}")
    findings = [f"{folder}: the {'binary' if ending else 'Python'} version"]
    for what, files in (("training", TRAIN), ("test", (TEST,))):
        per = np.sum([counts[name] for name in files], axis=0)
        each = f"{per.min():,}" if per.min() == per.max() else f"{per.min():,} to {per.max():,}"
        findings.append(f"{per.sum():,} {what} images of 3 x 32 x 32, {len(names)} classes, {each} a class")
    findings.append(f"classes: {', '.join(names)}")
    right = "MD5 of the records in all six files is as published"
    findings.append(f"MD5 of the records differs from the published one: {', '.join(differ)}" if differ else right)
    return findings


def _read(file: Path) -> tuple[Images, Labels]:
    """The images and labels of one of the six files."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    x, (y,) = records(file, content, 1) if file.suffix == ".bin" else pickled(file, content, "labels")
    if not len(y):
        raise ConfigError(f"{file} holds no images; a published file holds {PER_FILE:,}")
    if y.min() < 0 or y.max() >= len(NAMES):
        raise ConfigError(f"{file} has a label {y.max() if y.max() > 9 else y.min()}; those of CIFAR-10 are 0 to 9")
    if len(y) != PER_FILE:
        log.warning("%s holds %d images, the published file %d", file, len(y), PER_FILE)
    return x, y


def _names(folder: Path) -> tuple[str, ...]:
    """The class names as published; without the file that lists them, as everybody knows them."""
    text, packed = folder / "batches.meta.txt", folder / "batches.meta"
    if text.is_file():
        names = tuple(read_text(text).split())
    elif packed.is_file():
        found = unpickle(packed, packed.read_bytes())
        listed = found.get(b"label_names", found.get("label_names")) if isinstance(found, Mapping) else None
        names = tuple(v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in listed or ())
    else:
        return NAMES
    if len(names) != len(NAMES):
        raise ConfigError(f"{text if text.is_file() else packed} lists {len(names)} classes; CIFAR-10 has {len(NAMES)}")
    return names


@cache
def _patterns() -> npt.NDArray[np.float32]:
    """Ten smooth coloured textures, 3 x 32 x 32 with deviation 1, that wrap around at the edges."""
    draw = generator(0, 0, "cifar10 patterns")  # the same for everybody, so that two calls belong together
    fy, fx = np.meshgrid(np.fft.fftfreq(32) * 32, np.fft.fftfreq(32) * 32, indexing="ij")
    out = np.empty((10, 3, 32, 32), np.float32)
    for c in range(10):
        angle, waves = np.pi * (c % 5) / 5, (3.0, 5.5)[c // 5]  # five directions, coarse and fine
        near = [(fx - s * waves * np.cos(angle)) ** 2 + (fy - s * waves * np.sin(angle)) ** 2 for s in (1, -1)]
        band = np.exp(-near[0] / 1.6) + np.exp(-near[1] / 1.6)
        grey, *tints = np.fft.ifft2(np.fft.fft2(draw.standard_normal((4, 32, 32))) * band).real
        coloured = np.stack([grey + 0.4 * tint for tint in tints])
        out[c] = coloured / coloured.std()
    return out


def synthetic(samples: int, rng: np.random.Generator) -> tuple[Images, Labels]:
    """Generated pictures of CIFAR-10's shape: ten textures, equally often, no two the same.

    A picture is the texture of its class, moved anywhere and in changed colours, mixed with a fainter one of
    another class, over a smooth background and under noise. Since a texture may lie anywhere, the average
    pictures of the classes hardly differ: a linear model gets a quarter right, a small convolutional network
    80% after a few epochs of a few thousand, and none all of them.

    >>> x, y = synthetic(6, np.random.default_rng(0))
    >>> x.shape, x.dtype, y.dtype
    ((6, 3, 32, 32), dtype('uint8'), dtype('int64'))
    """
    if samples < 1:
        raise ConfigError(f"synthetic: {samples!r} samples are too few, at least 1 is needed")
    y = rng.permutation(np.arange(samples) % 10).astype(np.int64)
    x = np.empty((samples, 3, 32, 32), np.uint8)
    for start in range(0, samples, 500):  # in blocks: as floats the set would take several times its size
        here = y[start : start + 500]
        other = (here + rng.integers(1, 10, len(here))) % 10
        mixed = _moved(here, rng) + _uniform(rng, 0, 1, (len(here), 1, 1, 1)) * _moved(other, rng)
        mixed *= _uniform(rng, 0.6, 1, (len(here), 1, 1, 1))
        mixed += _background(len(here), rng)
        mixed += 0.6 * rng.standard_normal(mixed.shape, np.float32)
        x[start : start + 500] = np.clip(118 + 36 * mixed, 0, 255).astype(np.uint8)
    return x, y


def _uniform(rng: np.random.Generator, low: float, high: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return rng.uniform(low, high, shape).astype(np.float32)


def _moved(labels: Labels, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """The texture of each label, moved by any number of pixels, each channel stronger or weaker."""
    twice = np.tile(_patterns(), (1, 1, 2, 2))
    windows = np.moveaxis(np.lib.stride_tricks.sliding_window_view(twice, (32, 32), axis=(2, 3)), 1, 3)
    down, across = rng.integers(0, 32, (2, len(labels)))
    moved: npt.NDArray[np.float32] = windows[labels, down, across]
    moved *= _uniform(rng, 0.6, 1.4, (len(labels), 3, 1, 1))
    return moved


def _background(n: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A colour in each corner, and between them what lies between."""
    along = np.linspace(0, 1, 32, dtype=np.float32)
    ends = np.stack([1 - along, along])
    weights = (ends[:, None, :, None] * ends[None, :, None, :]).reshape(4, 32 * 32)
    return ((0.6 * rng.standard_normal((n * 3, 4), np.float32)) @ weights).reshape(n, 3, 32, 32)
