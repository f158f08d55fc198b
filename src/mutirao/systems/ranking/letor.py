"""Ranking files as their publishers ship them: LETOR's and SVMlight's form, as MSLR-WEB10K/30K and MQ2007/8 have it.

A file is read once (`blocks`) and then kept as arrays that are mapped into memory (`cache`).
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
from mutirao.systems.ranking.letor_parsing import Floats, WrongLine, read_block
from mutirao.systems.ranking.missing_values import settle
from mutirao.systems.ranking.ranking_data import RankingData

BLOCK = 4 << 20
MOST_LINE = 64 << 20
ALIKE = 10  # so many lines with equally many features, and a last one with fewer that nothing ends: it was cut off
GROWTH = 64 << 20
MOST_BYTES = 1 << 28  # a table may take so much, or so many times its text: beyond, the text is sparse and the table
MOST_TIMES = 64  # would be mostly zeros
ARCHIVES = {b"PK\x03\x04": "zip", b"Rar!": "rar", b"7z\xbc\xaf": "7z"}  # as publishers ship them


def read_raw_letor(file: Path) -> RankingData:
    """Read a file in blocks into one table that grows in place: put together at the end it would need twice.

    It is as the file has it: documents without a judgement have the grade -1, features without a value are NaN.
    """
    x = np.zeros((0, 0), np.float32)
    grades, queries = [], []
    ids: dict[bytes, int] = {}
    lines = rows = letters = widest_line = 0
    least, most = 1 << 62, -1  # features a line, of all lines that a line break ends
    for text in read_text_blocks(file):
        try:
            block = read_block(text)
        except WrongLine as error:
            line, reason = error.args
            raise ConfigError(f"{file}, line {lines + line + 1}: {reason}") from error
        row = np.repeat(np.arange(len(block.counts)), block.counts)
        width = int(block.indices.max(initial=0))
        if width > x.shape[1]:
            widest_line = lines + int(block.lines[row[block.indices.argmax()]]) + 1
        width = max(width, x.shape[1])
        begin, rows = rows, rows + len(block.grades)
        ended = text.endswith(b"\n")
        lines, letters = lines + text.count(b"\n") + (not ended), letters + len(text)
        if (size := rows * width * 4) > max(MOST_BYTES, MOST_TIMES * letters):
            raise ConfigError(
                f"{file}, line {widest_line}: feature {width:,} makes a table of {rows:,} documents that takes "
                f"{size / 2**30:,.1f} GiB and is nearly all zeros; right would be features numbered from 1 "
                f"without large gaps"
            )
        counts = block.counts if ended else block.counts[:-1]
        least, most = int(counts.min(initial=least)), int(counts.max(initial=most))
        if not ended and rows > begin and block.counts[-1] < least == most and rows > ALIKE:
            raise ConfigError(
                f"{file}, line {lines}: it ends after {block.counts[-1]} features without a line end, the lines "
                f"before have {least}: the file is truncated"
            )
        if width > x.shape[1]:
            x = pad_features(x[:begin], width)
        if rows > len(x):
            x.resize((rows + GROWTH // (4 * max(1, width)), width), refcheck=False)  # what is new is zero
        x[begin + row, block.indices - 1] = block.values
        grades.append(block.grades)
        queries.append(np.array([ids.setdefault(name, len(ids)) for name in block.queries], np.int64))
    if not rows:
        raise ConfigError(f"{file} holds no documents; right would be a line 'GRADE qid:ID 1:VALUE ...' for each")
    if not x.shape[1]:
        raise ConfigError(
            f"{file} has no features in any of its {lines:,} lines; right would be 'GRADE qid:ID 1:VALUE ...'"
        )
    x.resize((rows, x.shape[1]), refcheck=False)
    return RankingData(x, np.concatenate(grades), np.concatenate(queries), _ids(ids))


def pad_features(x: Floats, width: int) -> Floats:
    """The same rows with zeros for the features they lack."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def stat_file(file: Path) -> os.stat_result:
    """Size and time of a file, or one line on why it is none that can be read."""
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; right would be a ranking file such as train.txt in it")
        return file.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def _ids(names: Iterable[bytes]) -> npt.NDArray[Any]:
    texts = [name.decode("utf-8") for name in names]
    if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array(texts)


def read_text_blocks(file: Path) -> Iterator[bytes]:
    """The content in blocks of whole lines, unpacked if it is gzipped; what goes wrong is said in one line."""
    lines = 0
    try:
        with file.open("rb") as raw:
            if kind := next((kind for mark, kind in ARCHIVES.items() if raw.peek(4).startswith(mark)), None):
                raise ConfigError(f"{file} is an archive ({kind}); right would be what it holds, unpacked")
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            while text := stream.read(BLOCK) + (rest := stream.readline(MOST_LINE)):
                first, lines = lines == 0, lines + text.count(b"\n")
                if len(rest) == MOST_LINE and not rest.endswith(b"\n"):
                    raise ConfigError(
                        f"{file}, line {lines + 1}: it is longer than {MOST_LINE >> 20} MiB: not ranking data"
                    )
                yield text.removeprefix(b"\xef\xbb\xbf") if first else text  # how some Windows programs mark UTF-8
    except EOFError as error:
        raise ConfigError(f"{file} is truncated: its gzip stream has no end") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


VERSION = 2  # of the cache
STALE = 3600.0  # seconds after which an unfinished cache has been given up
Arrays = dict[str, npt.NDArray[Any]]  # x, grades, queries, query_ids


def key_of(about: os.stat_result) -> str:
    """The name of a file's cache: another one for every change of the file."""
    return f"v{VERSION}-{about.st_size}-{about.st_mtime_ns}"


def places(file: Path) -> list[Path]:
    """Where what was read of a file may be kept, the best place first."""
    folders = [file.with_name(f"{file.name}.mutirao")]
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return folders
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    return [*folders, base / "mutirao" / "letor" / name]


def keep_arrays(arrays: Arrays, folder: Path, key: str) -> Arrays:
    """Put what was read into a cache, which appears under its name only once it is whole; OSError: it cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    try:
        part.mkdir()
        for name, value in arrays.items():
            np.save(part / f"{name}.npy", value, allow_pickle=False)
        facts = {name: _facts(value) for name, value in arrays.items()}
        (part / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        whole = folder / key
        try:
            part.rename(whole)
        except OSError:  # it is there: somebody else was faster, or it is damaged
            if map_arrays(whole) is None:
                if whole.is_dir():
                    shutil.rmtree(whole)
                else:
                    whole.unlink()
                part.rename(whole)
        found = map_arrays(whole)
        if found is None:
            raise OSError("it does not read back as it was written")
        _tidy(folder, key)
        return found
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # it is in use, as it should be
            folder.rmdir()


def map_arrays(folder: Path) -> Arrays | None:
    """The arrays of a cache, mapped into memory, if all of it is there and nothing in it has changed."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = {}
        for name in ("x", "grades", "queries", "query_ids"):
            value = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            if _facts(value) != facts[name]:
                raise ValueError(f"{name}.npy is not as it was written")
            arrays[name] = value
        return arrays
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a cache, it can be made again
        log.info("the cache %s is damaged and is made again: %s", folder, error)
        return None


def _facts(value: npt.NDArray[Any]) -> dict[str, Any]:
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": zlib.crc32(content)}


def _tidy(folder: Path, key: str) -> None:
    """Remove what was kept of earlier versions of the file, and what was never finished."""
    for child in folder.iterdir():
        old = re.fullmatch(r"v\d+-\d+-\d+", child.name) and child.name != key
        if child.name.startswith(".part-"):
            try:
                old = time.time() - child.stat().st_mtime > STALE
            except OSError:
                continue
        if old:
            shutil.rmtree(child, ignore_errors=True)


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
    about = stat_file(file)
    if not cache or not stat.S_ISREG(about.st_mode):
        return settle(read_raw_letor(file), file)
    key, folders = key_of(about), places(file)
    for folder in folders:
        if (found := map_arrays(folder / key)) is not None:
            return RankingData(**found)
    data = settle(read_raw_letor(file), file)
    if key != key_of(stat_file(file)):
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
