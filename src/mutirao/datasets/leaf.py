"""LEAF's JSON format: samples by user, so that each client can be one of the people who made them.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Supported are sets with lists of numbers as samples,
such as FEMNIST and Synthetic; sets of text (Shakespeare, Sent140, Reddit) or file names (CelebA) are not.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.config import one_line
from mutirao.errors import ConfigError

MOST_BYTES = 1 << 30  # of one file, which is parsed as a whole; LEAF writes about 100 MB into each
MOST_CLASSES = 1000
LAYOUT = "a folder with train/ and test/ of LEAF's *.json files (users, num_samples, user_data with x and y)"

Users = dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]  # samples and labels by user


class LeafPart(NamedTuple):
    """Samples (images of bytes, samples x 1 x side x side, or rows of numbers), labels and users."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]
    users: npt.NDArray[np.str_]


def is_leaf_folder(folder: Path) -> bool:
    """Whether a folder looks like a set in LEAF's format."""
    return any(True for _ in (folder / "train").glob("*.json"))


def read_leaf(folder: Path) -> tuple[LeafPart, LeafPart]:
    """Read the training and the test set.

    >>> for part in ("train", "test"):
    ...     Path("leaf", part).mkdir(parents=True)
    ...     users = {"ana": {"x": [[0.1, 0.2], [0.3, 0.4]], "y": [0, 1]}}
    ...     text = json.dumps({"users": ["ana"], "num_samples": [2], "user_data": users})
    ...     _ = Path("leaf", part, "data.json").write_text(text)
    >>> train, test = read_leaf(Path("leaf"))
    >>> train.y, train.users
    (array([0, 1]), array(['ana', 'ana'], dtype='<U3'))
    """
    train = read_user_samples(folder / "train")
    test = read_user_samples(folder / "test")
    kinds = set()
    widths: dict[int, str] = {}
    for users in (train, test):
        for user, (x, _) in users.items():
            kinds.add(x.dtype)
            widths[x.shape[1]] = user
    if len(widths) > 1:
        odd = ", ".join(f"{user!r} has {width} numbers a sample" for width, user in sorted(widths.items())[:3])
        raise ConfigError(f"{folder}: samples differ in length: {odd}")
    same_kind = len(kinds) == 1
    return join_users(train, same_kind), join_users(test, same_kind)


def join_users(users: Users, same_kind: bool) -> LeafPart:
    """Concatenate the users' samples; bytes become floats unless all users of both sets have the `same_kind`."""
    samples = []
    for values, _ in users.values():
        # An array has one type: if any user has floats, the bytes of the others become floats from 0 to 1 again.
        if values.dtype == np.uint8 and not same_kind:
            values = values / np.float32(255)
        samples.append(values)
    x = np.concatenate(samples)
    side = math.isqrt(x.shape[1])
    if x.dtype == np.uint8:
        x = x.reshape(-1, 1, side, side)
    owners = np.repeat(np.array(list(users)), [len(y) for _, y in users.values()])
    return LeafPart(x, np.concatenate([y for _, y in users.values()]), owners)


def read_user_samples(folder: Path) -> Users:
    """Read the samples of all users from the files of a folder; users without samples are left out."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder} holds no *.json; right would be {LAYOUT}")
    found: Users = {}
    for file in files:
        table = parse_json(file)
        users = table.get("users")
        counts = table.get("num_samples")
        data = table.get("user_data")
        if not isinstance(users, list) or not isinstance(data, dict) or not all(type(u) is str for u in users):
            raise ConfigError(f"{file} has no list 'users' with a table 'user_data', as LEAF's files have")
        if not isinstance(counts, list) or len(counts) != len(users):
            raise ConfigError(f"{file}: 'num_samples' does not say how many samples each of {len(users)} users has")
        for user, count in zip(users, counts, strict=True):
            if user in found:
                raise ConfigError(f"{file}: the user {user[:40]!r} is there twice")
            content = data.get(user)
            where = f"{file}: the user {user[:40]!r}"
            found[user] = user_samples(where, content if isinstance(content, dict) else {})
            if len(found[user][1]) != count:
                raise ConfigError(f"{file}: the user {user[:40]!r} has {len(found[user][1])} samples, not {count!r}")
    found = {user: samples for user, samples in found.items() if len(samples[1])}
    if not found:
        raise ConfigError(f"{folder} holds no samples; right would be {LAYOUT}")
    return found


def parse_json(file: Path) -> dict[str, Any]:
    """Parse one of LEAF's files; ConfigError says what is wrong with it."""
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"{file} has {size:,} bytes; files of at most {MOST_BYTES:,} are read: split it by users")
        table = json.loads(file.read_bytes(), parse_constant=refuse_constant)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {one_line(error)[:120]}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file} holds a {type(table).__name__}, not LEAF's table of users")
    return table


def refuse_constant(text: str) -> float:
    """Refuse NaN and infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{text} is no number")


def user_samples(where: str, table: dict[str, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """One user's samples; pixels of a square image, from 0 to 1 in steps of 1/255, become bytes."""
    rows = table.get("x")
    labels = table.get("y")
    if not isinstance(rows, list) or not isinstance(labels, list) or len(rows) != len(labels):
        raise ConfigError(f"{where} has no lists 'x' and 'y' of the same length")
    if not rows:
        return np.empty((0, 0), np.float32), np.empty(0, np.int64)
    if not all(type(label) is int and 0 <= label < MOST_CLASSES for label in labels):
        raise ConfigError(f"{where} has labels that are no classes from 0 to {MOST_CLASSES - 1}")
    if any(contains_text(row) for row in rows):
        raise ConfigError(
            f"{where} has text for samples; of LEAF's sets femnist and synthetic are read, "
            f"not shakespeare, sent140, reddit or celeba"
        )
    try:
        x = np.asarray(rows)
    except ValueError:  # lists of unequal length
        x = np.empty(0, object)
    if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise ConfigError(f"{where} has samples that are no lists of finite numbers, all of one length")
    if np.abs(x).max() > np.finfo(np.float32).max:
        raise ConfigError(f"{where} has samples with numbers too large to compute with")
    # FEMNIST's pixels are written as fractions k / 255. As bytes they take a quarter of the memory of float32.
    steps = x * 255.0
    square = x.shape[1] >= 49 and math.isqrt(x.shape[1]) ** 2 == x.shape[1]
    if square and steps.min() >= 0 and steps.max() <= 255 and np.abs(steps - np.rint(steps)).max() < 1e-3:
        return np.rint(steps).astype(np.uint8), np.array(labels, np.int64)
    return x.astype(np.float32), np.array(labels, np.int64)


def contains_text(row: Any) -> bool:
    """Whether a sample is a string, or a list with a string in it."""
    if isinstance(row, list):
        return any(isinstance(value, str) for value in row)
    return isinstance(row, str)


def check_leaf(path: Path | str | None) -> list[str]:
    """Describe what is at `path`, for `mutirao data check leaf PATH`."""
    if path is None:
        raise ConfigError(f"leaf needs a path: {LAYOUT}")
    findings = []
    for name, part in zip(("train", "test"), read_leaf(Path(path)), strict=True):
        _, sizes = np.unique(part.users, return_counts=True)
        kind = f"rows of {part.x.shape[1]}"
        if part.x.ndim == 4:
            kind = f"pictures of {part.x.shape[2]} x {part.x.shape[3]}"
        findings.append(
            f"{Path(path) / name}: {len(part.y):,} {kind} by {len(sizes):,} users, {sizes.min():,} to {sizes.max():,} "
            f"each, labels 0 to {part.y.max()}"
        )
    return findings
