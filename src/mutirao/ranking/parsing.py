"""What a line of a ranking file means, and two fast ways to read many: compiled by numba, or NumPy on whole arrays.

`read_line` is the definition. A fast reader keeps only lines it is sure of and hands every other to `read_line`,
which understands it or says what is wrong. So both readers give the same numbers, bit for bit.
"""

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

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
            block.x = widened(block.x, top)
        block.x[row] = 0  # the fast reader may have come half way
        block.x[row, np.array(line.indices, np.intp) - 1] = line.values
        block.grades[row], block.counts[row] = line.grade, len(line.indices)
        names[row] = line.query
        fresh[row : row + 2] = True  # the row after was compared with what was not known yet
    heads = np.flatnonzero(fresh)
    spans = found.spans[heads].tolist()
    block.queries = [names.get(row) or text[a:b] for row, (a, b) in zip(heads.tolist(), spans, strict=True)]
    block.runs = np.diff(heads, append=len(fresh)).astype(np.int64)


def widened(x: Floats, width: int) -> Floats:
    """The same rows with zeros for the features they lack."""
    wide = np.zeros((len(x), width), np.float32)
    wide[:, : x.shape[1]] = x
    return wide


@functools.cache
def has_numba() -> bool:
    """Whether the compiled reader can be had; numba may be there and still refuse the NumPy it finds."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


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


def _scan(
    text: Any,
    x: Any,
    grades: Any,
    counts: Any,
    begins: Any,
    spans: Any,
    lines: Any,
    fresh: Any,
    sure: Any,
    seen: Any,
    powers: Any,
) -> Any:
    """Read a text that ends in a line break, byte by byte: this is compiled, and far too slow if it is not."""
    end, width = len(text), x.shape[1]
    i = row = line = widest = widest_line = 0
    wide = np.zeros(1)
    bits = wide.view(np.int64)
    last_a = last_b = 0  # where the name of the query before stands
    while i < end:
        c = text[i]
        if c == 32 or c == 9 or c == 13:
            i += 1
            continue
        if c == 10:
            line += 1
            i += 1
            continue
        if c == 35:
            while text[i] != 10:
                i += 1
            continue
        begins[row], lines[row] = i, line
        good, many, top = True, 0, 0
        # The grade: up to three digits.
        start, grade = i, 0
        while 48 <= text[i] <= 57 and i - start < 4:
            grade = grade * 10 + (text[i] - 48)
            i += 1
        good = start < i < start + 4 and grade <= MOST_GRADE and (text[i] == 32 or text[i] == 9)
        # The query: plain characters after "qid:". The text ends in a line break, so that looking ahead is safe
        # as long as every character before is as it should be.
        a = b = 0
        if good:
            while text[i] == 32 or text[i] == 9 or text[i] == 13:
                i += 1
            good = text[i] == 113 and text[i + 1] == 105 and text[i + 2] == 100 and text[i + 3] == 58
        if good:
            i += 4
            a = i
            while 33 <= text[i] <= 126 and text[i] != 35:
                i += 1
            b = i
            c = text[i]
            good = a < b <= a + MOST_ID and (c == 32 or c == 9 or c == 13 or c == 10 or c == 35)
        while good:
            while text[i] == 32 or text[i] == 9 or text[i] == 13:
                i += 1
            if text[i] == 10 or text[i] == 35:
                break
            start, index = i, 0
            while 48 <= text[i] <= 57 and i - start < 6:
                index = index * 10 + (text[i] - 48)
                i += 1
            if not start < i < start + 6 or text[i] != 58 or not 1 <= index <= MOST_FEATURES or seen[index] == row:
                good = False
                break
            seen[index] = row
            many += 1
            top = max(top, index)
            i += 1
            negative = text[i] == 45
            if negative or text[i] == 43:
                i += 1
            mantissa, exponent, start = 0, 0, i
            while 48 <= text[i] <= 57:
                if mantissa < MOST_MANTISSA:
                    mantissa = mantissa * 10 + (text[i] - 48)
                else:
                    exponent += 1
                i += 1
            digits = i - start
            if text[i] == 46:
                i += 1
                start = i
                while 48 <= text[i] <= 57:
                    if mantissa < MOST_MANTISSA:
                        mantissa = mantissa * 10 + (text[i] - 48)
                        exponent -= 1
                    i += 1
                digits += i - start
            if digits and (text[i] == 101 or text[i] == 69):
                i += 1
                down = text[i] == 45
                if down or text[i] == 43:
                    i += 1
                start, shift = i, 0
                while 48 <= text[i] <= 57:
                    if shift < 10_000:
                        shift = shift * 10 + (text[i] - 48)
                    i += 1
                if i == start:
                    digits = 0
                exponent += -shift if down else shift
            c = text[i]
            if not digits or not (c == 32 or c == 10 or c == 13 or c == 9 or c == 35):
                good = False
                break
            value = np.float64(mantissa)
            if mantissa and (exponent or mantissa > EXACT):
                if exponent < -80 or exponent > 80:
                    good = False
                    break
                if exponent < 0:
                    value /= powers[-exponent]
                else:
                    value *= powers[exponent]
                wide[0] = value
                off = (bits[0] & CUT) - HALF
                if -CLOSE <= off <= CLOSE or not SMALLEST < value < LARGEST:
                    good = False
                    break
            if index <= width:
                x[row, index - 1] = np.float32(-value if negative else value)
        while text[i] != 10:
            i += 1
        new = not good or b - a != last_b - last_a
        k = 0
        while not new and k < b - a:
            new = text[a + k] != text[last_a + k]
            k += 1
        fresh[row], sure[row], grades[row], counts[row] = new, good, grade, many
        spans[row, 0], spans[row, 1] = a, b
        last_a, last_b = a, b
        if good and top > widest:
            widest, widest_line = top, line
        row += 1
    return row, widest, widest_line


@functools.cache
def _compiled() -> Any:
    """The compiled scan; numba keeps it on disk, so that only the first process ever waits for it."""
    numba: Any = importlib.import_module("numba")
    try:
        return numba.njit(nogil=True, cache=True)(_scan)
    except RuntimeError:  # nowhere to keep it
        return numba.njit(nogil=True)(_scan)


def scan_numba(text: Bytes, x: Floats) -> Found:
    """Read a block with the compiled scan, which lets other threads run."""
    most = int(np.count_nonzero(text == 10))
    grades, counts, begins, lines = np.zeros((4, most), np.int64)
    spans = np.zeros((most, 2), np.int64)
    fresh, sure = np.zeros((2, most), np.bool_)
    seen = np.full(MOST_FEATURES + 1, -1, np.int64)
    columns = (grades, counts, begins, spans, lines, fresh, sure)
    rows, widest, widest_line = _compiled()(text, x, *columns, seen, POWERS)
    fresh[:1] = True
    found = Found(*columns, widest, widest_line)
    return found._replace(**{name: getattr(found, name)[:rows] for name in Found._fields[: len(columns)]})


# What a byte can be. The blanks come first, so that one comparison tells words from what is between them.
BLANK, BREAK, DIGIT, COLON, DOT, SIGN, E, TEXT, WILD = range(9)
KIND = np.full(256, WILD, np.uint8)
KIND[33:127] = TEXT
for _kind, _letters in ((BLANK, b" \t\r"), (BREAK, b"\n"), (DIGIT, b"0123456789"), (COLON, b":"), (DOT, b".")):
    KIND[list(_letters)] = _kind
KIND[list(b"+-")] = SIGN
KIND[list(b"eE")] = E


def scan_numpy(text: Bytes, x: Floats) -> Found:
    """Read a block with whole-array operations only: slower than the compiled scan, and always there."""
    kind = KIND[text]
    breaks = np.flatnonzero(kind == BREAK)
    _blank_comments(text, kind, breaks)
    edges = np.flatnonzero(np.diff(kind > BREAK, prepend=False))  # the last byte is a break, so that words are whole
    starts, ends = edges[0::2], edges[1::2]
    line_of_word = np.searchsorted(breaks, starts)
    words = np.bincount(line_of_word, minlength=len(breaks))
    lines = np.flatnonzero(words)
    words = words[lines]
    firsts = np.cumsum(words) - words
    row_of_word = np.repeat(np.arange(len(lines)), words)
    sure = np.ones(len(lines), np.bool_)
    sure[row_of_word[np.searchsorted(starts, np.flatnonzero(kind == WILD), "right") - 1]] = False

    grades, plain = _whole(text, kind, starts[firsts], ends[firsts], 3)
    sure &= plain & (grades <= MOST_GRADE) & (words > 1)
    seconds = np.where(words > 1, firsts + 1, firsts)
    spans = np.stack([starts[seconds] + 4, ends[seconds]], axis=1)
    length = spans[:, 1] - spans[:, 0]
    sure &= (length > 0) & (length <= MOST_ID)
    for k, letter in enumerate(b"qid:"):
        sure &= text[np.minimum(starts[seconds] + k, len(text) - 1)] == letter

    is_feature = np.ones(len(starts), np.bool_)
    is_feature[firsts] = is_feature[seconds] = False
    sure[row_of_word[_bad_words(kind, starts, is_feature)]] = False
    kept = np.flatnonzero(is_feature & sure[row_of_word])
    row, start, end = row_of_word[kept], starts[kept], ends[kept]
    colons = np.flatnonzero(kind == COLON)
    colon = colons[np.searchsorted(colons, start)] if len(kept) else start
    index, plain = _whole(text, kind, start, colon, 5)
    sure[row[~plain | (index < 1) | (index > MOST_FEATURES)]] = False
    value, known = _values(text, kind, colon + 1, end)
    sure[row[~known]] = False
    sure[row[_repeated(row, index)]] = False

    use = sure[row]
    row, index, value = row[use], index[use], value[use]
    widest = int(index.max(initial=0))
    widest_line = int(lines[row[index.argmax()]]) if len(index) else 0
    inside = index <= x.shape[1]
    x[row[inside], index[inside] - 1] = value[inside]
    counts = np.bincount(row, minlength=len(lines))
    fresh = _fresh(text, spans, sure)
    return Found(grades, counts, starts[firsts], spans, lines, fresh, sure, widest, widest_line)


def _blank_comments(text: Bytes, kind: Bytes, breaks: Ints) -> None:
    """Make comments blank: from the first `#` of a line to its end."""
    marks = np.flatnonzero(text == ord("#"))
    if len(marks):
        line, first = np.unique(np.searchsorted(breaks, marks), return_index=True)
        change = np.zeros(len(text), np.int8)
        change[marks[first]] = 1
        change[breaks[line]] = -1
        kind[np.cumsum(change, dtype=np.int8) > 0] = BLANK


def _bad_words(kind: Bytes, starts: Ints, is_feature: Mask) -> Ints:
    """Features with a character that no number has, or without exactly one colon."""
    odd = np.searchsorted(starts, np.flatnonzero(kind == TEXT), "right") - 1
    colons = np.bincount(np.searchsorted(starts, np.flatnonzero(kind == COLON), "right") - 1, minlength=len(starts))
    return np.concatenate([odd[is_feature[odd]], np.flatnonzero(is_feature & (colons != 1))])


def _whole(text: Bytes, kind: Bytes, start: Ints, end: Ints, most: int) -> tuple[Ints, Mask]:
    """Whole numbers of 1 to `most` digits, and which of them really are such numbers."""
    length = end - start
    plain = (length > 0) & (length <= most)
    number = np.zeros(len(start), np.int64)
    for k in range(most):
        live = np.flatnonzero(plain & (length > k))
        if not len(live):
            break
        at = start[live] + k
        number[live] = number[live] * 10 + (text[at].astype(np.int64) - 48)
        plain[live] &= kind[at] == DIGIT
    return number, plain


def _values(text: Bytes, kind: Bytes, start: Ints, end: Ints) -> tuple[Floats, Mask]:
    """The numbers between `start` and `end`, and which of them really are finite numbers."""
    known = start < end
    signed = known & (kind[start] == SIGN)
    negative = signed & (text[start] == ord("-"))
    begin = start + signed
    dots = np.append(np.flatnonzero(kind == DOT), len(text))
    dot = np.minimum(dots[np.searchsorted(dots, begin)], end)
    number, whole = _digits(text, kind, begin, dot)
    after = np.minimum(dot + 1, end)
    fraction, part = _digits(text, kind, after, end)
    places = end - after
    plain = known & whole & part & (dot - begin + places > 0) & (dot - begin + places <= 18)
    places = np.where(plain, places, 0)
    mantissa = np.where(plain, number, 0) * 10**places + fraction
    wide = mantissa / POWERS[places]
    off = (wide.view(np.int64) & CUT) - HALF
    certain = (mantissa == 0) | ((places == 0) & (mantissa <= EXACT)) | ((np.abs(off) > CLOSE) & (wide > SMALLEST))
    value = np.where(negative, -wide, wide).astype(np.float32)
    for k in np.flatnonzero(known & ~(plain & certain)).tolist():  # exponents, very many digits, half way
        word = text[start[k] : end[k]].tobytes()
        known[k] = NUMBER.fullmatch(word) is not None
        value[k] = nearest_float32(word) if known[k] else 0
    known &= np.isfinite(value)
    return value, known


def _digits(text: Bytes, kind: Bytes, start: Ints, end: Ints) -> tuple[Ints, Mask]:
    """Strings of digits as numbers, none at all being 0, and which of them hold nothing but digits."""
    length = end - start
    plain = length <= 18
    number = np.zeros(len(start), np.int64)
    live = np.flatnonzero(plain & (length > 0))
    k = 0
    while len(live):
        at = start[live] + k
        number[live] = number[live] * 10 + (text[at].astype(np.int64) - 48)
        plain[live] &= kind[at] == DIGIT
        k += 1
        live = live[length[live] > k]
    return number, plain


def _repeated(row: Ints, index: Ints) -> Ints:
    """Which features name an index that their row has named before."""
    key = row * (10**6) + index  # an index has five digits at most
    if np.all(np.diff(key) > 0):
        return np.zeros(0, np.int64)
    order = np.argsort(key, kind="stable")
    again: Ints = order[1:][np.diff(key[order]) == 0]
    return again


def _fresh(text: Bytes, spans: Ints, sure: Mask) -> Mask:
    """Where another query starts; a row that is not sure counts as one."""
    length = spans[:, 1] - spans[:, 0]
    fresh = np.ones(len(spans), np.bool_)
    fresh[1:] = ~sure[1:] | ~sure[:-1] | (length[1:] != length[:-1])
    live = np.flatnonzero(~fresh)
    k = 0
    while len(live):
        fresh[live] = text[spans[live, 0] + k] != text[spans[live - 1, 0] + k]
        k += 1
        live = live[~fresh[live] & (length[live] > k)]
    return fresh
