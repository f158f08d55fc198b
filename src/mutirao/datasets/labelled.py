"""Load any labelled set by name or path: training samples, test samples, and their users if the set has any.

Images stay bytes, samples x channels x height x width, as they are published: networks convert them to floats, and
bytes need a quarter of the memory. Any other sample is a row of float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import load_name, nearest, one_line
from mutirao.core.arrays import digest, fingerprint
from mutirao.datasets import cifar, generated, idx
from mutirao.datasets.class_folders import (
    LAYOUT,
    ImageSet,
    read_image_folder,
    refuse_shared,
    require_same_classes,
    thumbnails,
)
from mutirao.datasets.digits import read_digits
from mutirao.datasets.image_layouts import GLOBAL_TEST, clients_in, read_train_test
from mutirao.datasets.leaf import is_leaf_folder, read_leaf
from mutirao.datasets.published import find_data, require_copy
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.registry import check_module, is_dotted

SYNTHETIC_SAMPLES = (10_000, 2_000)  # a fifth of CIFAR-10: enough to learn from in seconds
SIDE = 32  # pixels a side to which images of different sizes are resized
DIGEST_SAMPLES = 256  # samples of a set that enter its digest
HELD_OUT_SHARE = 0.2  # test share of a set without a test set, and validation share of the training set
EVALUATION_SPLITS = ("test", "vali")
EVALUATION_HELP = (
    "evaluate on: test, or vali, a fifth of the training samples, which is then not trained on (for tuning)"
)
FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
EMBEDDED = ("digits", "synthetic", "fcube", "synthetic-1-1")  # the last with any numbers, and synthetic-iid
DATA = "digits, synthetic, fcube, fashion-mnist or another name, a path, or package.module:function (docs/datasets.md)"
COARSE = "-coarse"  # after the name of a set with superclasses
NAMED = ("mnist", "fashion-mnist", "femnist", "cifar10", "cifar100", "cifar100-coarse")  # sets of arrays


@dataclass(frozen=True, eq=False)
class Labelled:
    """Training and test samples with their classes; `users` and `test_users` are the user of each sample, if known.

    A loader of your own, named `package.module:function` in `data`, returns one:

    >>> x, y = np.zeros((10, 4), np.float32), np.arange(10) % 2
    >>> Labelled(x[:8], y[:8], x[8:], y[8:], ("no", "yes")).shape
    (4,)
    """

    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[np.int64]
    x_test: npt.NDArray[Any]
    y_test: npt.NDArray[np.int64]
    names: tuple[str, ...]
    users: npt.NDArray[np.str_] | None = None
    test_users: npt.NDArray[np.str_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: its length, or channels, height and width."""
        return tuple(self.x_train.shape[1:])

    @cached_property
    def digest(self) -> str:
        """Digest of the set: its classes, all labels, and some of its samples."""
        return digest_of_set(self.names, self.x_train, self.y_train, self.y_test)


def digest_of_set(names: Sequence[str], x: npt.NDArray[Any], *labels: npt.NDArray[Any]) -> str:
    """sha256 over names, labels, the number of samples and their shape, and every n-th sample.

    Any difference between two sets shows in these, and sets of many gigabytes need no full read.
    """
    some = np.ascontiguousarray(x[:: max(1, len(x) // DIGEST_SAMPLES)])
    whole = {f"labels {k}": np.asarray(part) for k, part in enumerate(labels)} | {"some": some}
    return fingerprint([list(map(str, names)), list(x.shape), digest(whole)])


def is_embedded(data: str) -> bool:
    """Whether `data` is the name of a set that needs no files."""
    return data in EMBEDDED or generated.is_generated(data)


def is_arrays(data: str) -> bool:
    """Whether `data` is a set published as arrays, not as image files."""
    if is_embedded(data) or data in NAMED or is_dotted(data):
        return True
    path = Path(data).expanduser()
    if "\0" in data or not path.is_dir():
        return "\0" not in data and path.is_file() and path.suffix.lower() != ".csv"
    return any(
        holds(path) for holds in (idx.is_idx_folder, cifar.is_cifar10_folder, cifar.is_cifar100_folder, is_leaf_folder)
    )


def load_labelled(data: str, seed: int) -> Labelled:
    """Load a set by name or path; if it has no test set, a fifth is sampled by `seed`.

    >>> digits = load_labelled("digits", seed=0)
    >>> digits.x_train.shape, digits.x_test.shape, digits.names[:3]
    ((1437, 64), (360, 64), ('0', '1', '2'))
    """
    if data == "digits":
        return Labelled(*read_digits(seed), tuple(map(str, range(10))))
    if data == "synthetic":
        train = generated.synthetic(SYNTHETIC_SAMPLES[0], rng(seed, 0, "synthetic train"))
        test = generated.synthetic(SYNTHETIC_SAMPLES[1], rng(seed, 0, "synthetic test"))
        return Labelled(*train, *test, tuple(f"texture {c}" for c in range(10)))
    if generated.is_generated(data):
        return Labelled(*generated.generate(data, seed))
    if is_dotted(data):
        return call_loader(data, seed)
    path = require_copy(data.removesuffix(COARSE)) if data in NAMED else find_data(data)
    if not data or "\0" in data or not path.exists():
        known = (*EMBEDDED, *NAMED)
        raise ConfigError(
            f"data: there is no folder or file {data!r}, and no data set of that name{nearest(data, known)}"
        )
    if path.is_file() and path.suffix.lower() != ".csv":
        return read_one_pair(path, seed)
    if path.is_dir() and idx.is_idx_folder(path):
        return read_idx_folder(path, FASHION if "fashion" in path.name.lower() else ())
    if path.is_dir() and cifar.is_cifar10_folder(path):
        return Labelled(*cifar.read_cifar10(path))
    if path.is_dir() and cifar.is_cifar100_folder(path):
        return Labelled(*cifar.read_cifar100(path, coarse=data.endswith(COARSE)))
    if path.is_dir() and is_leaf_folder(path):
        return read_leaf_set(path)
    return read_classes(path, seed)


def call_loader(path: str, seed: int) -> Labelled:
    """Call a user's function, `package.module:name`, with a seed; it returns a `Labelled`, or four arrays.

    These are x and labels for training, then x and labels for the test; classes are numbered from 0.
    """
    check_module("data", path)
    make = load_name(path)
    try:
        found = make(seed)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"data: {path!r} fails: {one_line(error)}") from error
    if isinstance(found, Labelled):
        return found
    if not isinstance(found, tuple | list) or len(found) != 4:
        right = "a Labelled, or a tuple (x_train, y_train, x_test, y_test)"
        raise ConfigError(f"data: {path!r} gives a {type(found).__name__}; expected {right}")
    x, y, x_test, y_test = (np.asarray(part) for part in found)
    for inputs, labels in ((x, y), (x_test, y_test)):
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or len(inputs) != len(labels) or not len(labels):
            raise ConfigError(f"data: {path!r}: labels must be whole numbers, one for each sample, and at least one")
        if labels.min() < 0 or inputs.shape[1:] != x.shape[1:] or inputs.dtype.kind not in "fui":
            raise ConfigError(f"data: {path!r}: classes are numbered from 0, and all samples are numbers of one shape")
    kind = np.uint8 if x.dtype == np.uint8 else np.float32
    names = tuple(map(str, range(count_classes(path, y, y_test))))
    return Labelled(x.astype(kind), y.astype(np.int64), x_test.astype(kind), y_test.astype(np.int64), names)


def load_for_evaluation(data: str, seed: int, split: str) -> Labelled:
    """Load a set to evaluate on its test set, or on a fifth of its training set (`vali`)."""
    found = load_labelled(data, seed)
    if split == "test":
        return found
    return with_validation_set(found, rng(seed, 0, "validation"))


def with_validation_set(data: Labelled, draw: np.random.Generator) -> Labelled:
    """Replace the test set by a validation set: a fifth of each class of the training set, sampled at random."""
    x = data.x_train
    y = data.y_train
    sampled = []
    for label in range(len(data.names)):
        rows = draw.permutation(np.flatnonzero(y == label))
        sampled.append(rows[: round(HELD_OUT_SHARE * len(rows))])
    held_out = np.sort(np.concatenate(sampled))
    if not len(held_out):
        raise ConfigError("judge_by=vali: a fifth of each class's training samples is needed, and there are too few")
    rest = np.setdiff1d(np.arange(len(y)), held_out)
    made = Labelled(x[rest], y[rest], x[held_out], y[held_out], data.names)
    if data.users is None:
        return made
    return replace(made, users=data.users[rest], test_users=data.users[held_out])


def read_idx_folder(folder: Path, names: tuple[str, ...]) -> Labelled:
    """Read the four idx files of a folder."""
    train = idx.read_split(folder, "train")
    test = idx.read_split(folder, "test")
    if train is None or test is None:
        raise ConfigError(f"{folder} has no {'test' if train else 'training'} files; right would be {idx.LAYOUT}")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ConfigError(f"{folder}: images for training are {train[0].shape[1:]}, for the test {test[0].shape[1:]}")
    classes = count_classes(str(folder), train[1], test[1])
    if len(names) != classes:
        names = tuple(map(str, range(classes)))
    return Labelled(train[0][:, None], train[1], test[0][:, None], test[1], names)


def read_one_pair(images: Path, seed: int) -> Labelled:
    """Read an idx file of images with its labels beside it; a fifth is held out as the test set."""
    labels = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
    if labels == images or not labels.is_file():
        raise ConfigError(
            f"data: {images} is neither a table (CSV) nor an idx file ...-images-idx3-ubyte with its labels beside it"
        )
    x, y = idx.read_pair(images, labels)
    # A file without a test set: which samples are held out depends on the seed alone.
    order = rng(seed, 0, "test split").permutation(len(y))
    cut = max(1, round(HELD_OUT_SHARE * len(y)))
    if len(y) < 2:
        raise ConfigError(f"{images} has {len(y)} images; two are needed, one of them for the test")
    test = np.sort(order[:cut])
    train = np.sort(order[cut:])
    names = tuple(map(str, range(count_classes(str(images), y, y))))
    return Labelled(x[train, None], y[train], x[test, None], y[test], names)


def read_leaf_set(folder: Path) -> Labelled:
    """Read a set in LEAF's format, with the user of each sample."""
    train, test = read_leaf(folder)
    names = tuple(map(str, range(count_classes(str(folder), train.y, test.y))))
    return Labelled(train.x, train.y, test.x, test.y, names, train.users, test.users)


def read_classes(path: Path, seed: int, side: int = SIDE) -> Labelled:
    """Read images in class folders or listed in a table, resized to one size."""
    if path.is_dir() and (clients := clients_in(path)):
        parts = {p.name: read_image_folder(p) for p in clients}
        test = read_image_folder(path / GLOBAL_TEST)
        require_same_classes({GLOBAL_TEST: test.classes, **{name: part.classes for name, part in parts.items()}})
        for part in parts.values():
            refuse_shared(part, test)
        users = np.repeat(np.array(list(parts)), [len(part) for part in parts.values()])
        x = np.concatenate([thumbnails(part.files, side) for part in parts.values()])
        y = np.concatenate([part.labels for part in parts.values()])
        return Labelled(x, y, thumbnails(test.files, side), test.labels, test.classes, users)
    train, test = read_train_test(path, "", HELD_OUT_SHARE, derive_seed(seed, 0, "test split"))
    count_classes(str(path), train.labels, test.labels)
    train_users = known_users(train)
    return Labelled(
        thumbnails(train.files, side),
        train.labels,
        thumbnails(test.files, side),
        test.labels,
        train.classes,
        train_users,
        None if train_users is None else known_users(test),
    )


def known_users(pictures: ImageSet) -> npt.NDArray[np.str_] | None:
    """The user of each image, if a table says it."""
    users = pictures.laboratories
    if len(users) and (users != "").all():
        return users
    return None


def count_classes(where: str, *labels: npt.NDArray[np.int64]) -> int:
    """The number of classes: one more than the largest label."""
    classes = int(max(y.max() for y in labels)) + 1
    if classes < 2:
        raise ConfigError(f"{where} has a single class; two are needed")
    return classes


def check_labelled(path: Path | str | None) -> list[str]:
    """Describe what is at `path`, for `mutirao data check pictures PATH`: any format that can be read."""
    if path is None:
        raise ConfigError(f"pictures need a path: {LAYOUT}, or a table (CSV) with columns file and label")
    found = load_labelled(str(path), 0)
    kind = f"{found.x_train.dtype} of shape {' x '.join(map(str, found.shape))}"
    counts = np.bincount(np.concatenate([found.y_train, found.y_test]), minlength=len(found.names))
    lines = [f"{path}: {len(found.y_train):,} training samples, {len(found.y_test):,} test samples, {kind}"]
    lines.append("classes: " + ", ".join(f"{name} {count:,}" for name, count in zip(found.names, counts, strict=True)))
    if found.users is not None:
        lines.append(f"by {len(np.unique(found.users)):,} users: partition=natural makes each a client")
    return lines
