"""LEAF's json: samples by user, so that a federation's clients are the people who made them.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Read are sets whose samples are lists of numbers, such
as FEMNIST and Synthetic; of text (Shakespeare, Sent140, Reddit) and of file names (CelebA) none is.
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


class Part(NamedTuple):
    """One side's samples (pictures of bytes, samples x 1 x side x side, or rows of numbers), labels and users."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]
    users: npt.NDArray[np.str_]


def holds_leaf(folder: Path) -> bool:
    """Whether a folder looks like one of LEAF's."""
    return any(True for _ in (folder / "train").glob("*.json"))


def read_leaf(folder: Path) -> tuple[Part, Part]:
    """What users train on and what is only for the test.

    >>> for part in ("train", "test"):
    ...     Path("leaf", part).mkdir(parents=True)
    ...     users = {"ana": {"x": [[0.1, 0.2], [0.3, 0.4]], "y": [0, 1]}}
    ...     text = json.dumps({"users": ["ana"], "num_samples": [2], "user_data": users})
    ...     _ = Path("leaf", part, "data.json").write_text(text)
    >>> train, test = read_leaf(Path("leaf"))
    >>> train.y, train.users
    (array([0, 1]), array(['ana', 'ana'], dtype='<U3'))
    """
    sides = [_read_side(folder / name) for name in ("train", "test")]
    kept = {side[0].dtype for users in sides for side in users.values()}
    widths = {side[0].shape[1]: user for users in sides for user, side in users.items()}
    if len(widths) > 1:
        odd = ", ".join(f"{user!r} has {width} numbers a sample" for width, user in sorted(widths.items())[:3])
        raise ConfigError(f"{folder}: samples differ in length: {odd}")
    return _join(sides[0], len(kept) == 1), _join(sides[1], len(kept) == 1)


def _join(users: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]], alike: bool) -> Part:
    """All users of a side; pictures as such only if everybody's are."""
    x = np.concatenate([x if alike or x.dtype != np.uint8 else x / np.float32(255) for x, _ in users.values()])
    side = math.isqrt(x.shape[1])
    x = x.reshape(-1, 1, side, side) if x.dtype == np.uint8 else x
    whose = np.repeat(np.array(list(users)), [len(y) for _, y in users.values()])
    return Part(x, np.concatenate([y for _, y in users.values()]), whose)


def _read_side(folder: Path) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder} holds no *.json; right would be {LAYOUT}")
    found: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = {}
    for file in files:
        table = _parse(file)
        users, counts, data = (table.get(key) for key in ("users", "num_samples", "user_data"))
        if not isinstance(users, list) or not isinstance(data, dict) or not all(type(u) is str for u in users):
            raise ConfigError(f"{file} has no list 'users' with a table 'user_data', as LEAF's files have")
        if not isinstance(counts, list) or len(counts) != len(users):
            raise ConfigError(f"{file}: 'num_samples' does not say how many samples each of {len(users)} users has")
        for user, count in zip(users, counts, strict=True):
            if user in found:
                raise ConfigError(f"{file}: the user {user[:40]!r} is there twice")
            mine = data.get(user)
            found[user] = _samples(f"{file}: the user {user[:40]!r}", mine if isinstance(mine, dict) else {})
            if len(found[user][1]) != count:
                raise ConfigError(f"{file}: the user {user[:40]!r} has {len(found[user][1])} samples, not {count!r}")
    found = {user: samples for user, samples in found.items() if len(samples[1])}
    if not found:
        raise ConfigError(f"{folder} holds no samples; right would be {LAYOUT}")
    return found


def _parse(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"{file} has {size:,} bytes; files of at most {MOST_BYTES:,} are read: split it by users")
        table = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {one_line(error)[:120]}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file} holds a {type(table).__name__}, not LEAF's table of users")
    return table


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _samples(whose: str, table: dict[str, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """One user's samples, as bytes if they are pixels from 0 to 1, in steps of 1/255, of a square picture."""
    rows, labels = table.get("x"), table.get("y")
    if not isinstance(rows, list) or not isinstance(labels, list) or len(rows) != len(labels):
        raise ConfigError(f"{whose} has no lists 'x' and 'y' of the same length")
    if not rows:
        return np.empty((0, 0), np.float32), np.empty(0, np.int64)
    if not all(type(label) is int and 0 <= label < MOST_CLASSES for label in labels):
        raise ConfigError(f"{whose} has labels that are no classes from 0 to {MOST_CLASSES - 1}")
    if any(isinstance(row, str) or (isinstance(row, list) and any(isinstance(v, str) for v in row)) for row in rows):
        raise ConfigError(
            f"{whose} has text for samples; of LEAF's sets femnist and synthetic are read, "
            f"not shakespeare, sent140, reddit or celeba"
        )
    try:
        x = np.asarray(rows)
    except ValueError:  # lists of unequal length
        x = np.empty(0, object)
    if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise ConfigError(f"{whose} has samples that are no lists of finite numbers, all of one length")
    if np.abs(x).max() > np.finfo(np.float32).max:
        raise ConfigError(f"{whose} has samples with numbers too large to compute with")
    steps = x * 255.0
    square = x.shape[1] >= 49 and math.isqrt(x.shape[1]) ** 2 == x.shape[1]
    if square and steps.min() >= 0 and steps.max() <= 255 and np.abs(steps - np.rint(steps)).max() < 1e-3:
        return np.rint(steps).astype(np.uint8), np.array(labels, np.int64)
    return x.astype(np.float32), np.array(labels, np.int64)


def check_leaf(path: Path | str | None) -> list[str]:
    """What is found at `path`, for `mutirao data check leaf PATH`."""
    if path is None:
        raise ConfigError(f"leaf needs a path: {LAYOUT}")
    findings = []
    for name, part in zip(("train", "test"), read_leaf(Path(path)), strict=True):
        _, sizes = np.unique(part.users, return_counts=True)
        kind = (
            f"pictures of {part.x.shape[2]} x {part.x.shape[3]}" if part.x.ndim == 4 else f"rows of {part.x.shape[1]}"
        )
        findings.append(
            f"{Path(path) / name}: {len(part.y):,} {kind} by {len(sizes):,} users, {sizes.min():,} to {sizes.max():,} "
            f"each, labels 0 to {part.y.max()}"
        )
    return findings
