"""A ranking file read once, in blocks of whole lines and by several threads; its features go where they are wanted."""

import gzip
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.ranking.compiled import has_numba, scan_numba
from mutirao.ranking.parsing import Block, Floats, Ints, Reader, read_block, sparse_text, too_sparse, widen
from mutirao.ranking.vectorised import scan_numpy
from mutirao.training.cores import cores

BLOCK = 4 << 20
MOST_LINE = 64 << 20
SMALL = 8 << 20  # below, NumPy is done before numba is imported
ALIKE = 10  # so many lines with equally many features, and a last one with fewer that nothing ends: it was cut off
GROWTH = 64 << 20


class Columns(NamedTuple):
    """All of a file but its features."""

    width: int
    grades: Ints
    queries: Ints
    query_ids: npt.NDArray[Any]


class Sink(Protocol):
    """Takes the features block by block, each as wide as it happens to be."""

    def add(self, x: Floats) -> None:
        """Take some rows."""


def read(file: Path, scan: Reader, sink: Sink, threads: int = 0) -> Columns:
    """Read a file in blocks; the features go to `sink`, all else is put together here. 0 threads: two, if possible."""
    grades: list[Ints] = []
    codes: list[Ints] = []
    ids: dict[bytes, int] = {}
    size = BLOCK if scan is scan_numba else max(1, BLOCK // 8)  # NumPy is fastest within the processor's cache
    lines = rows = letters = width = widest_line = 0
    least, most = 1 << 62, -1  # features a line, of all lines that a line break ends
    with _opened(file) as stream:
        for block in _blocks(_texts(stream, file, size), scan, threads or min(2, cores())):
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
    return Columns(width, np.concatenate(grades), np.concatenate(codes), _ids(ids))


class InMemory:
    """Keeps the features in memory, in one table that grows in place: put together at the end they would need twice."""

    def __init__(self) -> None:
        self.x = np.zeros((0, 0), np.float32)
        self.rows = 0

    def add(self, x: Floats) -> None:
        """Put these rows below the others."""
        if x.shape[1] > self.x.shape[1]:
            self.x = widen(self.x[: self.rows], x.shape[1])
        end = self.rows + len(x)
        if end > len(self.x):
            spare = GROWTH // (4 * max(1, self.x.shape[1]))
            self.x.resize((end + spare, self.x.shape[1]), refcheck=False)  # what is new is zero
        self.x[self.rows : end, : x.shape[1]] = x
        self.rows = end

    def finish(self, width: int) -> Floats:
        """The table."""
        self.x.resize((self.rows, self.x.shape[1]), refcheck=False)
        return self.x if self.x.shape[1] == width else widen(self.x, width)


class Dropped:
    """Keeps nothing: for a look at a file."""

    def add(self, x: Floats) -> None:
        """Forget these rows."""


def reader_of(name: str, size: int) -> Reader:
    """The fast reader of that name; `auto` is the compiled one if it can be had and so many bytes are worth it."""
    if name not in ("auto", "numba", "numpy"):
        raise ConfigError(f"reader: {name!r} is not one of auto, numba, numpy")
    if name == "numba" and not has_numba():
        raise ConfigError("reader=numba: numba is not installed; reader=auto does without it")
    return scan_numba if name == "numba" or (name == "auto" and size > SMALL and has_numba()) else scan_numpy


def stat_of(file: Path) -> os.stat_result:
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

    def scanned(text: bytes) -> Block:
        nonlocal expected
        block = read_block(text, scan, expected)
        expected = max(expected, block.widest)
        return block

    if threads < 2:
        yield from map(scanned, texts)
        return
    waiting: deque[Future[Block]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="mutirao-letor") as pool:
        try:
            for text in texts:
                waiting.append(pool.submit(scanned, text))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for job in waiting:
                job.cancel()
