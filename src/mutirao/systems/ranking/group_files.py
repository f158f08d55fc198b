"""LightGBM's and XGBoost's layout: documents without `qid`, and beside them a file of how many each query has.

`rank.train` has lines `GRADE INDEX:VALUE ...`, with features numbered from 0 or 1; `rank.train.query`, or `.group`,
has a number a line. As in LightGBM, feature k is column k: where a file begins with 1, the first column is empty.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.systems.ranking import file_blocks
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE, Ints, quote
from mutirao.systems.ranking.ranking_data import RankingData

ENDINGS = (".query", ".group")


def sizes_beside(file: Path) -> Path | None:
    """The file that says how many documents each query has, if there is one and the lines do not say it."""
    beside = next((f for e in ENDINGS if (f := file.with_name(file.name + e)).is_file()), None)
    return None if beside is None or _has_queries(file) else beside


def read_grouped(file: Path, sizes: Path) -> RankingData:
    """Documents of a file without `qid`, whose queries are numbered from 1 as they follow each other."""
    from sklearn.datasets import load_svmlight_file  # late: it takes a while to import

    counts = read_sizes(sizes)
    file_blocks.stat_of(file)
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
    file_blocks.stat_of(file)
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
    for text in file_blocks.texts_of(file):
        return b" qid:" in text.split(b"\n", 1)[0]
    return False
