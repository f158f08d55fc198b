"""Where the pictures of a federation come from: a folder in one of three layouts, or synthetic slides.

A folder of classes is split here, `Training/` and `Test/` are taken as they are, and `client_*/` with `global_test/`
is a federation already: each party needs only its own of these folders.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mutirao.config import build
from mutirao.datasets.folders import Pictures, agree, class_folders, read_pictures, refuse_shared
from mutirao.errors import ConfigError
from mutirao.images.splits import GLOBAL_TEST, TEST, TRAINING, deal_pictures, set_apart
from mutirao.randomness import number, rng

CLIENT = re.compile(r"client_(\d+)")


@dataclass(frozen=True)
class Sources:
    """What each hospital holds and the common test set, read when asked for, and the classes they have."""

    hospitals: Mapping[str, Callable[[], Pictures]]
    test: Callable[[], Pictures]
    classes: tuple[str, ...]
    has_test: bool = True


def find_sources(config: Any) -> Sources:
    """The parties that a configuration's `data` describes."""
    if config.data == "synthetic":
        from mutirao.slides.demo import laboratories

        return read_prepared(laboratories(config.clients, config.slides, config.side, config.seed), config)
    root = Path(config.data).expanduser()
    if (root / GLOBAL_TEST).is_dir() or clients_in(root):
        return read_prepared(root, config)
    if (root / TRAINING).is_dir() or (root / TEST).is_dir():
        train, test = read_pictures(root / TRAINING, config.slide), read_pictures(root / TEST, config.slide)
        agree({str(root / TRAINING): train.classes, str(root / TEST): test.classes})
    else:
        everything = read_pictures(root, config.slide)
        rows, held = set_apart(everything, config.test, number(config.seed, 0, "test split"))
        train, test = everything.take(rows), everything.take(held)
    refuse_shared(train, test)
    split = build("partition", config.partition)
    parts = deal_pictures(split, train, config.clients, rng(config.seed, 0, "partition"))
    hospitals = {f"client_{k}": partial(train.take, part) for k, part in enumerate(parts, 1)}
    return Sources(hospitals, lambda: test, train.classes)


def clients_in(root: Path) -> list[Path]:
    """The folders `client_1`, `client_2` and so on, by their numbers."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := CLIENT.fullmatch(p.name))]
    return [p for _, p in sorted(found)]


def read_prepared(root: Path, config: Any) -> Sources:
    """A federation as `mutirao data prepare` writes it, or the part of it that one party has."""
    folders, test_folder = clients_in(root), root / GLOBAL_TEST
    has_test = test_folder.is_dir()

    @cache
    def test() -> Pictures:
        return read_pictures(test_folder, config.slide)

    def hold(folder: Path) -> Pictures:
        found = read_pictures(folder, config.slide)
        if has_test:
            refuse_shared(found, test())
        return found

    def refuse(name: str) -> Pictures:
        raise ConfigError(f"{root} has no folder {name}; this party does not hold its pictures")

    hospitals: dict[str, Callable[[], Pictures]] = {p.name: cache(partial(hold, p)) for p in folders}
    if not hospitals:  # the server's side: the hospitals hold their own
        hospitals = {(name := f"client_{k}"): partial(refuse, name) for k in range(1, config.clients + 1)}
    lists = {p.name: [c.name for c in class_folders(p)] for p in [*folders, *([test_folder] if has_test else [])]}
    return Sources(hospitals, test, agree(lists), has_test)
