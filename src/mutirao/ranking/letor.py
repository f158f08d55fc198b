"""Ranking files as their publishers ship them: LETOR's and SVMlight's form, as MSLR-WEB10K/30K and MQ2007/8 have it.

A file is read once, in blocks and by several threads, and then kept as arrays that are mapped into memory: beside
the file, or in the user's cache folder if nothing may be written there.
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
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.ranking.parsing import (
    Block,
    Floats,
    Ints,
    Reader,
    has_numba,
    read_block,
    scan_numba,
    scan_numpy,
    sparse_text,
    too_sparse,
    widened,
)

log = logging.getLogger("mutirao")

BLOCK = 4 << 20
MOST_LINE = 64 << 20
SMALL = 8 << 20  # below, NumPy is done before numba is imported
ALIKE = 10  # so many lines with equally many features, and a last one with fewer that nothing ends: it was cut off
GROWTH = 64 << 20
VERSION = 1  # of the cache
STALE = 3600.0  # seconds after which an unfinished cache has been given up
PARTS = {"train": ("train",), "vali": ("vali", "valid", "val", "validation"), "test": ("test",)}
LAYOUT = "a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)"


@dataclass(frozen=True, eq=False)
class RankingData:
    """Documents by rows: features, grades, and the query of each as a number into `query_ids`.

    Queries are numbered as they first appear; their ids are whole numbers if all of them are, or else text.
    """

    x: Floats
    grades: Ints
    queries: Ints
    query_ids: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.grades)

    @property
    def features(self) -> int:
        """How many features a document has."""
        return int(self.x.shape[1])

    def take(self, rows: npt.ArrayLike) -> "RankingData":
        """Only these documents, and only the queries they belong to.

        >>> data = RankingData(np.zeros((3, 2), np.float32), np.arange(3), np.array([0, 0, 1]), np.array([7, 9]))
        >>> data.take([2]).query_ids, data.take([2]).queries
        (array([9]), array([0]))
        """
        at = np.asarray(rows)
        used, queries = np.unique(self.queries[at], return_inverse=True)
        return RankingData(self.x[at], self.grades[at], queries.astype(np.int64), self.query_ids[used])


def load(
    path: Path | str,
    cache: bool = True,
    *,
    reader: Literal["auto", "numba", "numpy"] = "auto",
    threads: int = 0,
) -> RankingData:
    """Read a file of lines `GRADE qid:ID 1:VALUE 2:VALUE ... # comment`, plain or gzipped.

    Features that a line leaves out are 0; a wrong line is refused with its number. With `cache`, what was read is
    kept and mapped into memory (copy-on-write) by later calls, until the file's size or time changes. `reader` is
    compiled by numba where it is installed and the file is large, or made of NumPy; both give the same bits.
    `threads` = 0 takes two, or one on a single core. Qin and Liu, "Introducing LETOR 4.0 Datasets", 2013.
    """
    file = Path(path)
    about = _stat(file)
    scan = _reader(reader, about.st_size)
    workers = threads or min(2, _cores())
    if cache and stat.S_ISREG(about.st_mode):
        key = f"v{VERSION}-{about.st_size}-{about.st_mtime_ns}"
        for folder in _cache_folders(file):
            if (found := _open(folder / key)) is not None:
                return found
        for folder in _cache_folders(file):
            try:
                return _build(file, folder, key, scan, workers)
            except OSError as error:
                log.info("cannot keep %s in %s: %s", file, folder, error.strerror or error)
        log.warning("%s is read without a cache: no folder for it can be written", file)
    sink = _Kept()
    columns = _read(file, scan, workers, sink)
    return RankingData(sink.finish(columns.width), columns.grades, columns.queries, columns.query_ids)


def folds(
    path: Path | str, fold: int | None = None, cache: bool = True
) -> tuple[RankingData, RankingData, RankingData]:
    """Training, validation and test set of one fold, all with equally many features.

    `path` is the folder that holds Fold1 to Fold5, or one such folder itself; `fold` is 1 if nothing is said.
    """
    sets = [load(file, cache) for file in locate(Path(path), fold).values()]
    width = max(s.features for s in sets)
    train, vali, test = (
        s if s.features == width else RankingData(widened(s.x, width), s.grades, s.queries, s.query_ids) for s in sets
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


def check(path: Path | str | None) -> list[str]:
    """What a file, or each fold of a folder, holds; everything is read, nothing is kept."""
    if path is None:
        raise ConfigError(f"ranking data need a path: a file, or {LAYOUT}")
    place = Path(path)
    if place.is_file():
        return [_describe(place)]
    numbers: list[int | None] = [*_fold_folders(place)] if place.is_dir() else []
    files = [file for n in numbers or [None] for file in locate(place, n).values()]
    return [_describe(file) for file in files]


def check_mslr(path: Path | str | None) -> list[str]:
    """The same for MSLR-WEB10K/30K; without a path, what the stand-in looks like."""
    if path is not None:
        return check(path)
    from mutirao.ranking.generate import mslr_like

    made = mslr_like(50, np.random.default_rng(0))
    return [
        f"embedded stand-in, for example: {_facts(_Columns(made.features, made.grades, made.queries, made.query_ids))}"
    ]


def _describe(file: Path) -> str:
    columns = _read(file, _reader("auto", _stat(file).st_size), min(2, _cores()), _Dropped())
    return f"{file}: {_facts(columns)}"


def _facts(columns: "_Columns") -> str:
    counts = np.bincount(columns.grades)
    shares = ", ".join(f"{g}: {c / counts.sum():.1%}" for g, c in enumerate(counts) if c)
    return (
        f"{len(columns.grades):,} documents of {len(columns.query_ids):,} queries, {columns.width:,} features, "
        f"grades {shares}"
    )


def write(path: Path | str, data: RankingData) -> None:
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


class _Columns(NamedTuple):
    """All of a file but its features."""

    width: int
    grades: Ints
    queries: Ints
    query_ids: npt.NDArray[Any]


class _Sink(Protocol):
    """Takes the features block by block, each as wide as it happens to be."""

    def add(self, x: Floats) -> None: ...


def _read(file: Path, scan: Reader, threads: int, sink: _Sink) -> _Columns:
    """Read a file in blocks; the features go to `sink`, all else is put together here."""
    grades: list[Ints] = []
    codes: list[Ints] = []
    ids: dict[bytes, int] = {}
    size = BLOCK if scan is scan_numba else max(1, BLOCK // 8)  # NumPy is fastest within the processor's cache
    lines = rows = letters = width = widest_line = 0
    least, most = 1 << 62, -1  # features a line, of all lines that a line break ends
    with _opened(file) as stream:
        for block in _blocks(_texts(stream, file, size), scan, threads):
            if block.problem is not None:
                raise ConfigError(f"{file}, line {lines + block.problem[0] + 1}: {block.problem[1]}")
            if block.widest > width:
                width, widest_line = block.widest, lines + block.widest_line + 1
            lines, rows, letters = lines + block.lines, rows + len(block.grades), letters + block.size
            if too_sparse(rows, width, letters):
                raise ConfigError(f"{file}, line {widest_line}: {sparse_text(rows, width)}")
            counts = block.counts if block.cut is None else block.counts[:-1]
            least, most = int(counts.min(initial=least)), int(counts.max(initial=most))
            if block.cut is not None and block.cut < least == most and rows > ALIKE:
                raise ConfigError(
                    f"{file}, line {lines}: it ends after {block.cut} features without a line end, the lines before "
                    f"have {least}: the file is truncated"
                )
            sink.add(block.x)
            grades.append(block.grades)
            numbers = [ids.setdefault(name, len(ids)) for name in block.queries]
            codes.append(np.repeat(np.array(numbers, np.int64), block.runs))
    if not rows:
        raise ConfigError(f"{file} holds no documents; right would be a line 'GRADE qid:ID 1:VALUE ...' for each")
    if not width:
        raise ConfigError(
            f"{file} has no features in any of its {lines:,} lines; right would be 'GRADE qid:ID 1:VALUE ...'"
        )
    return _Columns(width, np.concatenate(grades), np.concatenate(codes), _ids(ids))


def _ids(names: Iterable[bytes]) -> npt.NDArray[Any]:
    texts = [name.decode("utf-8") for name in names]
    if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array(texts)


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked if it is gzipped; what goes wrong while it is read is said in one line."""
    try:
        raw = file.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    with raw:
        try:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            yield gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[misc]
        except EOFError as error:
            raise ConfigError(f"{file} is truncated: its gzip stream has no end") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{file} is damaged: {error}") from error


def _texts(stream: IO[bytes], file: Path, block: int) -> Iterator[bytes]:
    """The content in blocks of whole lines."""
    rest: list[bytes] = []
    lines, first = 0, True
    while piece := _piece(stream, file, max(block, 3) if first else block):
        if first and piece.startswith(b"\xef\xbb\xbf"):  # how some Windows programs mark UTF-8
            piece = piece[3:]
        first = False
        cut = piece.rfind(b"\n") + 1
        if not cut:
            rest.append(piece)
            if sum(map(len, rest)) > MOST_LINE:
                raise ConfigError(
                    f"{file}, line {lines + 1}: it is longer than {MOST_LINE >> 20} MiB: not ranking data"
                )
            continue
        text = b"".join([*rest, piece[:cut]])
        rest = [piece[cut:]] if cut < len(piece) else []
        lines += text.count(b"\n")
        yield text
    if any(rest):
        yield b"".join(rest)


def _piece(stream: IO[bytes], file: Path, size: int) -> bytes:
    """The next bytes; a source that cannot be read is the user's matter, a cache that cannot be written is not."""
    try:
        return stream.read(size)
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def _blocks(texts: Iterator[bytes], scan: Reader, threads: int) -> Iterator[Block]:
    """The blocks in order, read by several threads, never many at a time."""
    expected = 0

    def read(text: bytes) -> Block:
        nonlocal expected
        block = read_block(text, scan, expected)
        expected = max(expected, block.widest)
        return block

    if threads < 2:
        yield from map(read, texts)
        return
    waiting: deque[Future[Block]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="mutirao-letor") as pool:
        try:
            for text in texts:
                waiting.append(pool.submit(read, text))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for job in waiting:
                job.cancel()


def _reader(name: str, size: int) -> Reader:
    if name not in ("auto", "numba", "numpy"):
        raise ConfigError(f"reader: {name!r} is not one of auto, numba, numpy")
    if name == "numba" and not has_numba():
        raise ConfigError("reader=numba: numba is not installed; reader=auto does without it")
    return scan_numba if name == "numba" or (name == "auto" and size > SMALL and has_numba()) else scan_numpy


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stat(file: Path) -> os.stat_result:
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; right would be a ranking file such as train.txt in it")
        return file.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


class _Dropped:
    """Keeps nothing: for a look at a file."""

    def add(self, x: Floats) -> None:
        pass


class _Kept:
    """Keeps the features in memory, in one table that grows in place: put together at the end they would need twice."""

    def __init__(self) -> None:
        self.x = np.zeros((0, 0), np.float32)
        self.rows = 0

    def add(self, x: Floats) -> None:
        if x.shape[1] > self.x.shape[1]:
            self.x = widened(self.x[: self.rows], x.shape[1])
        end = self.rows + len(x)
        if end > len(self.x):
            spare = GROWTH // (4 * max(1, self.x.shape[1]))
            self.x.resize((end + spare, self.x.shape[1]), refcheck=False)  # what is new is zero
        self.x[self.rows : end, : x.shape[1]] = x
        self.rows = end

    def finish(self, width: int) -> Floats:
        """The table."""
        self.x.resize((self.rows, self.x.shape[1]), refcheck=False)
        return self.x if self.x.shape[1] == width else widened(self.x, width)


class _Spilled:
    """Writes the features to x.npy as they come; only if later blocks are wider they are written a second time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = file.open("w+b")
        self.stream.write(_header((0, 0)))
        self.widths: list[int] = []
        self.rows: list[int] = []
        self.sum = 0

    def add(self, x: Floats) -> None:
        if not self.widths or self.widths[-1] != x.shape[1]:
            self.widths.append(x.shape[1])
            self.rows.append(0)
        self.rows[-1] += len(x)
        content = np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8).data
        self.sum = zlib.crc32(content, self.sum)
        self.stream.write(content)

    def finish(self, width: int) -> dict[str, Any]:
        """Complete the file; what it holds."""
        total = sum(self.rows)
        if self.widths != [width]:
            return self._widened(width).finish(width)
        self.stream.seek(0)
        self.stream.write(_header((total, width)))
        self.stream.close()
        return {"shape": [total, width], "dtype": "<f4", "crc32": self.sum}

    def _widened(self, width: int) -> "_Spilled":
        self.stream.close()
        narrow = self.file.rename(self.file.with_name("narrow.npy"))
        wide = _Spilled(self.file)
        step = max(1, BLOCK // (4 * width))
        with narrow.open("rb") as stream:
            stream.seek(len(_header((0, 0))))
            for own, rows in zip(self.widths, self.rows, strict=True):
                for at in range(0, rows, step):
                    many = min(step, rows - at)
                    x = np.frombuffer(stream.read(many * own * 4), "<f4").reshape(many, own)
                    wide.add(widened(x, width))
        narrow.unlink()
        return wide


def _header(shape: tuple[int, int]) -> bytes:
    """A header of the .npy format, version 1.0, whose length does not depend on the shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode("ascii") + b"\n"


def _cache_folders(file: Path) -> list[Path]:
    """Where what was read of a file may be kept, the best place first."""
    folders = [file.with_name(f"{file.name}.mutirao")]
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return folders
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    return [*folders, base / "mutirao" / "letor" / name]


def _build(file: Path, folder: Path, key: str, scan: Reader, threads: int) -> RankingData:
    """Read a file into a cache; it appears under its name only once it is whole. OSError: it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    part.mkdir()
    try:
        sink = _Spilled(part / "x.npy")
        with sink.stream:
            columns = _read(file, scan, threads, sink)
            features = sink.finish(columns.width)
        about = _stat(file)
        if key != f"v{VERSION}-{about.st_size}-{about.st_mtime_ns}":
            raise ConfigError(f"{file} was changed while it was read; try again once it is whole")
        facts = {"x": features}
        for name in ("grades", "queries", "query_ids"):
            value = getattr(columns, name)
            np.save(part / f"{name}.npy", value, allow_pickle=False)
            facts[name] = {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": _crc(value)}
        (part / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        whole = folder / key
        try:
            part.rename(whole)
        except OSError:  # it is there: somebody else was faster, or it is damaged
            if _open(whole) is None:
                if whole.is_dir():
                    shutil.rmtree(whole)
                else:
                    whole.unlink()
                part.rename(whole)
        found = _open(whole)
        if found is None:
            raise OSError("it does not read back as it was written")
        _tidy(folder, key)
        return found
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _remove_if_empty(folder)


def _open(folder: Path) -> RankingData | None:
    """The arrays of a cache, mapped into memory, if all of it is there and nothing in it has changed."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = {}
        for name in ("x", "grades", "queries", "query_ids"):
            value = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            now = {"shape": list(value.shape), "dtype": value.dtype.str, "crc32": _crc(value)}
            if now != facts[name]:
                raise ValueError(f"{name}.npy is not as it was written")
            arrays[name] = value
        return RankingData(**arrays)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a cache, it can be made again
        log.info("the cache %s is damaged and is made again: %s", folder, error)
        return None


def _crc(value: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


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


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # it is in use, as it should be
        return
