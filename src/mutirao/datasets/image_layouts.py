"""How a set of pictures may lie on disk, and what of it is held out as a test set.

One folder a class; `Training/` and `Test/` of that kind; `client_1/`, `client_2/`, ... and `global_test/`; or a table
(CSV) with columns `file` and `label`, and perhaps `client` (whose it is; `global_test`: the test set's) and `group`.
Sets of cervical cells lie as their publishers ship them.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mutirao.datasets.cervical import find_published, read_published
from mutirao.datasets.class_folders import ImageSet, Rows, agree, look_at, origins, read_image_folder, refuse_shared
from mutirao.errors import ConfigError
from mutirao.io import read_csv

log = logging.getLogger("mutirao")

TRAINING, TEST, GLOBAL_TEST = "Training", "Test", "global_test"
CLIENT = re.compile(r"client_(\d+)")
RowsOf = Callable[[ImageSet], ImageSet]  # what is dealt and held out as a whole: pictures, or slides made of them
TABLE = "a table (CSV) with columns file and label, and perhaps client and group"


def as_they_are(pictures: ImageSet) -> ImageSet:
    """Each picture by itself."""
    return pictures


def clients_in(root: Path) -> list[Path]:
    """The folders `client_1`, `client_2` and so on, by their numbers."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := CLIENT.fullmatch(p.name))]
    return [p for _, p in sorted(found)]


def read_listed(path: Path, group: str = "", classes: Sequence[str] = ()) -> ImageSet:
    """The pictures that a table names; files are looked for beside it. `laboratories` are its clients."""
    rows = read_csv(path)
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise ConfigError(f"{path} must have columns 'file' and 'label'; right would be {TABLE}")
    for at, row in enumerate(rows, 1):
        if not row["file"] or not row["label"] or "\0" in row["file"]:
            raise ConfigError(
                f"{path}, row {at}: a file and a label are needed, there are {row['file'][:60]!r} and none"
            )
    known = sorted({row["label"] for row in rows})
    names = tuple(classes) or tuple(known)
    if strange := [name for name in known if name not in names]:
        raise ConfigError(f"{path} has a label {strange[0][:40]!r}, which is none of the classes {', '.join(names)}")
    numbers, home = {name: i for i, name in enumerate(names)}, path.parent
    found = look_at([(home / row["file"], numbers[row["label"]]) for row in rows], path)
    by_file = {home / row["file"]: row for row in rows}
    groups = np.array([by_file[f].get("group", "") for f in found.files])
    if not (groups != "").any():
        groups = origins(home, found.files, group)[0]
    clients = np.array([by_file[f].get("client", "") for f in found.files])
    if (clients != "").any() and not (clients != "").all():
        raise ConfigError(f"{path}: {found.files[int((clients == '').argmax())].name} has no client, but others have")
    return replace(found, classes=names, slides=groups, laboratories=clients)


def read_both(
    data: Path,
    group: str,
    share: float,
    seed: int,
    classes: Sequence[str] = (),
    rows_of: RowsOf = as_they_are,
) -> tuple[ImageSet, ImageSet]:
    """What is trained on and what is held out, of any layout but that of clients' own folders; none is in both.

    `rows_of` makes of the pictures what is held out or not as a whole, such as slides.
    """
    if data.is_file():
        everything = rows_of(read_listed(data, group, classes))
        held = everything.laboratories == GLOBAL_TEST
        rows = (
            (np.flatnonzero(~held), np.flatnonzero(held))
            if held.any()
            else train_test_split(everything, share, seed, expected=bool(group))
        )
        train, test = everything.take(rows[0]), everything.take(rows[1])
    elif published := find_published(data):
        everything, own = read_published(published, data)
        if group.endswith(".csv"):  # a table says more than file names do
            everything = replace(everything, slides=origins(data, everything.files, group)[0])
        train, test = everything, own or everything
        if own is None:
            rows = train_test_split(everything, share, seed, expected=bool(group))
            train, test = everything.take(rows[0]), everything.take(rows[1])
    elif (data / TRAINING).is_dir() or (data / TEST).is_dir():
        train, test = (rows_of(read_image_folder(data / part, group)) for part in (TRAINING, TEST))
        agree({str(data / TRAINING): train.classes, str(data / TEST): test.classes})
    else:
        everything = rows_of(read_image_folder(data, group))
        rows = train_test_split(everything, share, seed, expected=bool(group))
        train, test = everything.take(rows[0]), everything.take(rows[1])
    refuse_shared(train, test)
    return train, test


def train_test_split(
    pictures: ImageSet, share: float, seed: int, where: str = "the test set", expected: bool = True
) -> tuple[Rows, Rows]:
    """Rows to train on and about a `share` held out, class by class alike, no slide (or other group) on both sides.

    Cells of one slide look alike in stain, light and patient. A split that ignores slides measures memory.

    A picture whose slide is unknown is never held out. Equal pictures stay together whatever their names say. If no
    slide is known at all the split is by class alone, and a warning says so where some are `expected`.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedShuffleSplit

    everything = np.arange(len(pictures))
    folds = round(1 / share)
    slides = pictures.slides.copy()
    first: dict[str, int] = {}
    for i, content in enumerate(pictures.hashes):
        slides[i] = slides[first.setdefault(content, i)] or slides[i]
    known = np.flatnonzero(slides != "")
    count = len(set(slides[known]))
    whole = count == len(pictures)  # rows are slides: none can be on both sides
    if whole or count < folds or np.bincount(pictures.labels[known]).max() < folds:
        why = f"only {count} slides are" if count else "no slide is"
        level = logging.DEBUG if whole else logging.WARNING if expected or count else logging.INFO
        log.log(
            level, "%s is drawn by class alone: %s known, so pictures of one slide may be on both sides", where, why
        )
        distinct = np.array(sorted(first.values()))
        counts = np.bincount(pictures.labels[distinct])
        if len(distinct) < 2:
            raise ConfigError(f"{where} cannot be drawn: there is a single picture")
        if counts[counts > 0].min() < 2:  # too few to be alike class by class
            order = np.random.default_rng(seed).permutation(distinct)
            drawn = order[: max(1, round(share * len(order)))]
        else:
            wanted = max(share, np.count_nonzero(counts) / len(distinct))  # at least one of each class
            split = StratifiedShuffleSplit(1, test_size=wanted, random_state=seed % 2**32)
            drawn = distinct[next(split.split(distinct, pictures.labels[distinct]))[1]]
        held = {pictures.hashes[i] for i in drawn}
        aside = np.array([content in held for content in pictures.hashes])
        return np.flatnonzero(~aside), np.flatnonzero(aside)
    if len(known) < len(pictures):
        log.info("%d pictures of unknown slides are only trained on", len(pictures) - len(known))
    grouped = StratifiedGroupKFold(folds, shuffle=True, random_state=seed % 2**32)
    with np.errstate(all="ignore"):
        _, held = next(grouped.split(known, pictures.labels[known], slides[known]))
    return np.setdiff1d(everything, known[held]), np.sort(known[held])
