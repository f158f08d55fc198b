"""A ranking file read once, in blocks of whole lines."""

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_parsing import Floats, WrongLine, read_block
from mutirao.systems.ranking.ranking_data import RankingData

BLOCK = 4 << 20
MOST_LINE = 64 << 20
ALIKE = 10  # so many lines with equally many features, and a last one with fewer that nothing ends: it was cut off
GROWTH = 64 << 20
MOST_BYTES = 1 << 28  # a table may take so much, or so many times its text: beyond, the text is sparse and the table
MOST_TIMES = 64  # would be mostly zeros
ARCHIVES = {b"PK\x03\x04": "zip", b"Rar!": "rar", b"7z\xbc\xaf": "7z"}  # as publishers ship them


def read_file(file: Path) -> RankingData:
    """Read a file in blocks into one table that grows in place: put together at the end it would need twice.

    It is as the file has it: documents without a judgement have the grade -1, features without a value are NaN.
    """
    x = np.zeros((0, 0), np.float32)
    grades, queries = [], []
    ids: dict[bytes, int] = {}
    lines = rows = letters = widest_line = 0
    least, most = 1 << 62, -1  # features a line, of all lines that a line break ends
    for text in texts_of(file):
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
            x = widen(x[:begin], width)
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


def widen(x: Floats, width: int) -> Floats:
    """The same rows with zeros for the features they lack."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


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


def texts_of(file: Path) -> Iterator[bytes]:
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
