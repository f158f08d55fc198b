"""Ranking files as their publishers ship them: LETOR's and SVMlight's form, as MSLR-WEB10K/30K and MQ2007/8 have it.

A file is read once (`blocks`) and then kept as arrays that are mapped into memory (`cache`).
"""

import gzip
import logging
import re
import stat
from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.ranking import blocks
from mutirao.ranking.cache import keep_arrays, key_of, map_arrays, places
from mutirao.ranking.data import RankingData
from mutirao.ranking.generate import mslr_like
from mutirao.ranking.parsing import Floats

log = logging.getLogger("mutirao")

PARTS = {"train": ("train",), "vali": ("vali", "valid", "val", "validation"), "test": ("test",)}
LAYOUT = "a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)"


def read_letor(path: Path | str, cache: bool = True) -> RankingData:
    """Read a file of lines `GRADE qid:ID 1:VALUE 2:VALUE ... # comment`, plain or gzipped.

    Features that a line leaves out are 0; a wrong line is refused with its number. With `cache`, what was read is
    kept and mapped into memory (copy-on-write) by later calls, until the file's size or time changes. Qin and Liu,
    "Introducing LETOR 4.0 Datasets", 2013.
    """
    file = Path(path)
    about = blocks.stat_of(file)
    if not cache or not stat.S_ISREG(about.st_mode):
        return blocks.read_file(file)
    key, folders = key_of(about), places(file)
    for folder in folders:
        if (found := map_arrays(folder / key)) is not None:
            return RankingData(**found)
    data = blocks.read_file(file)
    if key != key_of(blocks.stat_of(file)):
        raise ConfigError(f"{file} was changed while it was read; try again once it is whole")
    for folder in folders:
        try:
            return RankingData(**keep_arrays(vars(data), folder, key))
        except OSError as error:
            log.info("cannot keep %s in %s: %s", file, folder, error.strerror or error)
    log.warning("%s is read without a cache: no folder for it can be written", file)
    return data


def folds(
    path: Path | str, fold: int | None = None, cache: bool = True
) -> tuple[RankingData, RankingData, RankingData]:
    """Training, validation and test set of one fold, all with equally many features.

    `path` is the folder that holds Fold1 to Fold5, or one such folder itself; `fold` is 1 if nothing is said.
    """
    sets = [read_letor(file, cache) for file in locate(Path(path), fold).values()]
    width = max(s.features for s in sets)
    train, vali, test = (
        s if s.features == width else RankingData(blocks.widen(s.x, width), s.grades, s.queries, s.query_ids)
        for s in sets
    )
    return train, vali, test


def locate(path: Path, fold: int | None = None) -> dict[str, Path]:
    """The files of a fold by their parts: train, vali, test."""
    if path.is_file():
        raise ConfigError(f"{path} is a file; right would be {LAYOUT}")
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; right would be {LAYOUT}")
    there = _fold_folders(path)
    if there:
        wanted = 1 if fold is None else fold
        if wanted not in there:
            raise ConfigError(f"{path} has no Fold{wanted}; there are {', '.join(f.name for f in there.values())}")
        folder = there[wanted]
    else:
        folder = path
        own = re.fullmatch(r"fold(\d+)", path.resolve().name, re.IGNORECASE)
        if fold is not None and fold != (int(own[1]) if own else 1):
            what = f"fold {own[1]}" if own else "a single fold"
            raise ConfigError(f"{path} is {what}, but fold={fold} is asked for; right would be {LAYOUT}")
    files = {part: _part_file(folder, names) for part, names in PARTS.items()}
    if not any(files.values()):
        raise ConfigError(f"{folder} does not hold ranking data; right would be {LAYOUT}")
    missing = [part for part, file in files.items() if file is None]
    if missing:
        raise ConfigError(f"{folder / missing[0]}.txt is missing; right would be {LAYOUT}")
    return {part: file for part, file in files.items() if file is not None}


def _fold_folders(path: Path) -> dict[int, Path]:
    found = {}
    for child in sorted(path.iterdir()):
        named = re.fullmatch(r"fold(\d{1,4})", child.name, re.IGNORECASE)
        if named and child.is_dir():
            found[int(named[1])] = child
    return dict(sorted(found.items()))


def _part_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    candidates = (folder / f"{name}{ending}" for name in names for ending in (".txt", ".txt.gz"))
    return next((file for file in candidates if file.is_file()), None)


def check_letor(path: Path | str | None) -> list[str]:
    """What a file, or each fold of a folder, holds; everything is read, nothing is kept."""
    if path is None:
        raise ConfigError(f"ranking data need a path: a file, or {LAYOUT}")
    place = Path(path)
    if place.is_file():
        files = [place]
    else:
        numbers: list[int | None] = [*_fold_folders(place)] if place.is_dir() else []
        files = [file for n in numbers or [None] for file in locate(place, n).values()]
    return [f"{file}: {_facts(blocks.read_file(file))}" for file in files]


def check_mslr(path: Path | str | None) -> list[str]:
    """The same for MSLR-WEB10K/30K; without a path, what the stand-in looks like."""
    if path is not None:
        return check_letor(path)
    made = mslr_like(50, np.random.default_rng(0))
    return [f"embedded stand-in, for example: {_facts(made)}"]


def _facts(data: RankingData) -> str:
    counts = np.bincount(data.grades)
    shares = ", ".join(f"{g}: {c / counts.sum():.1%}" for g, c in enumerate(counts) if c)
    return f"{len(data):,} documents of {len(data.query_ids):,} queries, {data.features:,} features, grades {shares}"


def write_letor(path: Path | str, data: RankingData) -> None:
    """Write a LETOR file, gzipped if its name ends in .gz; reading it back gives the same numbers."""
    file = Path(path)
    part = file.with_name(f".{file.name}.part")
    ids = [str(i) for i in data.query_ids.tolist()]
    try:
        with gzip.open(part, "wb", compresslevel=6) if file.suffix == ".gz" else part.open("wb") as out:
            for row, grade, query in zip(data.x, data.grades.tolist(), data.queries.tolist(), strict=True):
                line = " ".join(f"{i}:{word}" for i, word in enumerate(_words(row), start=1))
                out.write(f"{grade} qid:{ids[query]} {line}\n".encode())
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _words(row: Floats) -> list[str]:
    """Each float32 in as few digits as give it back: seven do for most, nine for all."""
    numbers = row.tolist()
    words = [f"{v:.7g}" for v in numbers]
    for k in np.flatnonzero(np.array(words, np.float64).astype(np.float32) != row).tolist():
        words[k] = f"{numbers[k]:.9g}"
    return words
