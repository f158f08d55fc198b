"""Small labelled sets as files, in every form that can be read."""

import csv
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mutirao.datasets.idx import TYPES

CODES = {np.dtype(kind): code for code, kind in TYPES.items()}


def idx_of(array: np.ndarray) -> bytes:
    """A file with this array, as its form is described on MNIST's page."""
    kind = array.dtype.newbyteorder(">")
    head = struct.pack(">HBB", 0, CODES[kind], array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(kind).tobytes()


def write_four(folder: Path, train: int = 40, test: int = 10, packed: bool = True, classes: int = 10) -> np.ndarray:
    """The four files of a small set; returns the training images."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, first = np.random.default_rng(0), np.empty(0)
    for name, count in (("train", train), ("t10k", test)):
        x = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        y = (np.arange(count) % classes).astype(np.uint8)
        first = x if name == "train" else first
        for what, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y)):
            content = idx_of(array)
            file = folder / f"{name}-{what}{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(content) if packed else content)
    return first


def table(users: dict[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def writer(seed: int, count: int, classes: int = 5) -> tuple[list[Any], list[Any]]:
    """Pictures of 28 x 28 as LEAF writes them: pixels from 0 to 1, flat."""
    draw = np.random.default_rng(seed)
    return (draw.integers(0, 256, (count, 784)) / 255).tolist(), (np.arange(count) % classes).tolist()


def write_leaf(folder: Path, writers: int = 6, count: int = 10) -> Path:
    for side, offset, each in (("train", 0, count), ("test", 100, 4)):
        (folder / side).mkdir(parents=True)
        for half in (0, 1):
            names = {f"f{i:04d}_{i % 7}": writer(i + offset, each) for i in range(writers) if i % 2 == half}
            (folder / side / f"all_data_{half}.json").write_text(json.dumps(table(names)))
    return folder


def write_classes(root: Path, classes: tuple[str, ...] = ("bird", "cat"), count: int = 10, seed: int = 0) -> Path:
    """Pictures of unequal sizes, the classes apart in brightness."""
    draw = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.normal(60 + 120 * label, 20, (20 + i, 30, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def listed(root: Path, **more: str) -> list[dict[str, str]]:
    return [
        {"file": str(f.relative_to(root.parent)), "label": f.parent.name, **more} for f in sorted(root.rglob("*.png"))
    ]
