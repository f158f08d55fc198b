"""Any labelled set by its name or path: what is trained on, what is held out, and whose samples they are if it says so.

Pictures stay bytes, samples x channels x height x width, as their publishers ship them: networks take them as numbers
from 0 to 1, and at rest they need a quarter of the memory. What is no picture is a row of float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import load_name, nearest, one_line
from mutirao.core.arrays import digest
from mutirao.core.digests import fingerprint
from mutirao.datasets import cifar, generated, idx
from mutirao.datasets.class_folders import LAYOUT, ImageSet, agree, read_image_folder, refuse_shared
from mutirao.datasets.digits import read_digits
from mutirao.datasets.image_files import thumbnails
from mutirao.datasets.image_layouts import GLOBAL_TEST, clients_in, read_both
from mutirao.datasets.leaf import holds_leaf, read_leaf
from mutirao.datasets.locations import find_data, require_copy
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.registry import check_module, is_dotted

SYNTHETIC_TRAIN, SYNTHETIC_TEST = 10_000, 2_000  # a fifth of CIFAR-10: enough to learn from, soon done
SIDE = 32  # pixels a side that pictures of different sizes are brought to
LOOKED_AT = 256  # samples of a set by which it is known
SHARE = 0.2  # held out where a set has no test part of its own, and of what is trained on where that is to judge
EVALUATION_SPLITS = ("test", "vali")
EVALUATION_HELP = (
    "which part judges: test, or vali, a fifth of the training samples that nobody trains on then (to tune by)"
)
FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
EMBEDDED = ("digits", "synthetic", "fcube", "synthetic-1-1")  # the last with any numbers, and synthetic-iid
DATA = "digits, synthetic, fcube, fashion-mnist or another name, a path, or package.module:function (docs/datasets.md)"
COARSE = "-coarse"  # after the name of a set that has classes of classes
NAMED = ("mnist", "fashion-mnist", "femnist", "cifar10", "cifar100", "cifar100-coarse")  # sets of arrays


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples and their classes, to train on and to judge by; `users` and `test_users` say whose each is, if known.

    A loader of one's own, named `package.module:function` in `data`, returns one:

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
        """That of one sample: a number of numbers, or channels, height and width."""
        return tuple(self.x_train.shape[1:])

    @cached_property
    def digest(self) -> str:
        """What the set is known by: its classes, all labels, and some of its samples."""
        return digest_of_set(self.names, self.x_train, self.y_train, self.y_test)


def digest_of_set(names: Sequence[str], x: npt.NDArray[Any], *labels: npt.NDArray[Any]) -> str:
    """sha256 over names, labels, the number of samples and their shape, and every so many-th sample.

    A set that is not the same shows in these, and one of many gigabytes is known at once.
    """
    some = np.ascontiguousarray(x[:: max(1, len(x) // LOOKED_AT)])
    whole = {f"labels {k}": np.asarray(part) for k, part in enumerate(labels)} | {"some": some}
    return fingerprint([list(map(str, names)), list(x.shape), digest(whole)])


def is_embedded(data: str) -> bool:
    """Whether `data` names a set that needs no files."""
    return data in EMBEDDED or generated.is_generated(data)


def is_arrays(data: str) -> bool:
    """Whether `data` names a set that is published as arrays, and no files of pictures."""
    if is_embedded(data) or data in NAMED or is_dotted(data):
        return True
    path = Path(data).expanduser()
    if "\0" in data or not path.is_dir():
        return "\0" not in data and path.is_file() and path.suffix.lower() != ".csv"
    return any(holds(path) for holds in (idx.holds_idx, cifar.holds_cifar10, cifar.holds_cifar100, holds_leaf))


def load_labelled(data: str, seed: int) -> Labelled:
    """The set that `data` names, or that lies at this path; where it has no test part a fifth is drawn by `seed`.

    >>> digits = load_labelled("digits", seed=0)
    >>> digits.x_train.shape, digits.x_test.shape, digits.names[:3]
    ((1437, 64), (360, 64), ('0', '1', '2'))
    """
    if data == "digits":
        return Labelled(*read_digits(seed), tuple(map(str, range(10))))
    if data == "synthetic":
        train = generated.synthetic(SYNTHETIC_TRAIN, rng(seed, 0, "synthetic train"))
        test = generated.synthetic(SYNTHETIC_TEST, rng(seed, 0, "synthetic test"))
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
    if path.is_dir() and idx.holds_idx(path):
        return read_published(path, FASHION if "fashion" in path.name.lower() else ())
    if path.is_dir() and cifar.holds_cifar10(path):
        return Labelled(*cifar.read_cifar10(path))
    if path.is_dir() and cifar.holds_cifar100(path):
        return Labelled(*cifar.read_cifar100(path, coarse=data.endswith(COARSE)))
    if path.is_dir() and holds_leaf(path):
        return read_users(path)
    return read_classes(path, seed)


def call_loader(path: str, seed: int) -> Labelled:
    """What a function of the user's own, `package.module:name`, gives for a seed: a `Labelled`, or its first arrays.

    These are x and labels to train on, then x and labels to judge by; classes are numbered from 0.
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
        raise ConfigError(f"data: {path!r} gives a {type(found).__name__}; right would be {right}")
    x, y, x_test, y_test = (np.asarray(part) for part in found)
    for inputs, labels in ((x, y), (x_test, y_test)):
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or len(inputs) != len(labels) or not len(labels):
            raise ConfigError(f"data: {path!r}: labels must be whole numbers, one for each sample, and not none")
        if labels.min() < 0 or inputs.shape[1:] != x.shape[1:] or inputs.dtype.kind not in "fui":
            raise ConfigError(f"data: {path!r}: classes are numbered from 0, and all samples are numbers of one shape")
    kind = np.uint8 if x.dtype == np.uint8 else np.float32
    names = tuple(map(str, range(count_classes(path, y, y_test))))
    return Labelled(x.astype(kind), y.astype(np.int64), x_test.astype(kind), y_test.astype(np.int64), names)


def load_for_evaluation(data: str, seed: int, judge_by: str) -> Labelled:
    """The set that `data` names, judged by its test part, or by a fifth of its training part (`vali`)."""
    found = load_labelled(data, seed)
    return found if judge_by == "test" else hold_out(found, rng(seed, 0, "validation"))


def hold_out(data: Labelled, draw: np.random.Generator) -> Labelled:
    """The set without its test part: a fifth of each class of the training part is drawn to judge by instead."""
    y = data.y_train
    rows = [draw.permutation(np.flatnonzero(y == label)) for label in range(len(data.names))]
    held = np.sort(np.concatenate([own[: round(SHARE * len(own))] for own in rows]))
    if not len(held):
        raise ConfigError("judge_by=vali: a fifth of each class's training samples would judge, and there are too few")
    rest = np.setdiff1d(np.arange(len(y)), held)
    x, users = data.x_train, data.users
    whose = (None, None) if users is None else (users[rest], users[held])
    return Labelled(x[rest], y[rest], x[held], y[held], data.names, *whose)


def read_published(folder: Path, names: tuple[str, ...]) -> Labelled:
    """The four idx files of a folder."""
    train, test = idx.read_images(folder, "train"), idx.read_images(folder, "test")
    if train is None or test is None:
        raise ConfigError(f"{folder} has no {'test' if train else 'training'} files; right would be {idx.LAYOUT}")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ConfigError(f"{folder}: images for training are {train[0].shape[1:]}, for the test {test[0].shape[1:]}")
    classes = count_classes(str(folder), train[1], test[1])
    named = names if len(names) == classes else tuple(map(str, range(classes)))
    return Labelled(train[0][:, None], train[1], test[0][:, None], test[1], named)


def read_one_pair(images: Path, seed: int) -> Labelled:
    """A file of images with its labels beside it; a fifth is held out."""
    labels = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
    if labels == images or not labels.is_file():
        raise ConfigError(
            f"data: {images} is neither a table (CSV) nor an idx file ...-images-idx3-ubyte with its labels beside it"
        )
    x, y = idx.read_pair(images, labels)
    order = rng(seed, 0, "test split").permutation(len(y))
    cut = max(1, round(SHARE * len(y)))
    if len(y) < 2:
        raise ConfigError(f"{images} has {len(y)} images; two are needed, one of them to judge by")
    held, rest = np.sort(order[:cut]), np.sort(order[cut:])
    names = tuple(map(str, range(count_classes(str(images), y, y))))
    return Labelled(x[rest, None], y[rest], x[held, None], y[held], names)


def read_users(folder: Path) -> Labelled:
    """A set of LEAF's, with the users whose samples they are."""
    train, test = read_leaf(folder)
    names = tuple(map(str, range(count_classes(str(folder), train.y, test.y))))
    return Labelled(train.x, train.y, test.x, test.y, names, train.users, test.users)


def read_classes(path: Path, seed: int, side: int = SIDE) -> Labelled:
    """Pictures in folders by class, or named in a table, brought to one size."""
    if path.is_dir() and (clients := clients_in(path)):
        parts = {p.name: read_image_folder(p) for p in clients}
        test = read_image_folder(path / GLOBAL_TEST)
        agree({GLOBAL_TEST: test.classes, **{name: part.classes for name, part in parts.items()}})
        for part in parts.values():
            refuse_shared(part, test)
        users = np.repeat(np.array(list(parts)), [len(part) for part in parts.values()])
        x = np.concatenate([thumbnails(part.files, side) for part in parts.values()])
        y = np.concatenate([part.labels for part in parts.values()])
        return Labelled(x, y, thumbnails(test.files, side), test.labels, test.classes, users)
    train, test = read_both(path, "", SHARE, derive_seed(seed, 0, "test split"))
    count_classes(str(path), train.labels, test.labels)
    return Labelled(
        *(thumbnails(train.files, side), train.labels, thumbnails(test.files, side), test.labels, train.classes),
        *(known_users(train), known_users(test) if known_users(train) is not None else None),
    )


def known_users(pictures: ImageSet) -> npt.NDArray[np.str_] | None:
    """Whose pictures they are, if a table says it."""
    whose = pictures.laboratories
    return whose if len(whose) and (whose != "").all() else None


def count_classes(where: str, *labels: npt.NDArray[np.int64]) -> int:
    """How many classes labels speak of: all from 0 to the largest."""
    classes = int(max(y.max() for y in labels)) + 1
    if classes < 2:
        raise ConfigError(f"{where} has a single class; two are needed")
    return classes


def check_labelled(path: Path | str | None) -> list[str]:
    """What is found at `path`, for `mutirao data check pictures PATH`: any form that can be read."""
    if path is None:
        raise ConfigError(f"pictures need a path: {LAYOUT}, or a table (CSV) with columns file and label")
    found = load_labelled(str(path), 0)
    kind = f"{found.x_train.dtype} of shape {' x '.join(map(str, found.shape))}"
    counts = np.bincount(np.concatenate([found.y_train, found.y_test]), minlength=len(found.names))
    lines = [f"{path}: {len(found.y_train):,} samples to train on, {len(found.y_test):,} to judge by, {kind}"]
    lines.append("classes: " + ", ".join(f"{name} {count:,}" for name, count in zip(found.names, counts, strict=True)))
    if found.users is not None:
        lines.append(f"by {len(np.unique(found.users)):,} users: partition=natural makes each a client")
    return lines
