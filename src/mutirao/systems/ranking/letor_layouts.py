"""Where the parts of a ranking set lie in a folder, as its publisher ships it.

LETOR 2 has Data/Fold1/trainingset.txt, LETOR 3 QueryLevelNorm/Fold1/train.txt (and Gov a folder for each set below
that), LETOR 4 and MSLR Fold1/train.txt, Yahoo set1.train.txt, Istella train.txt without a validation part, LightGBM
rank.train; each in upper or lower case, plain or gzipped. S1.txt to S5.txt alone are the five parts folds are made of.
"""

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
DEEP = 3  # folders below the given one in which folds are looked for
NORMAL = "querylevelnorm"  # of several versions of a set, the one that is meant to be learnt from

Parts = dict[str, tuple[Path, ...]]  # train, vali (if there is one) and test, each of one file or several


def locate(path: Path, fold: int | None = None) -> Parts:
    """The files of a fold's parts; without `fold`, of the one that the path names or else of the first.

    A folder may also be that of one fold, or of a set without folds, which counts as one. FOLDER/set1 means the files
    set1.train.txt and so on of the folder.
    """
    if not path.is_dir():
        named = _sets(path.parent).get(path.name) if path.parent.is_dir() else None
        if named is None:
            raise ConfigError(f"there is no folder {path}; right would be {LAYOUT}")
        _refuse_fold(path, None, fold)
        return _complete(named, path.parent, path.name + ".")
    folder = _holder(path)
    if there := fold_folders(folder):
        wanted = min(there) if fold is None else fold
        if wanted not in there:
            raise ConfigError(f"{folder} has no Fold{wanted}; there are {', '.join(f.name for f in there.values())}")
        folder = there[wanted]
    elif slices := _slices(folder):
        first = 1 if fold is None else fold
        numbers = [(first - 1 + step) % 5 + 1 for step in range(5)]
        train, vali, test = numbers[:3], numbers[3:4], numbers[4:]
        return {p: tuple(slices[n] for n in ns) for p, ns in (("train", train), ("vali", vali), ("test", test))}
    else:
        _refuse_fold(folder, number_of(folder), fold)
    sets = _sets(folder)
    if not sets:
        raise ConfigError(f"{folder} does not hold ranking data; right would be {LAYOUT}")
    if len(sets) > 1 and "" not in sets:
        raise ConfigError(f"{folder} holds {', '.join(sorted(sets))}; right would be {folder / min(sets)}, or another")
    name = "" if "" in sets else next(iter(sets))
    return _complete(sets[name], folder, name and name + ".")


def number_of(folder: Path) -> int | None:
    """Which fold a folder is by its name, if it has such a name."""
    named = FOLD.fullmatch(folder.resolve().name)
    return int(named[1]) if named else None


def fold_folders(path: Path) -> dict[int, Path]:
    """Folders of folds by number."""
    found: dict[int, Path] = {}
    for child in sorted(path.iterdir()):
        named = FOLD.fullmatch(child.name)
        if named and child.is_dir():
            if (number := int(named[1])) in found:
                raise ConfigError(f"{path} has {found[number].name} and {child.name}; right would be one of them")
            found[number] = child
    return dict(sorted(found.items()))


def all_folds(path: Path) -> list[int | None]:
    """The folds that `locate` would find in a folder; [None] if it has none or is one."""
    if not path.is_dir():
        return [None]
    folder = _holder(path)
    return [*fold_folders(folder)] or ([1, 2, 3, 4, 5] if _slices(folder) else [None])


def _refuse_fold(path: Path, own: int | None, fold: int | None) -> None:
    if fold is not None and fold != (own or 1):
        what = f"fold {own}" if own else "a single fold"
        raise ConfigError(f"{path} is {what}, but fold={fold} is asked for; right would be {LAYOUT}")


def _holder(path: Path) -> Path:
    """The folder itself, or the one below it that holds folds or parts, if it is plain which."""
    if holds(path):
        return path
    level = [path]
    for _ in range(DEEP):
        level = [child for folder in level for child in sorted(folder.iterdir()) if child.is_dir()]
        found = [folder for folder in level if holds(folder)]
        meant = [f for f in found if NORMAL in (part.lower() for part in f.relative_to(path).parts)]
        if len(meant or found) == 1:
            return (meant or found)[0]
        if found:
            shown = ", ".join(str(f.relative_to(path)) for f in meant or found)
            raise ConfigError(f"{path} holds several sets: {shown}; right would be {(meant or found)[0]}, or another")
    return path


def holds(folder: Path) -> bool:
    """Whether folds or parts lie in a folder itself."""
    return bool(fold_folders(folder) or _slices(folder) or _sets(folder))


def parts_in(folder: Path) -> Parts:
    """The parts that lie in a folder itself, whichever there are: train.txt alone, or with others beside it."""
    return _sets(folder).get("", {})


def _slices(folder: Path) -> dict[int, Path]:
    found = {int(n[1]): f for f in sorted(folder.iterdir(), reverse=True) if (n := SLICE.fullmatch(f.name))}
    return found if len(found) == 5 and all(f.is_file() for f in found.values()) else {}


def _sets(folder: Path) -> dict[str, Parts]:
    """The parts in a folder by the name before them, which is empty for train.txt and "set1" for set1.train.txt."""
    found: dict[str, Parts] = {}
    for name, part, file in _part_files(folder):
        parts = found.setdefault(name, {})
        if part in parts and file.name.removesuffix(".gz") != parts[part][0].name:  # which comes before train.txt.gz
            raise ConfigError(f"{folder} has {parts[part][0].name} and {file.name}; right would be one of them")
        parts.setdefault(part, (file,))
    return found


def _part_files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for file in sorted(folder.iterdir()):
        named = FILE.fullmatch(file.name)
        if named and file.is_file() and "qrels" not in file.name.lower():
            yield named["set"] or "", next(part for part in NAMES if named[part]), file


def _complete(parts: Parts, folder: Path, before: str) -> Parts:
    needed = ("train", "vali", "test") if number_of(folder) else ("train", "test")
    missing = [part for part in needed if part not in parts]
    if missing:
        raise ConfigError(f"{folder / (before + missing[0])}.txt is missing; right would be {LAYOUT}")
    return {part: parts[part] for part in NAMES if part in parts}
