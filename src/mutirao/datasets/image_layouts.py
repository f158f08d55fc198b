"""Layouts of image sets on disk, and their split into training and test set.

A layout is one folder for each class; `Training/` and `Test/` of that kind; `client_1/`, `client_2/`, ... and
`global_test/`; or a table (CSV) with columns `file` and `label`, and optionally `client` (to which the image belongs;
`global_test` for the test set) and `group`. Sets of cervical cells are read as their publishers ship them.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mutirao.datasets.cervical import find_cervical, read_cervical
from mutirao.datasets.class_folders import (
    ImageSet,
    Rows,
    load_images,
    read_image_folder,
    refuse_shared,
    require_same_classes,
    slide_origins,
)
from mutirao.errors import ConfigError
from mutirao.io import read_csv

if TYPE_CHECKING:
    pass

log = logging.getLogger("mutirao")

TRAINING = "Training"
TEST = "Test"
GLOBAL_TEST = "global_test"
CLIENT = re.compile(r"client_(\d+)")
GroupRows = Callable[[ImageSet], ImageSet]  # from images to the rows that are partitioned: images or slides
TABLE = "a table (CSV) with columns file and label, and perhaps client and group"


def ungrouped(pictures: ImageSet) -> ImageSet:
    """Each image is a row."""
    return pictures


def clients_in(root: Path) -> list[Path]:
    """The folders `client_1`, `client_2` and so on, sorted by number."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := CLIENT.fullmatch(p.name))]
    return [p for _, p in sorted(found)]


def read_csv_listing(path: Path, group: str = "", classes: Sequence[str] = ()) -> ImageSet:
    """Read the images that a table lists, relative to its folder; `laboratories` are its clients."""
    rows = read_csv(path)
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise ConfigError(f"{path} must have columns 'file' and 'label'; right would be {TABLE}")
    for at, row in enumerate(rows, 1):
        if not row["file"] or not row["label"] or "\0" in row["file"]:
            raise ConfigError(
                f"{path}, row {at}: a file and a label are needed, found {row['file'][:60]!r} without a label"
            )
    known = sorted({row["label"] for row in rows})
    names = tuple(classes) or tuple(known)
    if unknown := [name for name in known if name not in names]:
        raise ConfigError(f"{path} has a label {unknown[0][:40]!r}, which is none of the classes {', '.join(names)}")
    numbers = {name: i for i, name in enumerate(names)}
    home = path.parent
    found = load_images([(home / row["file"], numbers[row["label"]]) for row in rows], path)
    by_file = {home / row["file"]: row for row in rows}
    groups = np.array([by_file[f].get("group", "") for f in found.files])
    if not (groups != "").any():
        groups = slide_origins(home, found.files, group)[0]
    clients = np.array([by_file[f].get("client", "") for f in found.files])
    if (clients != "").any() and not (clients != "").all():
        raise ConfigError(f"{path}: {found.files[int((clients == '').argmax())].name} has no client, but others have")
    return replace(found, classes=names, slides=groups, laboratories=clients)


def read_train_test(
    data: Path,
    group: str,
    share: float,
    seed: int,
    classes: Sequence[str] = (),
    rows_of: GroupRows = ungrouped,
) -> tuple[ImageSet, ImageSet]:
    """Read the training and the test set of any layout but client folders; no image may be in both.

    `rows_of` groups images into the rows to split, such as slides.
    """
    if data.is_file():
        everything = rows_of(read_csv_listing(data, group, classes))
        is_test = everything.laboratories == GLOBAL_TEST
        if is_test.any():
            train = everything.take(np.flatnonzero(~is_test))
            test = everything.take(np.flatnonzero(is_test))
        else:
            train, test = split_set(everything, share, seed, group)
    elif published := find_cervical(data):
        everything, own = read_cervical(published, data)
        # A table that the user gives says more than the publisher's file names do.
        if group.endswith(".csv"):
            everything = replace(everything, slides=slide_origins(data, everything.files, group)[0])
        if own is None:
            train, test = split_set(everything, share, seed, group)
        else:
            train = everything
            test = own
    elif (data / TRAINING).is_dir() or (data / TEST).is_dir():
        train = rows_of(read_image_folder(data / TRAINING, group))
        test = rows_of(read_image_folder(data / TEST, group))
        require_same_classes({str(data / TRAINING): train.classes, str(data / TEST): test.classes})
    else:
        train, test = split_set(rows_of(read_image_folder(data, group)), share, seed, group)
    refuse_shared(train, test)
    return train, test


def split_set(images: ImageSet, share: float, seed: int, group: str) -> tuple[ImageSet, ImageSet]:
    """Split a set into training and test set; no group is in both."""
    train, test = train_test_split(images, share, seed, expected=bool(group))
    return images.take(train), images.take(test)


def train_test_split(
    pictures: ImageSet, share: float, seed: int, where: str = "the test set", expected: bool = True
) -> tuple[Rows, Rows]:
    """Split rows into training rows and about a `share` of test rows, stratified by class and grouped by slide.

    Cells of one slide share stain, light and patient: a split that ignores slides measures memory.

    Images of unknown slides are only trained on. Equal images stay together, whatever their names say. If no slide
    is known, the split is by class alone, with a warning where slides are `expected`.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedShuffleSplit

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
        level = logging.INFO
        if whole:
            level = logging.DEBUG
        elif expected or count:
            level = logging.WARNING
        log.log(
            level, "%s is split by class alone: %s known, so pictures of one slide may be on both sides", where, why
        )
        distinct = np.array(sorted(first.values()))
        counts = np.bincount(pictures.labels[distinct])
        if len(distinct) < 2:
            raise ConfigError(f"{where} cannot be split off: there is a single picture")
        if counts[counts > 0].min() < 2:  # too few to stratify
            order = np.random.default_rng(seed).permutation(distinct)
            sampled = order[: max(1, round(share * len(order)))]
        else:
            wanted = max(share, np.count_nonzero(counts) / len(distinct))  # at least one of each class
            split = StratifiedShuffleSplit(1, test_size=wanted, random_state=seed % 2**32)
            sampled = distinct[next(split.split(distinct, pictures.labels[distinct]))[1]]
        test_hashes = {pictures.hashes[i] for i in sampled}
        is_test = np.array([content in test_hashes for content in pictures.hashes])
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if len(known) < len(pictures):
        log.info("%d pictures of unknown slides are only trained on", len(pictures) - len(known))
    grouped = StratifiedGroupKFold(folds, shuffle=True, random_state=seed % 2**32)
    with np.errstate(all="ignore"):
        _, held = next(grouped.split(known, pictures.labels[known], slides[known]))
    return np.setdiff1d(np.arange(len(pictures)), known[held]), np.sort(known[held])
