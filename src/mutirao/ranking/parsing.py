"""What a line of a ranking file means, and how a fast reader may read many of them.

`read_line` is the definition. A fast reader (`compiled` by numba, or `vectorised` in NumPy) keeps only lines it is sure
of and hands every other to `read_line`, which understands it or says what is wrong. So both give the same numbers, bit
for bit.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_FEATURES = 10_000
MOST_GRADE = 255
MOST_ID = 256  # bytes
MOST_BYTES = 1 << 28  # a table may take so much, or so many times its text: beyond, the text is sparse and the table
MOST_TIMES = 64  # would be mostly zeros

BEYOND = 2.0**128  # the number after float32's largest, which stands for infinity when numbers are rounded
FORM = "GRADE qid:ID 1:VALUE 2:VALUE ..."
NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
INDEX = re.compile(rb"\d{1,5}")
BLANKS = bytes.maketrans(b"\t\r", b"  ")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class Line(NamedTuple):
    """A document: its grade, the name of its query, and its features in the order of the line."""

    grade: int
    query: bytes
    indices: list[int]
    values: list[float]


def read_line(line: bytes) -> Line:
    """The meaning of a line that is not blank; ValueError says what is wrong with it and what would be right.

    >>> read_line(b"2 qid:10 1:0.5 3:-1e2 # a comment")
    Line(grade=2, query=b'10', indices=[1, 3], values=[0.5, -100.0])
    """
    words = [w for w in line.partition(b"#")[0].translate(BLANKS).split(b" ") if w]
    grade = _grade(words[0])
    if len(words) < 2 or not words[1].startswith(b"qid:"):
        raise ValueError(f"no 'qid:' stands after the grade; right would be {FORM!r}")
    query = _query(words[1][4:])
    indices, values = [], []
    for word in words[2:]:
        index, colon, value = word.partition(b":")
        if not colon:
            raise ValueError(f"{shown(word)} is not of the form INDEX:VALUE; right would be {FORM!r}")
        if not INDEX.fullmatch(index) or not 1 <= int(index) <= MOST_FEATURES:
            raise ValueError(f"feature {shown(index)} is not a whole number from 1 to {MOST_FEATURES:,}")
        indices.append(int(index))
        values.append(_value(value, indices[-1]))
    if len(set(indices)) < len(indices):
        twice = next(i for k, i in enumerate(indices) if i in indices[:k])
        raise ValueError(f"feature {twice} stands in the line twice; right would be once")
    return Line(grade, query, indices, values)


def shown(word: bytes) -> str:
    """A word of the file as a message can show it, short and on one line."""
    return repr(word[:40].decode("utf-8", "replace")) + ("..." if len(word) > 40 else "")


def _grade(word: bytes) -> int:
    right = f"right would be a whole number from 0 to {MOST_GRADE}"
    if not NUMBER.fullmatch(word):
        raise ValueError(f"the line starts with {shown(word)}, which is not a grade; right would be {FORM!r}")
    value = float(word)
    if value < 0:
        raise ValueError(f"grade {shown(word)} is negative; {right}")
    if value > MOST_GRADE or value != int(value):
        raise ValueError(f"grade {shown(word)} cannot be used; {right}")
    return int(value)


def _query(name: bytes) -> bytes:
    if not name:
        raise ValueError(f"'qid:' has no name after it; right would be {FORM!r}")
    if len(name) > MOST_ID:
        raise ValueError(f"the query's name {shown(name)} has {len(name):,} bytes; right would be at most {MOST_ID}")
    try:
        fine = name.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        fine = False
    if not fine:
        raise ValueError(f"the query's name {shown(name)} is not printable text in UTF-8")
    return name


def _value(word: bytes, index: int) -> float:
    if not NUMBER.fullmatch(word):
        bare = word.lstrip(b"+-").lower()
        if bare.startswith((b"nan", b"inf")):
            raise ValueError(f"feature {index} is {shown(word)}; right would be a finite number, or to leave it out")
        raise ValueError(f"feature {index} has {shown(word)} for a value; right would be a number such as 0.25")
    value = nearest_float32(word)
    if not np.isfinite(value):
        raise ValueError(
            f"feature {index} is {shown(word)}; right would be a number below 3.4e38, which float32 can hold"
        )
    return float(value)


def nearest_float32(word: bytes) -> np.float32:
    """The float32 nearest to a decimal number, ties to even.

    The way through float64 rounds twice, which goes wrong if the float64 lies half way between two float32:
    only then the decimal number itself decides.
    """
    wide = float(word)
    with np.errstate(over="ignore", under="ignore"):
        near = np.float32(wide)
        if float(near) == wide:
            return near
        other = np.nextafter(near, np.float32(np.inf if wide > float(near) else -np.inf), dtype=np.float32)
    if sum(max(-BEYOND, min(float(v), BEYOND)) for v in (near, other)) / 2 != wide:
        return near
    exact, middle = Decimal(word.decode("ascii")), Decimal(wide)
    if exact == middle:
        return near
    return max(near, other) if exact > middle else min(near, other)


# A decimal number of up to 18 digits is mantissa x 10^exponent, which float64 gives to within two units in its last
# place. Its float32 is then certain unless the float64 comes that close to half way between two of them: the lowest
# 29 bits of its 53 are cut off, so half way is a 1 followed by 28 zeros. Who comes closer than CLOSE is not sure.
MOST_MANTISSA = 10**17
POWERS = np.array([float(f"1e{k}") for k in range(81)])
CUT = (1 << 29) - 1
HALF = 1 << 28
CLOSE = 8
EXACT = 1 << 53  # whole numbers up to here are exact in float64, and rounded only once
SMALLEST, LARGEST = 1.2e-38, 3.4e38  # within float32's normal numbers


@dataclass
class Block:
    """Some lines of a file, read: their documents, and what is wrong with the first line that is not right."""

    x: Floats
    grades: Ints
    counts: Ints  # features written in each line
    queries: list[bytes]  # the queries as they come ...
    runs: Ints  # ... and how many documents in a row each has
    lines: int
    size: int  # bytes of text
    cut: int | None = None  # features of the last line, if nothing ends it
    widest: int = 0  # the largest index of a feature
    widest_line: int = 0  # counted within the block, from 0
    problem: tuple[int, str] | None = None


class Found(NamedTuple):
    """What a fast reader makes of a block: a row for every line that is not blank, whether sure of it or not."""

    grades: Ints
    counts: Ints
    begins: Ints  # where each row starts in the text
    spans: Ints  # where the name of its query starts and ends
    lines: Ints  # on which line of the block it stands
    fresh: Mask  # whether its query is another than that of the row before
    sure: Mask
    widest: int
    widest_line: int


Reader = Callable[[Bytes, Floats], Found]


def read_block(text: bytes, reader: Reader, width: int = 0) -> Block:
    """Read whole lines; `width` is how many features are expected, it saves a second pass if it is right."""
    ended = text.endswith(b"\n")
    if not ended:
        text += b"\n"
    lines = most = text.count(b"\n")
    letters = np.frombuffer(text, np.uint8)
    if too_sparse(lines, width, len(text)):
        width = 0  # what is expected comes from elsewhere and does not suit these lines
    while True:
        x = np.zeros((most, width), np.float32)
        found = reader(letters, x)
        if found.widest <= width:
            break
        most, width = len(found.grades), found.widest
        if too_sparse(most, width, len(text)):
            wrong = found.widest_line, sparse_text(most, width)
            return Block(
                x[:0], found.grades[:0], found.counts[:0], [], found.lines[:0], lines, len(text), problem=wrong
            )
    block = Block(
        x=x[: len(found.grades)],
        grades=found.grades,
        counts=found.counts,
        queries=[],
        runs=np.zeros(0, np.int64),
        lines=lines,
        size=len(text),
        widest=found.widest,
        widest_line=found.widest_line,
    )
    _read_odd(text, found, block)
    if not ended and len(found.lines) and found.lines[-1] == lines - 1:
        block.cut = int(block.counts[-1])
    return block


def too_sparse(rows: int, width: int, size: int) -> bool:
    """Whether a table would be so much larger than the text that it holds next to nothing but zeros."""
    return rows * width * 4 > max(MOST_BYTES, MOST_TIMES * size)


def sparse_text(rows: int, width: int) -> str:
    """Why a text that sparse is refused."""
    return (
        f"feature {width:,} makes a table of {rows:,} documents that takes {rows * width * 4 / 2**30:,.1f} GiB and is "
        f"nearly all zeros; right would be features numbered from 1 without large gaps"
    )


def _read_odd(text: bytes, found: Found, block: Block) -> None:
    """Let the definition read what the fast reader was not sure of, up to the first line that is wrong."""
    names: dict[int, bytes] = {}
    fresh = found.fresh.copy()
    for row in np.flatnonzero(~found.sure).tolist():
        begin, at = int(found.begins[row]), int(found.lines[row])
        try:
            line = read_line(text[begin : text.index(b"\n", begin)])
        except ValueError as error:
            block.problem = at, str(error)
            return
        top = max(line.indices, default=0)
        if top > block.widest:
            block.widest, block.widest_line = top, at
        if top > block.x.shape[1]:
            if too_sparse(len(block.x), top, len(text)):
                block.problem = at, sparse_text(len(block.x), top)
                return
            block.x = widen(block.x, top)
        block.x[row] = 0  # the fast reader may have come half way
        block.x[row, np.array(line.indices, np.intp) - 1] = line.values
        block.grades[row], block.counts[row] = line.grade, len(line.indices)
        names[row] = line.query
        fresh[row : row + 2] = True  # the row after was compared with what was not known yet
    heads = np.flatnonzero(fresh)
    spans = found.spans[heads].tolist()
    block.queries = [names.get(row) or text[a:b] for row, (a, b) in zip(heads.tolist(), spans, strict=True)]
    block.runs = np.diff(heads, append=len(fresh)).astype(np.int64)


def widen(x: Floats, width: int) -> Floats:
    """The same rows with zeros for the features they lack."""
    wide = np.zeros((len(x), width), np.float32)
    wide[:, : x.shape[1]] = x
    return wide
