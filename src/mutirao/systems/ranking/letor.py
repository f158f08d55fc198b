"""Ranking files as their publishers ship them: LETOR's and SVMlight's form, as MSLR-WEB10K/30K and MQ2007/8 have it.

A file is read once (`blocks`) and then kept as arrays that are mapped into memory (`cache`).
"""

import gzip
import logging
import stat
from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.systems.ranking import file_blocks
from mutirao.systems.ranking.letor_parsing import Floats
from mutirao.systems.ranking.missing_values import settle
from mutirao.systems.ranking.parsed_cache import keep_arrays, key_of, map_arrays, places
from mutirao.systems.ranking.ranking_data import RankingData

log = logging.getLogger("mutirao")


def read_letor(path: Path | str, cache: bool = True) -> RankingData:
    r"""Read a file of lines `GRADE qid:ID 1:VALUE 2:VALUE ... # comment`, plain or gzipped.

    Features that a line leaves out are 0; a wrong line is refused with its number; NULL, documents that nobody judged
    (grade -1) and orders in place of grades are settled (`mutirao.systems.ranking.missing_values`). With `cache`, what
    was read is kept and mapped into memory (copy-on-write) by later calls, until the file's size or time changes. Qin
    and Liu, "Introducing LETOR 4.0 Datasets", 2013.

    >>> _ = Path("train.txt").write_text("2 qid:10 1:0.5 2:0.1 # d1\n0 qid:10 1:0.2 # d2\n1 qid:20 2:0.9\n")
    >>> data = read_letor("train.txt", cache=False)
    >>> data.grades, data.query_ids, data.x
    (array([2, 0, 1]), array([10, 20]), array([[0.5, 0.1],
           [0.2, 0. ],
           [0. , 0.9]], dtype=float32))
    """
    file = Path(path)
    about = file_blocks.stat_of(file)
    if not cache or not stat.S_ISREG(about.st_mode):
        return settle(file_blocks.read_file(file), file)
    key, folders = key_of(about), places(file)
    for folder in folders:
        if (found := map_arrays(folder / key)) is not None:
            return RankingData(**found)
    data = settle(file_blocks.read_file(file), file)
    if key != key_of(file_blocks.stat_of(file)):
        raise ConfigError(f"{file} was changed while it was read; try again once it is whole")
    for folder in folders:
        try:
            return RankingData(**keep_arrays(vars(data), folder, key))
        except OSError as error:
            log.info("cannot keep %s in %s: %s", file, folder, error.strerror or error)
    log.warning("%s is read without a cache: no folder for it can be written", file)
    return data


def write_letor(path: Path | str, data: RankingData) -> None:
    """Write a LETOR file, gzipped if its name ends in .gz; reading it back gives the same numbers.

    >>> from mutirao.systems.ranking.synthetic_queries import mslr_like
    >>> data = mslr_like(3, np.random.default_rng(0), documents=5)
    >>> write_letor("small.txt.gz", data)
    >>> bool((read_letor("small.txt.gz", cache=False).grades == data.grades).all())
    True
    """
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
