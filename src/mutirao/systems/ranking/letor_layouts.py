"""Locate the parts of a ranking set in a folder, as its publisher ships it.

LETOR 2 has Data/Fold1/trainingset.txt, LETOR 3 QueryLevelNorm/Fold1/train.txt (and Gov a folder for each set below
that), LETOR 4 and MSLR Fold1/train.txt, Yahoo set1.train.txt, Istella train.txt without a validation part, LightGBM
rank.train; each in upper or lower case, plain or gzipped. S1.txt to S5.txt alone are the parts from which
five folds are composed.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from mutirao.errors import ConfigError

LAYOUT = "a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)"
NAMES = {
    "train": "train|training|trainset|trainingset",
    "vali": "vali|valid|val|dev|validation|validationset",
    "test": "test|testset",
}
PART = "|".join(f"(?P<{part}>{names})" for part, names in NAMES.items())
FILE = re.compile(rf"(?:(?P<set>.+)[._-])?(?:{PART})(?:\.(?:txt|dat|letor|svm|svmlight|libsvm))?(?:\.gz)?", re.I)
FOLD = re.compile(r"(?:fold|f)[ _-]?0*([1-9]\d{0,3})", re.I)
SLICE = re.compile(r"s([1-5])(?:\.txt)?(?:\.gz)?", re.I)
MAX_DEPTH = 3  # levels of folders that are searched for folds
NORMAL = "querylevelnorm"  # of several versions of a set, the one that is meant for training

Parts = dict[str, tuple[Path, ...]]  # the files of train, vali (if there is one) and test


def locate_parts(path: Path, fold: int | None = None) -> Parts:
    """The files of a fold's parts; without `fold`, of the fold that the path names, or else of the first.

    The folder may also be that of a single fold, or of a set without folds. FOLDER/set1 means the files set1.train.txt
    and so on of the folder.
    """
    if not path.is_dir():
        named = _sets(path.parent).get(path.name) if path.parent.is_dir() else None
        if named is None:
            raise ConfigError(f"there is no folder {path}; expected {LAYOUT}")
        _refuse_fold(path, None, fold)
        return _complete(named, path.parent, path.name + ".")
    folder = _data_folder(path)
    if there := fold_folders(folder):
        wanted = min(there) if fold is None else fold
        if wanted not in there:
            raise ConfigError(f"{folder} has no Fold{wanted}; there are {', '.join(f.name for f in there.values())}")
        folder = there[wanted]
    elif slices := _slices(folder):
        # LETOR trains fold f on S_f to S_(f+2), validates on the next part and tests on the last, going round.
        first = 1 if fold is None else fold
        numbers = [(first - 1 + step) % 5 + 1 for step in range(5)]
        files = [slices[number] for number in numbers]
        return {"train": tuple(files[:3]), "vali": tuple(files[3:4]), "test": tuple(files[4:])}
    else:
        _refuse_fold(folder, fold_number(folder), fold)
    sets = _sets(folder)
    if not sets:
        raise ConfigError(f"{folder} does not contain ranking data; expected {LAYOUT}")
    if len(sets) > 1 and "" not in sets:
        raise ConfigError(f"{folder} has the sets {', '.join(sorted(sets))}; name one, such as {folder / min(sets)}")
    name = "" if "" in sets else next(iter(sets))
    return _complete(sets[name], folder, name and name + ".")


def fold_number(folder: Path) -> int | None:
    """The number of a folder named as a fold; None for any other name."""
    named = FOLD.fullmatch(folder.resolve().name)
    if named:
        return int(named[1])
    return None


def fold_folders(path: Path) -> dict[int, Path]:
    """The folders Fold1, Fold2, ... by number."""
    found: dict[int, Path] = {}
    for child in sorted(path.iterdir()):
        named = FOLD.fullmatch(child.name)
        if named and child.is_dir():
            if (number := int(named[1])) in found:
                raise ConfigError(f"{path} has {found[number].name} and {child.name}; expected one of them")
            found[number] = child
    return dict(sorted(found.items()))


def all_folds(path: Path) -> list[int | None]:
    """The folds that `locate_parts` finds in a folder; [None] if it has none or is one."""
    if not path.is_dir():
        return [None]
    folder = _data_folder(path)
    numbers: list[int | None] = [*fold_folders(folder)]
    if not numbers and _slices(folder):
        return [1, 2, 3, 4, 5]
    return numbers or [None]


def _refuse_fold(path: Path, own: int | None, fold: int | None) -> None:
    if fold is not None and fold != (own or 1):
        what = f"fold {own}" if own else "a single fold"
        raise ConfigError(f"{path} is {what}, but fold={fold} is requested; expected {LAYOUT}")


def _data_folder(path: Path) -> Path:
    """The folder itself, or the only one below it that contains folds or parts."""
    if contains_data(path):
        return path
    level = [path]
    for _ in range(MAX_DEPTH):
        level = list(itertools.chain.from_iterable(map(_subfolders, level)))
        found = [folder for folder in level if contains_data(folder)]
        # LETOR 3 ships several versions of each set side by side; the normalised one is preferred.
        found = [f for f in found if NORMAL in map(str.lower, f.relative_to(path).parts)] or found
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(str(f.relative_to(path)) for f in found)
            raise ConfigError(f"{path} contains several sets: {names}; name one, such as {found[0]}")
    return path


def _subfolders(folder: Path) -> list[Path]:
    return [child for child in sorted(folder.iterdir()) if child.is_dir()]


def contains_data(folder: Path) -> bool:
    """Whether a folder itself contains folds or parts."""
    return bool(fold_folders(folder) or _slices(folder) or _sets(folder))


def parts_in(folder: Path) -> Parts:
    """The parts in a folder itself, whichever exist: train.txt alone, or with others beside it."""
    return _sets(folder).get("", {})


def _slices(folder: Path) -> dict[int, Path]:
    """S1.txt to S5.txt by number, if all five are there; S1.txt is preferred to S1.txt.gz."""
    found: dict[int, Path] = {}
    # In reverse order, so that S1.txt comes after S1.txt.gz and takes its place.
    for file in sorted(folder.iterdir(), reverse=True):
        named = SLICE.fullmatch(file.name)
        if named and file.is_file():
            found[int(named[1])] = file
    if len(found) == 5:
        return found
    return {}


def _sets(folder: Path) -> dict[str, Parts]:
    """The parts in a folder by the prefix of their files: "" for train.txt and "set1" for set1.train.txt."""
    found: dict[str, Parts] = {}
    for name, part, file in _part_files(folder):
        parts = found.setdefault(name, {})
        # In sorted order train.txt comes before train.txt.gz, which is its packed copy and no second file.
        if part in parts and file.name.removesuffix(".gz") != parts[part][0].name:
            raise ConfigError(f"{folder} has {parts[part][0].name} and {file.name}; expected one of them")
        parts.setdefault(part, (file,))
    return found


def _part_files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for file in sorted(folder.iterdir()):
        named = FILE.fullmatch(file.name)
        if named and file.is_file() and "qrels" not in file.name.lower():
            yield named["set"] or "", next(part for part in NAMES if named[part]), file


def _complete(parts: Parts, folder: Path, before: str) -> Parts:
    needed = ("train", "vali", "test") if fold_number(folder) else ("train", "test")
    missing = [part for part in needed if part not in parts]
    if missing:
        raise ConfigError(f"{folder / (before + missing[0])}.txt is missing; expected {LAYOUT}")
    return {part: parts[part] for part in NAMES if part in parts}
