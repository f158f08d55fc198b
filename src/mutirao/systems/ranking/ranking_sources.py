"""A ranking set from wherever it is: a folder of any layout, one file, features with judgements apart.

What clients train on, what chooses and what judges come out of it as three sets of equally many features.
"""

import gzip
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.datasets.locations import find_data
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.ranking.letor import pad_features, read_letor, read_text_blocks, stat_file
from mutirao.systems.ranking.letor_layouts import LAYOUT, Parts, all_folds, holds, locate
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE, Ints, quote
from mutirao.systems.ranking.qrels import Judgements, read_judged, read_judgements
from mutirao.systems.ranking.query_partition import fold_rows
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.synthetic_queries import mslr_like

ENDINGS = (".query", ".group")


def sizes_beside(file: Path) -> Path | None:
    """The file that says how many documents each query has, if there is one and the lines do not say it."""
    beside = next((f for e in ENDINGS if (f := file.with_name(file.name + e)).is_file()), None)
    return None if beside is None or _has_queries(file) else beside


def read_grouped(file: Path, sizes: Path) -> RankingData:
    """Documents of a file without `qid`, whose queries are numbered from 1 as they follow each other."""
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
            f"{file} cannot be read ({reason}); right would be 'GRADE INDEX:VALUE ...', indices from 0 ascending"
        ) from error
    if table.shape[1] > MOST_FEATURES + 1:
        raise ConfigError(f"{file}: feature {table.shape[1] - 1:,} is above {MOST_FEATURES:,}, the most there may be")
    if not np.isfinite(table.data).all() or np.abs(table.data).max(initial=0) > np.finfo(np.float32).max:
        raise ConfigError(f"{file} has values that are not finite numbers float32 can hold")
    if not np.isin(grades, np.arange(MOST_GRADE + 1)).all():
        raise ConfigError(f"{file} has grades that are not whole numbers from 0 to {MOST_GRADE}")
    if (total := int(counts.sum())) != len(grades):
        raise ConfigError(f"{sizes} counts {total:,} documents, but {file} has {len(grades):,}: one of them is cut off")
    queries = np.repeat(np.arange(len(counts)), counts)
    x = table.astype(np.float32).toarray()
    return RankingData(x, grades.astype(np.int64), queries, np.arange(1, len(counts) + 1))


def read_sizes(file: Path) -> Ints:
    """How many documents each query has, from a file with one number a line."""
    stat_file(file)
    counts = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        word = line.strip()
        if word and not (word.isdigit() and int(word[:9]) > 0 and len(word) < 10):
            raise ConfigError(f"{file}, line {number}: {quote(word)} is not how many documents a query has")
        if word:
            counts.append(int(word))
    if not counts:
        raise ConfigError(f"{file} is empty; right would be a line with the number of documents for each query")
    return np.array(counts, np.int64)


def _has_queries(file: Path) -> bool:
    for text in read_text_blocks(file):
        return b" qid:" in text.split(b"\n", 1)[0]
    return False


log = logging.getLogger("mutirao")

HELD_OUT = 5  # where a set has no validation part, every fifth query of the training part is it

Three = tuple[RankingData, RankingData, RankingData]


def load_parts(config: Any) -> Three:
    """Training, validation and test part of the data that a recipe's configuration names; `generated` are made."""
    if config.data != "generated":
        return read_parts(find_data(config.data), config.fold or None, config.qrels)
    return cut(mslr_like(config.queries, rng(config.seed, 0, "generated")), config.fold or 1)


def read_parts(path: Path | str, fold: int | None = None, qrels: str = "", cache: bool = True) -> Three:
    """Training, validation and test part of a ranking set.

    A folder is read as its publisher ships it (`mutirao.systems.ranking.letor_layouts`). The queries of one file are
    cut into five folds, as they follow each other. `qrels` are judgements in place of the file's own grades: a file, or
    `irds:NAME`; without it, files in the folder that have "qrels" in their names.
    """
    place = Path(path)
    judged = judgements_for(place, qrels)
    if not isinstance(found := files_of(place, fold), dict):
        return cut(read_one(found, judged, cache), fold or 1)
    parts = {part: join([read_one(file, judged, cache) for file in files], files) for part, files in found.items()}
    if "vali" not in parts:
        held = parts["train"].queries % HELD_OUT == HELD_OUT - 1
        if not held.any():
            raise ConfigError(f"{place} has no validation part, and too few queries to hold some out: at least 5")
        parts["train"], parts["vali"] = (parts["train"].take(np.flatnonzero(rows)) for rows in (~held, held))
        log.info("%s has no validation part: every fifth query of its training part is held out for it", place)
    width = max(part.features for part in parts.values())
    train, vali, test = (widen(parts[name], width) for name in ("train", "vali", "test"))
    return train, vali, test


def cut(whole: RankingData, fold: int) -> Three:
    """The parts of a fold of one set of documents, by whole queries."""
    train, vali, test = (whole.take(rows) for rows in fold_rows(whole.queries, fold))
    return train, vali, test


def judgements_for(place: Path, qrels: str = "") -> Judgements | None:
    """Judgements that are apart from the features, if there are any."""
    beside = sorted(f for f in place.iterdir() if is_qrels(f)) if place.is_dir() else []
    sources = [qrels] if qrels else [str(file) for file in beside]
    return read_judgements(sources) if sources else None


def files_of(place: Path, fold: int | None = None) -> Parts | Path:
    """The files of a fold's parts, or the one file that a set is."""
    if place.is_file():
        return place
    if place.is_dir() and not holds(place) and any(is_qrels(f) for f in place.iterdir()):
        others = [f for f in sorted(place.iterdir()) if f.is_file() and not is_qrels(f) and f.name[0] != "."]
        if len(others) != 1:
            there = ", ".join(f.name for f in others) or "none"
            raise ConfigError(f"{place} has judgements, and features in {there}; right would be one file of features")
        return others[0]
    return locate(place, fold)


def every_file(place: Path) -> list[Path]:
    """All files of a set, of all its folds."""
    if not isinstance(found := files_of(place, all_folds(place)[0]), dict):
        return [found]
    return list(dict.fromkeys(f for n in all_folds(place) for files in locate(place, n).values() for f in files))


def is_qrels(file: Path) -> bool:
    """Whether a file has judgements, by its name."""
    return "qrels" in file.name.lower() and file.is_file()


def read_one(file: Path, judged: Judgements | None = None, cache: bool = True) -> RankingData:
    """Read a file by what stands beside it: judgements, a file of how many documents each query has, or nothing."""
    if file.suffix in ENDINGS:
        raise ConfigError(f"{file} counts documents; right would be the file they are in, {file.with_suffix('')}")
    if judged is not None:
        return read_judged(file, judged)
    sizes = sizes_beside(file)
    return read_letor(file, cache) if sizes is None else read_grouped(file, sizes)


def widen(data: RankingData, width: int) -> RankingData:
    """The same documents with zeros for the features they lack."""
    if data.features == width:
        return data
    return RankingData(pad_features(data.x, width), data.grades, data.queries, data.query_ids)


def join(sets: list[RankingData], files: tuple[Path, ...]) -> RankingData:
    """Several files as one, of which no query is in two."""
    if len(sets) == 1:
        return sets[0]
    ids = np.concatenate([s.query_ids for s in sets])
    if len(names := np.unique(ids, return_counts=True)[1]) < len(ids):
        twice = np.unique(ids)[names > 1][0]
        raise ConfigError(f"query {twice} stands in two of {', '.join(map(str, files))}; right would be in one")
    width, firsts = max(s.features for s in sets), np.cumsum([0] + [len(s.query_ids) for s in sets])
    return RankingData(
        np.concatenate([pad_features(s.x, width) for s in sets]),
        np.concatenate([s.grades for s in sets]),
        np.concatenate([s.queries + first for s, first in zip(sets, firsts, strict=False)]),
        ids,
    )


def check_ranking(path: Path | str | None) -> list[str]:
    """What a file, or each file of a folder, holds; everything is read, nothing is kept."""
    if path is None:
        raise ConfigError(f"ranking data need a path: a file, or {LAYOUT}")
    place = Path(path)
    judged = judgements_for(place)
    return [f"{file}: {describe_documents(read_one(file, judged, cache=False))}" for file in every_file(place)]


def check_mslr(path: Path | str | None) -> list[str]:
    """The same for MSLR-WEB10K/30K; without a path, what the stand-in looks like."""
    if path is not None:
        return check_ranking(path)
    made = mslr_like(50, np.random.default_rng(0))
    return [f"embedded stand-in, for example: {describe_documents(made)}"]


def describe_documents(data: RankingData) -> str:
    """Numbers of documents, queries and features, and the share of each grade."""
    counts = np.bincount(data.grades)
    shares = ", ".join(f"{g}: {c / counts.sum():.1%}" for g, c in enumerate(counts) if c)
    return f"{len(data):,} documents of {len(data.query_ids):,} queries, {data.features:,} features, grades {shares}"
