"""Partition images among hospitals, and write a folder for each of them."""

import functools
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao import partitioning
from mutirao.datasets.class_folders import ImageSet, Rows
from mutirao.datasets.image_layouts import GLOBAL_TEST, read_train_test
from mutirao.datasets.tile_folders import copy_scale
from mutirao.errors import ConfigError


def even(labels: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Rows]:
    """Each class shuffled and distributed evenly; the remainder goes to the clients with the fewest images so far.

    >>> [len(p) for p in even([0, 0, 0, 0, 1, 1], 3, np.random.default_rng(0))]
    [2, 2, 2]
    """
    y = np.asarray(labels)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        shuffled = rng.permutation(np.flatnonzero(y == label))
        order = sorted(range(clients), key=lambda k: len(parts[k]))
        for i, row in enumerate(shuffled):
            parts[order[i % clients]].append(int(row))
    if not all(parts):
        raise ConfigError(f"{len(y)} pictures are too few for {clients} clients")
    return [np.sort(np.array(part, np.intp)) for part in parts]


def auto(labels: npt.ArrayLike, clients: int, rng: np.random.Generator, laboratories: npt.ArrayLike = ()) -> list[Rows]:
    """Each image to the client it belongs to, if that is known for all; else `even`.

    >>> [rows.tolist() for rows in auto([0, 1, 0], 2, np.random.default_rng(0), laboratories=["rio", "sul", "rio"])]
    [[0, 2], [1]]
    """
    known = np.asarray(laboratories).astype(bool)
    if known.size and known.all():
        return partitioning.natural(laboratories, clients, rng)
    return even(labels, clients, rng)


def by_laboratory(laboratories: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Rows]:
    """Each laboratory is a hospital; with fewer hospitals, whole laboratories are assigned to them.

    >>> [rows.tolist() for rows in by_laboratory(["rio", "sul", "rio"], 2, np.random.default_rng(0))]
    [[0, 2], [1]]
    """
    if not np.asarray(laboratories).astype(bool).all():
        raise ConfigError("partition=by_laboratory: not every picture's laboratory is known; name them in a table")
    return partitioning.by_key(laboratories, clients, rng)


def by_slide(slides: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Rows]:
    """Assign whole slides to hospitals, as evenly as possible; an image of an unknown slide counts as a slide.

    >>> parts = by_slide(["s1", "s1", "s2", "s3"], 2, np.random.default_rng(0))
    >>> sorted(len(rows) for rows in parts)  # no slide is at two hospitals
    [2, 2]
    """
    keys = np.array([s or f"unknown {i}" for i, s in enumerate(np.asarray(slides).tolist())])
    return partitioning.by_key(keys, clients, rng)


NAMES: dict[str, Callable[..., list[Rows]]] = {
    **{name: split for name, split in partitioning.NAMES.items() if name != "noise"},  # files cannot be changed
    "auto": auto,
    "even": even,
    "by_laboratory": by_laboratory,
    "by_slide": by_slide,
}


def partition_images(
    split: Callable[..., list[Rows]], pictures: ImageSet, clients: int, rng: np.random.Generator
) -> list[Rows]:
    """Call a partition function with the arguments that it takes."""
    arguments = {
        "labels": pictures.labels,
        "keys": pictures.slides,
        "slides": pictures.slides,
        "laboratories": pictures.laboratories,
        "owners": pictures.laboratories,
        "clients": clients,
        "rng": rng,
    }
    inner = split.func if isinstance(split, functools.partial) else split
    parameters = inspect.signature(inner).parameters
    if "owners" in parameters and not (pictures.laboratories != "").all():
        raise ConfigError(
            "partition=natural: it is unknown which client each picture belongs to; add column 'client' to the table"
        )
    return split(**{name: value for name, value in arguments.items() if name in parameters})


def write_client_folders(
    source: Path,
    out: Path,
    clients: int,
    split: Callable[..., list[Rows]],
    rng: np.random.Generator,
    seed: int,
    share: float = 0.2,
    slide: str = "",
) -> dict[str, int]:
    """Write `client_1/ .. client_k/` and `global_test/` from `Training/` and `Test/`, or from one folder of classes.

    Every client has a folder for every class, empty or not, so that all have the same class list. The folder appears
    complete or not at all. Returns the number of images of each client.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another --out")
    train, test = read_train_test(source, slide, share, seed)
    parts = partition_images(split, train, clients, rng)
    shares = {f"client_{k}": train.take(part) for k, part in enumerate(parts, 1)}
    shares[GLOBAL_TEST] = test
    building = out.with_name(f".{out.name}.part")
    if building.exists():
        shutil.rmtree(building)
    for name, images in shares.items():
        for folder in images.classes:
            (building / name / folder).mkdir(parents=True)
        for file, label in zip(images.files, images.labels, strict=True):
            shutil.copyfile(file, building / name / images.classes[label] / file.name)
    copy_scale(source, *(building / name for name in shares))
    if out.exists():
        out.rmdir()
    building.replace(out)
    return {name: len(images) for name, images in shares.items()}
