"""Sources of images: each client's images and the common test set, from folders or a table, and their partition.

A folder of classes or a table is split here, and `Training/` is partitioned among clients. Folders `client_*/` and
`global_test/` are already a federation: each site needs only its own folder, or its own rows of a table.
"""

import functools
import inspect
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao import partitioning
from mutirao.config import build
from mutirao.datasets.class_folders import (
    ImageSet,
    Rows,
    class_folders,
    concatenate_image_sets,
    read_image_folder,
    refuse_shared,
    require_same_classes,
)
from mutirao.datasets.image_layouts import (
    GLOBAL_TEST,
    TEST,
    TRAINING,
    GroupRows,
    clients_in,
    read_csv_listing,
    read_train_test,
    ungrouped,
)
from mutirao.datasets.tile_folders import copy_scale
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng


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


@dataclass(frozen=True)
class Sources:
    """Each client's images and the common test set, read when first used, and the classes."""

    hospitals: Mapping[str, Callable[[], ImageSet]]
    test: Callable[[], ImageSet]
    classes: tuple[str, ...]
    has_test: bool = True
    is_one_site: bool = False  # all images belong to one site, whatever its name


def find_image_sources(
    root: Path, config: Any, group: str, classes: tuple[str, ...] = (), rows_of: GroupRows = ungrouped
) -> Sources:
    """Read a folder or table; `group` defines which images belong together, such as those of one slide."""
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, config.clients, group)
    train, test = read_train_test(root, group, config.test, derive_seed(config.seed, 0, "test split"), classes, rows_of)
    split = build("partition", config.partition)
    parts = partition_images(split, train, config.clients, rng(config.seed, 0, "partition"))
    named = config.partition.name in ("natural", "auto") and (train.laboratories != "").all()
    hospitals = {}
    for k, part in enumerate(parts, 1):
        name = f"client_{k}"
        if named:
            name = str(train.laboratories[part[0]])
        hospitals[name] = partial(train.take, part)
    return Sources(hospitals, lambda: test, train.classes)


def read_prepared(root: Path, clients: int, group: str) -> Sources:
    """Read a federation as `mutirao data prepare` writes it, or the part of it that one site has."""
    folders = clients_in(root)
    test_folder = root / GLOBAL_TEST
    has_test = test_folder.is_dir()

    @cache
    def test() -> ImageSet:
        return read_image_folder(test_folder, group)

    def read_client(folder: Path) -> ImageSet:
        found = read_image_folder(folder, group)
        if has_test:
            refuse_shared(found, test())
        return found

    hospitals: dict[str, Callable[[], ImageSet]] = {p.name: cache(partial(read_client, p)) for p in folders}
    class_lists: dict[str, list[str]] = {}
    with_classes = list(folders)
    if has_test:
        with_classes.append(test_folder)
    for folder in with_classes:
        class_lists[folder.name] = [path.name for path in class_folders(folder)]
    return Sources(hospitals or remote_clients(root, clients), test, require_same_classes(class_lists), has_test)


def read_own(root: Path | None, clients: int, group: str, classes: tuple[str, ...]) -> Sources:
    """Read one site's own images: a site trains on them, the server evaluates on them.

    All images of a folder of classes, of Training/ and Test/ together, or of a table belong to that site: nothing is
    partitioned, and no test set is held out. Folders client_*/ and global_test/ keep their meaning.
    """
    if root is None:
        if len(classes) < 2:
            raise ConfigError("classes: name them, separated by commas; the server has no pictures to see them from")
        remote = remote_clients("the server", clients)
        return Sources(remote, next(iter(remote.values())), classes, has_test=False, is_one_site=True)
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, clients, group)
    everything = read_whole(root, group, classes)
    hospitals = {f"client_{k}": lambda: everything for k in range(1, clients + 1)}
    return Sources(hospitals, lambda: everything, everything.classes, is_one_site=True)


def read_whole(root: Path, group: str, classes: tuple[str, ...]) -> ImageSet:
    """Read all images of one site, of any layout but that of client folders."""
    if root.is_file():
        return read_csv_listing(root, group, classes)
    parts = [root / name for name in (TRAINING, TEST) if (root / name).is_dir()]
    return concatenate_image_sets({str(part): read_image_folder(part, group) for part in parts or [root]})


def remote_clients(where: Path | str, clients: int) -> dict[str, Callable[[], ImageSet]]:
    """Clients with images at their own sites: reading them here raises ConfigError."""

    def refuse(name: str) -> ImageSet:
        raise ConfigError(f"{where} has no pictures of {name}; they are at another site")

    names = [f"client_{k}" for k in range(1, clients + 1)]
    return {name: partial(refuse, name) for name in names}
