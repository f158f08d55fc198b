"""Sources of images: each client's images and the common test set, from folders or a table.

A folder of classes or a table is split here, and `Training/` is partitioned among clients. Folders `client_*/` and
`global_test/` are already a federation: each site needs only its own folder, or its own rows of a table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mutirao.config import build
from mutirao.datasets.class_folders import (
    ImageSet,
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
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.images.image_partitions import partition_images


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
    """Read a folder or table; `group` tells which images belong together, such as those of one slide."""
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, config.clients, group)
    train, test = read_train_test(root, group, config.test, derive_seed(config.seed, 0, "test split"), classes, rows_of)
    split = build("partition", config.partition)
    parts = partition_images(split, train, config.clients, rng(config.seed, 0, "partition"))
    named = config.partition.name in ("natural", "auto") and (train.laboratories != "").all()
    hospitals = {}
    for k, part in enumerate(parts, 1):
        name = str(train.laboratories[part[0]]) if named else f"client_{k}"
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
    for folder in [*folders, test_folder] if has_test else folders:
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
    """Clients whose images are at their own sites: reading them here raises ConfigError."""

    def refuse(name: str) -> ImageSet:
        raise ConfigError(f"{where} has no pictures of {name}; they are at another site")

    names = [f"client_{k}" for k in range(1, clients + 1)]
    return {name: partial(refuse, name) for name in names}
