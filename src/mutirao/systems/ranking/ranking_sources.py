"""A ranking data set from wherever it is: a folder of any layout, one file, features with qrels, or generated.

It is read into a training, a validation and a test part with equally many features.
"""

import gzip
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.datasets.published import find_data
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.ranking.letor import pad_features, read_letor, read_text_blocks, stat_file
from mutirao.systems.ranking.letor_layouts import LAYOUT, Parts, all_folds, contains_data, locate_parts
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE, quote_word
from mutirao.systems.ranking.qrels import Qrels, read_qrels, read_with_qrels
from mutirao.systems.ranking.query_partition import fold_rows
from mutirao.systems.ranking.ranking_data import Ints, RankingData
from mutirao.systems.ranking.synthetic_queries import mslr_like

log = logging.getLogger("mutirao")

HELD_OUT = 5  # where a set has no validation part, every fifth query of the training part is used
SIZE_SUFFIXES = (".query", ".group")  # of files that count each query's documents

Splits = tuple[RankingData, RankingData, RankingData]


def load_splits(config: Any) -> Splits:
    """Training, validation and test part of the data that a recipe's configuration names, or of generated data."""
    if config.data != "generated":
        return read_splits(find_data(config.data), config.fold or None, config.qrels)
    return split_by_fold(mslr_like(config.queries, rng(config.seed, 0, "generated")), config.fold or 1)


def read_splits(path: Path | str, fold: int | None = None, qrels: str = "", cache: bool = True) -> Splits:
    """Training, validation and test part of a ranking set.

    A folder is read as its publisher ships it (`mutirao.systems.ranking.letor_layouts`). The queries of a single file
    are cut into five folds, in their order. `qrels` replace the grades of the file: a qrels file, or `irds:NAME`;
    without it, files in the folder with "qrels" in their names are used.
    """
    place = Path(path)
    grades = find_qrels(place, qrels)
    found = set_files(place, fold)
    if not isinstance(found, dict):
        return split_by_fold(read_ranking_file(found, grades, cache), fold or 1)
    parts: dict[str, RankingData] = {}
    for part, files in found.items():
        parts[part] = concatenate_files([read_ranking_file(file, grades, cache) for file in files], files)
    train = parts["train"]
    vali = parts.get("vali")
    if vali is None:
        held_out = train.queries % HELD_OUT == HELD_OUT - 1
        if not held_out.any():
            raise ConfigError(f"{place} has no validation part and too few queries to hold some out; at least 5")
        vali = train.take(np.flatnonzero(held_out))
        train = train.take(np.flatnonzero(~held_out))
        log.info("%s has no validation part: every fifth query of its training part is held out for it", place)
    width = max(part.features for part in (train, vali, parts["test"]))
    return pad_documents(train, width), pad_documents(vali, width), pad_documents(parts["test"], width)


def split_by_fold(whole: RankingData, fold: int) -> Splits:
    """The parts of one fold of a single set of documents, by whole queries."""
    train, vali, test = (whole.take(rows) for rows in fold_rows(whole.queries, fold))
    return train, vali, test


def find_qrels(place: Path, qrels: str = "") -> Qrels | None:
    """The qrels that are named, or else those in the folder; None if there are none."""
    if qrels:
        return read_qrels([qrels])
    if place.is_dir() and (beside := sorted(f for f in place.iterdir() if is_qrels(f))):
        return read_qrels(map(str, beside))
    return None


def is_qrels(file: Path) -> bool:
    """Whether a file contains qrels, by its name."""
    return "qrels" in file.name.lower() and file.is_file()


def set_files(place: Path, fold: int | None = None) -> Parts | Path:
    """The files of a fold by part, or the one file of a set without parts."""
    if place.is_file():
        return place
    if place.is_dir() and not contains_data(place) and any(is_qrels(f) for f in place.iterdir()):
        others = [f for f in sorted(place.iterdir()) if f.is_file() and not is_qrels(f) and f.name[0] != "."]
        if len(others) != 1:
            there = ", ".join(f.name for f in others) or "none"
            raise ConfigError(f"{place} has qrels, and features in {there}; expected one file of features")
        return others[0]
    return locate_parts(place, fold)


def all_files(place: Path) -> list[Path]:
    """All files of a set, of all its folds, each once."""
    folds = all_folds(place)
    found = set_files(place, folds[0])
    if not isinstance(found, dict):
        return [found]
    files: dict[Path, None] = {}
    for fold in folds:
        for part in locate_parts(place, fold).values():
            files.update(dict.fromkeys(part))
    return list(files)


def read_ranking_file(file: Path, qrels: Qrels | None = None, cache: bool = True) -> RankingData:
    """Read a file with the qrels that belong to it, or the file beside it that counts each query's documents."""
    if file.suffix in SIZE_SUFFIXES:
        raise ConfigError(f"{file} counts documents; expected the file they are in, {file.with_suffix('')}")
    if qrels is not None:
        return read_with_qrels(file, qrels)
    sizes = find_sizes_file(file)
    if sizes is None:
        return read_letor(file, cache)
    return read_grouped(file, sizes)


def pad_documents(data: RankingData, width: int) -> RankingData:
    """The same documents with zeros for the features they lack."""
    if data.features == width:
        return data
    return RankingData(pad_features(data.x, width), data.grades, data.queries, data.query_ids)


def concatenate_files(sets: list[RankingData], files: tuple[Path, ...]) -> RankingData:
    """The contents of several files as one set; a query that stands in two of them is refused."""
    if len(sets) == 1:
        return sets[0]
    ids = np.concatenate([s.query_ids for s in sets])
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        twice = unique[counts > 1][0]
        raise ConfigError(f"query {twice} stands in two of {', '.join(map(str, files))}; expected in one")
    width = max(s.features for s in sets)
    offsets = np.cumsum([0] + [len(s.query_ids) for s in sets])
    return RankingData(
        np.concatenate([pad_features(s.x, width) for s in sets]),
        np.concatenate([s.grades for s in sets]),
        np.concatenate([s.queries + offset for s, offset in zip(sets, offsets, strict=False)]),
        ids,
    )


# LightGBM's and XGBoost's layout: rank.train has lines `GRADE INDEX:VALUE ...` without `qid`, features numbered from 0
# or 1; beside it rank.train.query, or .group, has the number of each query's documents, one a line. As in LightGBM,
# feature k is column k: where a file begins with 1, the first column is empty.


def find_sizes_file(file: Path) -> Path | None:
    """The file beside it that counts each query's documents, unless the lines themselves name the queries."""
    for suffix in SIZE_SUFFIXES:
        beside = file.with_name(file.name + suffix)
        if beside.is_file():
            if _has_queries(file):
                return None
            return beside
    return None


def read_grouped(file: Path, sizes: Path) -> RankingData:
    """Documents of a file without `qid`; queries are numbered from 1 in the order of their documents."""
    from sklearn.datasets import load_svmlight_file  # late: it takes a while to import

    counts = read_sizes(sizes)
    stat_file(file)
    try:
        with file.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            table, grades = load_svmlight_file(gzip.GzipFile(fileobj=raw) if packed else raw, zero_based=True)
    except (ValueError, OverflowError, EOFError, zlib.error, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{file} cannot be read ({reason}); expected 'GRADE INDEX:VALUE ...', indices from 0 ascending"
        ) from error
    if table.shape[1] > MOST_FEATURES + 1:
        raise ConfigError(f"{file}: feature {table.shape[1] - 1:,} is above {MOST_FEATURES:,}, the most there may be")
    if not np.isfinite(table.data).all() or np.abs(table.data).max(initial=0) > np.finfo(np.float32).max:
        raise ConfigError(f"{file} has values that are not finite float32 numbers")
    if not np.isin(grades, np.arange(MOST_GRADE + 1)).all():
        raise ConfigError(f"{file} has grades that are not whole numbers from 0 to {MOST_GRADE}")
    if (total := int(counts.sum())) != len(grades):
        raise ConfigError(f"{sizes} counts {total:,} documents, but {file} has {len(grades):,}: one of them is cut off")
    queries = np.repeat(np.arange(len(counts)), counts)
    x = table.astype(np.float32).toarray()
    return RankingData(x, grades.astype(np.int64), queries, np.arange(1, len(counts) + 1))


def read_sizes(file: Path) -> Ints:
    """The number of documents of each query, from a file with one number a line."""
    stat_file(file)
    counts: list[int] = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not (word.isdigit() and int(word[:9]) > 0 and len(word) < 10):
            raise ConfigError(f"{file}, line {number}: {quote_word(word)} is not a number of documents above 0")
        counts.append(int(word))
    if not counts:
        raise ConfigError(f"{file} is empty; expected a line with the number of documents for each query")
    return np.array(counts, np.int64)


def _has_queries(file: Path) -> bool:
    for text in read_text_blocks(file):
        return b" qid:" in text.split(b"\n", 1)[0]
    return False


def check_ranking(path: Path | str | None) -> list[str]:
    """What `mutirao data check` reports of a file, or of each file of a folder; everything is read, nothing cached."""
    if path is None:
        raise ConfigError(f"ranking data need a path: a file, or {LAYOUT}")
    place = Path(path)
    qrels = find_qrels(place)
    findings: list[str] = []
    for file in all_files(place):
        findings.append(f"{file}: {describe_documents(read_ranking_file(file, qrels, cache=False))}")
    return findings


def check_mslr(path: Path | str | None) -> list[str]:
    """The same for MSLR-WEB10K/30K; without a path, an example of the embedded stand-in."""
    if path is not None:
        return check_ranking(path)
    generated = mslr_like(50, np.random.default_rng(0))
    return [f"embedded stand-in, for example: {describe_documents(generated)}"]


def describe_documents(data: RankingData) -> str:
    """Numbers of documents, queries and features, and the share of each grade."""
    counts = np.bincount(data.grades)
    shares = ", ".join(f"{g}: {c / counts.sum():.1%}" for g, c in enumerate(counts) if c)
    return f"{len(data):,} documents of {len(data.query_ids):,} queries, {data.features:,} features, grades {shares}"
