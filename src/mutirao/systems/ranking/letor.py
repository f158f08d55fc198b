"""Ranking files as their publishers ship them: LETOR's and SVMlight's format, as MSLR-WEB10K/30K and MQ2007/8 use it.

A file is read once, in blocks of whole lines. Its arrays are cached beside it and mapped into memory by later calls.
"""

import gzip
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_parsing import InvalidLine, clean_data, parse_block
from mutirao.systems.ranking.ranking_data import Floats, Ints, RankingData

log = logging.getLogger("mutirao")

BLOCK = 4 << 20
MOST_LINE = 64 << 20
EQUAL_LINES = 10  # after so many lines with equally many features, a shorter last line without a line end was cut off
GROWTH = 64 << 20
# A table may take MOST_BYTES, or MOST_TIMES its text: beyond that the text is sparse, and the table is mostly zeros.
MOST_BYTES = 1 << 28
MOST_TIMES = 64
ARCHIVES = {b"PK\x03\x04": "zip", b"Rar!": "rar", b"7z\xbc\xaf": "7z"}  # as publishers ship them

VERSION = 2  # of the cache
STALE = 3600.0  # seconds after which an unfinished cache is abandoned
Arrays = dict[str, npt.NDArray[Any]]  # x, grades, queries, query_ids


def read_letor(path: Path | str, cache: bool = True) -> RankingData:
    r"""Read a file of lines `GRADE qid:ID 1:VALUE 2:VALUE ... # comment`, plain or gzipped.

    Features that a line leaves out are 0, and an invalid line is refused with its number. Missing values (NULL),
    documents without a label (grade -1) and orders in place of grades are resolved by
    `mutirao.systems.ranking.letor_parsing`. With `cache`, the arrays are stored and mapped into memory (copy-on-write)
    by later calls, until the file's size or time changes. Qin and Liu, "Introducing LETOR 4.0 Datasets", 2013.

    >>> _ = Path("train.txt").write_text("2 qid:10 1:0.5 2:0.1 # d1\n0 qid:10 1:0.2 # d2\n1 qid:20 2:0.9\n")
    >>> data = read_letor("train.txt", cache=False)
    >>> data.grades, data.query_ids, data.x
    (array([2, 0, 1]), array([10, 20]), array([[0.5, 0.1],
           [0.2, 0. ],
           [0. , 0.9]], dtype=float32))
    """
    file = Path(path)
    about = stat_file(file)
    if not cache or not stat.S_ISREG(about.st_mode):
        return clean_data(read_raw_letor(file), file)
    key = cache_key(about)
    folders = cache_folders(file)
    for folder in folders:
        if (found := load_mapped_arrays(folder / key)) is not None:
            return RankingData(**found)
    data = clean_data(read_raw_letor(file), file)
    # Arrays of a file that is still being written would be cached under the wrong key.
    if key != cache_key(stat_file(file)):
        raise ConfigError(f"{file} was changed while it was read; try again once it is complete")
    for folder in folders:
        try:
            return RankingData(**store_arrays(vars(data), folder, key))
        except OSError as error:
            log.info("cannot cache %s in %s: %s", file, folder, error.strerror or error)
    log.warning("%s is read without a cache: no folder for it can be written", file)
    return data


def read_raw_letor(file: Path) -> RankingData:
    """The documents as they stand in the file: without a label the grade is -1, without a value a feature is NaN."""
    # The table grows in place: blocks that are concatenated at the end would take twice the memory.
    x = np.zeros((0, 0), np.float32)
    grades: list[Ints] = []
    queries: list[Ints] = []
    ids: dict[bytes, int] = {}
    lines = rows = letters = widest_line = 0
    least = 1 << 62  # fewest features a line, over all lines with a line end
    most = -1
    for text in read_text_blocks(file):
        try:
            block = parse_block(text)
        except InvalidLine as error:
            line, reason = error.args
            raise ConfigError(f"{file}, line {lines + line + 1}: {reason}") from error
        row = np.repeat(np.arange(len(block.counts)), block.counts)
        width = int(block.indices.max(initial=0))
        if width > x.shape[1]:
            widest_line = lines + int(block.lines[row[block.indices.argmax()]]) + 1
        width = max(width, x.shape[1])
        begin = rows
        rows += len(block.grades)
        ended = text.endswith(b"\n")
        lines += text.count(b"\n") + (not ended)
        letters += len(text)
        if rows * width * 4 > max(MOST_BYTES, MOST_TIMES * letters):
            raise ConfigError(f"{file}, line {widest_line}: {_too_sparse(rows, width)}")
        # A last line without a line end may have been cut off, so it says nothing of how long lines are.
        counts = block.counts
        if not ended:
            counts = counts[:-1]
        least = int(counts.min(initial=least))
        most = int(counts.max(initial=most))
        if not ended and rows > begin and block.counts[-1] < least == most and rows > EQUAL_LINES:
            raise ConfigError(
                f"{file}, line {lines}: it ends after {block.counts[-1]} features without a line end, the lines "
                f"before have {least}: the file is truncated"
            )
        if width > x.shape[1]:
            x = pad_features(x[:begin], width)
        if rows > len(x):
            x.resize((rows + GROWTH // (4 * max(1, width)), width), refcheck=False)  # new rows are zeros
        x[begin + row, block.indices - 1] = block.values
        grades.append(block.grades)
        queries.append(np.array([ids.setdefault(name, len(ids)) for name in block.queries], np.int64))
    if not rows:
        raise ConfigError(f"{file} contains no documents; expected a line 'GRADE qid:ID 1:VALUE ...' for each")
    if not x.shape[1]:
        raise ConfigError(f"{file} has no features in any of its {lines:,} lines; expected 'GRADE qid:ID 1:VALUE ...'")
    x.resize((rows, x.shape[1]), refcheck=False)
    return RankingData(x, np.concatenate(grades), np.concatenate(queries), _ids(ids))


def _too_sparse(rows: int, width: int) -> str:
    return (
        f"feature {width:,} makes a table of {rows:,} documents that takes {rows * width * 4 / 2**30:,.1f} GiB and is "
        "nearly all zeros; expected features numbered from 1 without large gaps"
    )


def pad_features(x: Floats, width: int) -> Floats:
    """The same rows with zeros for the features they lack."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def stat_file(file: Path) -> os.stat_result:
    """Size and modification time of a file; ConfigError if it cannot be read."""
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; expected a ranking file such as train.txt in it")
        return file.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def _ids(names: Iterable[bytes]) -> npt.NDArray[Any]:
    texts = [name.decode("utf-8") for name in names]
    if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array(texts)


def read_text_blocks(file: Path) -> Iterator[bytes]:
    """The content in blocks of whole lines, unpacked if it is gzipped; ConfigError if it is damaged."""
    lines = 0
    try:
        with file.open("rb") as raw:
            for mark, kind in ARCHIVES.items():
                if raw.peek(4).startswith(mark):
                    raise ConfigError(f"{file} is an archive ({kind}); expected its content, unpacked")
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            while text := stream.read(BLOCK) + (rest := stream.readline(MOST_LINE)):
                is_first = lines == 0
                lines += text.count(b"\n")
                if len(rest) == MOST_LINE and not rest.endswith(b"\n"):
                    raise ConfigError(
                        f"{file}, line {lines + 1}: it is longer than {MOST_LINE >> 20} MiB: not ranking data"
                    )
                # Some Windows programs begin a file with a byte order mark.
                if is_first:
                    text = text.removeprefix(b"\xef\xbb\xbf")
                yield text
    except EOFError as error:
        raise ConfigError(f"{file} is truncated: its gzip stream has no end") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def cache_key(about: os.stat_result) -> str:
    """The name of a file's cache, which changes with the file."""
    return f"v{VERSION}-{about.st_size}-{about.st_mtime_ns}"


def cache_folders(file: Path) -> list[Path]:
    """Folders in which a file's arrays may be cached, in order of preference: beside it, then in the user's cache."""
    folders = [file.with_name(f"{file.name}.mutirao")]
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has a relative path ignored.
    try:
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return folders
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    return [*folders, base / "mutirao" / "letor" / name]


def store_arrays(arrays: Arrays, folder: Path, key: str) -> Arrays:
    """Write a cache, atomically, and return its arrays mapped into memory; OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    try:
        # Written under another name and renamed, so that no process ever reads an incomplete cache.
        part.mkdir()
        for name, value in arrays.items():
            np.save(part / f"{name}.npy", value, allow_pickle=False)
        facts = {name: _facts(value) for name, value in arrays.items()}
        (part / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        whole = folder / key
        try:
            part.rename(whole)
        except OSError:  # it exists: another process was faster, or it is damaged
            if load_mapped_arrays(whole) is None:
                if whole.is_dir():
                    shutil.rmtree(whole)
                else:
                    whole.unlink()
                part.rename(whole)
        found = load_mapped_arrays(whole)
        if found is None:
            raise OSError("it does not read back as it was written")
        _tidy(folder, key)
        return found
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # not empty, as it should be
            folder.rmdir()


def load_mapped_arrays(folder: Path) -> Arrays | None:
    """The arrays of a cache, mapped into memory; None if it is incomplete or damaged."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays: Arrays = {}
        for name in ("x", "grades", "queries", "query_ids"):
            # Copy-on-write: processes share the memory, and none can change the cache.
            value = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            if _facts(value) != facts[name]:
                raise ValueError(f"{name}.npy is not as it was written")
            arrays[name] = value
        return arrays
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a cache, it can be rebuilt
        log.info("the cache %s is damaged and is rebuilt: %s", folder, error)
        return None


def _facts(value: npt.NDArray[Any]) -> dict[str, Any]:
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": zlib.crc32(content)}


def _tidy(folder: Path, key: str) -> None:
    """Remove caches of earlier versions of the file, and unfinished ones."""
    for child in folder.iterdir():
        old = re.fullmatch(r"v\d+-\d+-\d+", child.name) and child.name != key
        if child.name.startswith(".part-"):
            try:
                old = time.time() - child.stat().st_mtime > STALE
            except OSError:
                continue
        if old:
            shutil.rmtree(child, ignore_errors=True)


def write_letor(path: Path | str, data: RankingData) -> None:
    """Write a LETOR file, gzipped if its name ends in .gz; reading it back gives the same numbers.

    >>> from mutirao.systems.ranking.synthetic_queries import mslr_like
    >>> data = mslr_like(3, np.random.default_rng(0), documents=5)
    >>> write_letor("small.txt.gz", data)
    >>> bool((read_letor("small.txt.gz", cache=False).grades == data.grades).all())
    True
    """
    file = Path(path)
    # Renamed when it is complete, so that no incomplete file ever has the name.
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
    """Each float32 in the fewest digits that round-trip: seven for most, nine for all."""
    numbers = row.tolist()
    words = [f"{v:.7g}" for v in numbers]
    for k in np.flatnonzero(np.array(words, np.float64).astype(np.float32) != row).tolist():
        words[k] = f"{numbers[k]:.9g}"
    return words
