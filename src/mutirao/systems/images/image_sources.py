"""Where the pictures of a federation come from: what each client holds, and the common test set.

A folder of classes or a table is split here, `Training/` and `Test/` are taken as they are, and `client_*/` with
`global_test/` is a federation already: each party needs only its own of these folders, or its own rows of a table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mutirao.config import build
from mutirao.datasets.class_folders import (
    ImageSet,
    agree,
    class_folders,
    concatenate_image_sets,
    read_image_folder,
    refuse_shared,
)
from mutirao.datasets.image_layouts import (
    GLOBAL_TEST,
    TEST,
    TRAINING,
    RowsOf,
    as_they_are,
    clients_in,
    read_both,
    read_listed,
)
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed, rng
from mutirao.systems.images.image_partitions import partition_images


@dataclass(frozen=True)
class Sources:
    """What each client holds and the common test set, read when asked for, and the classes they have."""

    hospitals: Mapping[str, Callable[[], ImageSet]]
    test: Callable[[], ImageSet]
    classes: tuple[str, ...]
    has_test: bool = True
    own: bool = False  # whether it is all one party's, whatever that is called


def find_image_sources(
    root: Path, config: Any, group: str, classes: tuple[str, ...] = (), rows_of: RowsOf = as_they_are
) -> Sources:
    """The parties that a folder or table describes; `group` says which pictures belong together, such as a slide's."""
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, config.clients, group)
    train, test = read_both(root, group, config.test, derive_seed(config.seed, 0, "test split"), classes, rows_of)
    split = build("partition", config.partition)
    parts = partition_images(split, train, config.clients, rng(config.seed, 0, "partition"))
    named = config.partition.name in ("natural", "auto") and (train.laboratories != "").all()
    hospitals = {
        str(train.laboratories[part[0]]) if named else f"client_{k}": partial(train.take, part)
        for k, part in enumerate(parts, 1)
    }
    return Sources(hospitals, lambda: test, train.classes)


def read_prepared(root: Path, clients: int, group: str) -> Sources:
    """A federation as `mutirao data prepare` writes it, or the part of it that one party has."""
    folders, test_folder = clients_in(root), root / GLOBAL_TEST
    has_test = test_folder.is_dir()

    @cache
    def test() -> ImageSet:
        return read_image_folder(test_folder, group)

    def hold(folder: Path) -> ImageSet:
        found = read_image_folder(folder, group)
        if has_test:
            refuse_shared(found, test())
        return found

    hospitals: dict[str, Callable[[], ImageSet]] = {p.name: cache(partial(hold, p)) for p in folders}
    lists = {p.name: [c.name for c in class_folders(p)] for p in [*folders, *([test_folder] if has_test else [])]}
    return Sources(hospitals or held_elsewhere(root, clients), test, agree(lists), has_test)


def read_own(root: Path | None, clients: int, group: str, classes: tuple[str, ...]) -> Sources:
    """One party's own pictures: a site trains on them, the server judges by them if it has any.

    All in a folder of classes, in Training/ and Test/ together, or in a table is that party's: nothing is dealt, and
    no more held out than it keeps back to validate on. Only client_*/ and global_test/ say whose pictures are.
    """
    if root is None:
        if len(classes) < 2:
            raise ConfigError("classes: name them, separated by commas; the server has no pictures to see them from")
        none = held_elsewhere("the server", clients)
        return Sources(none, next(iter(none.values())), classes, has_test=False, own=True)
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, clients, group)
    everything = read_whole(root, group, classes)
    return Sources(
        {f"client_{k}": lambda: everything for k in range(1, clients + 1)},
        *(lambda: everything, everything.classes),
        own=True,
    )


def read_whole(root: Path, group: str, classes: tuple[str, ...]) -> ImageSet:
    """All pictures of one party, of any layout but that of clients' own folders."""
    if root.is_file():
        return read_listed(root, group, classes)
    parts = [root / name for name in (TRAINING, TEST) if (root / name).is_dir()]
    return concatenate_image_sets({str(part): read_image_folder(part, group) for part in parts or [root]})


def held_elsewhere(where: Path | str, clients: int) -> dict[str, Callable[[], ImageSet]]:
    """The clients as the server sees them: they hold their own pictures."""

    def refuse(name: str) -> ImageSet:
        raise ConfigError(f"{where} has no pictures of {name}; this party does not hold them")

    return {(name := f"client_{k}"): partial(refuse, name) for k in range(1, clients + 1)}
