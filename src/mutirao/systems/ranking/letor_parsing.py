"""Parsing lines of ranking files: a definition line by line, and a quick parser for blocks of plain lines.

`parse_line` is the definition. `parse_plain_lines` reads blocks of plain lines only and leaves every other block to
`parse_line`, which parses it or raises. So both give the same numbers, bit for bit.

Features without a value, documents without a label and orders in place of grades are filled in. After this,
LETOR's NULL variants and its semi-supervised and listwise sets are used like all others.
"""

import itertools
import logging
import math
import re
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking.ranking_data import Floats, Ints, RankingData


def read_numbers(text: bytes, count: int) -> npt.NDArray[np.float64] | None:
    """So many decimal numbers, a line each; None if there are more or fewer, or if one is only a sign or a point.

    SciPy's reader of Matrix Market files is the fastest there is among what we depend on. It looks no further than to
    the end of a number and forgets the sign of -0, so who calls makes sure of the rest.
    """
    from scipy.io import mmread

    if not count:  # which SciPy divides by
        return np.zeros(0)
    try:
        found = mmread(BytesIO(b"%%%%MatrixMarket matrix array real general\n%d 1\n" % count + text))
    except ValueError:
        return None
    return np.asarray(found, np.float64).reshape(-1)


MOST_FEATURES = 10_000
MOST_GRADE = 255
MOST_PLACE = 1_000_000  # some files have a position in an order instead of a grade
MOST_ID = 256  # bytes

UNLABELLED = -1  # the grade of a document without a label, as in LETOR's semi-supervised sets
MISSING = (b"NULL", b"1.79769313486e+308")  # a feature without a value, as LETOR and Istella write it: NaN when read

BEYOND = 2.0**128  # the number after float32's largest, which stands for infinity when numbers are rounded
FORM = "GRADE qid:ID 1:VALUE 2:VALUE ..."
NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
INDEX = re.compile(rb"\d{1,5}")
BLANKS = bytes.maketrans(b"\t\r", b"  ")
QUERY = re.compile(rb" qid:([!-~]{1,256})(?=[ \n])")  # of at most MOST_ID bytes
EXPONENT = re.compile(rb"(?<=[\d.])[eE][+-]?\d+(?=[ \n])")
CUT = (1 << 29) - 1  # the bits that float32 cuts off float64 ...
HALF = 1 << 28  # ... and what they are half way between two float32
SMALLEST = 1.2e-38  # within float32's normal numbers
LARGEST = 3.4e38
# What the quick parser puts in place of -1 and NULL; a file that contains them itself is parsed by line.
NO_GRADE = b"1000001"
NO_VALUE = b"7e307"


class InvalidLine(ValueError):
    """The number of a line, from 0, and what is wrong with it."""


class ParsedBlock(NamedTuple):
    """Documents of some lines: grades, names of queries, and features; document i has `counts[i]` of them."""

    lines: Ints  # on which line each document stands, from 0
    grades: Ints
    queries: list[bytes]
    counts: Ints
    indices: Ints
    values: Floats


class ParsedLine(NamedTuple):
    """A document: its grade, the name of its query, and its features in the order of the line."""

    grade: int
    query: bytes
    indices: list[int]
    values: list[float]


def parse_line(line: bytes) -> ParsedLine:
    """Parse a line that is not blank; ValueError says what is wrong with it and what was expected.

    >>> parse_line(b"2 qid:10 1:0.5 3:-1e2 # a comment")
    ParsedLine(grade=2, query=b'10', indices=[1, 3], values=[0.5, -100.0])
    """
    words = [w for w in line.partition(b"#")[0].translate(BLANKS).split(b" ") if w]
    grade = _grade(words[0])
    if len(words) < 2 or not words[1].startswith(b"qid:"):
        raise ValueError(f"no 'qid:' stands after the grade; expected {FORM!r}")
    query = _query(words[1][4:])
    indices: list[int] = []
    values: list[float] = []
    for word in words[2:]:
        index, colon, value = word.partition(b":")
        if not colon:
            raise ValueError(f"{quote_word(word)} is not of the form INDEX:VALUE; expected {FORM!r}")
        if not INDEX.fullmatch(index) or not 1 <= int(index) <= MOST_FEATURES:
            raise ValueError(f"feature {quote_word(index)} is not a whole number from 1 to {MOST_FEATURES:,}")
        indices.append(int(index))
        values.append(_value(value, indices[-1]))
    if len(set(indices)) < len(indices):
        twice = next(i for k, i in enumerate(indices) if i in indices[:k])
        raise ValueError(f"feature {twice} stands in the line twice; expected once")
    return ParsedLine(grade, query, indices, values)


def quote_word(word: bytes) -> str:
    """A word of the file as a message can show it, short and on one line."""
    shown = repr(word[:40].decode("utf-8", "replace"))
    if len(word) > 40:
        shown += "..."
    return shown


def _grade(word: bytes) -> int:
    right = f"expected a whole number from 0 to {MOST_GRADE}"
    if not NUMBER.fullmatch(word):
        raise ValueError(f"the line starts with {quote_word(word)}, which is not a grade; expected {FORM!r}")
    value = float(word)
    if value < 0 and value != UNLABELLED:
        raise ValueError(f"grade {quote_word(word)} is negative; {right}, or -1 for a document without a label")
    if value > MOST_PLACE or value != int(value):
        raise ValueError(f"grade {quote_word(word)} cannot be used; {right}")
    return int(value)


def _query(name: bytes) -> bytes:
    if not name:
        raise ValueError(f"'qid:' has no name after it; expected {FORM!r}")
    if len(name) > MOST_ID:
        raise ValueError(f"the query's name {quote_word(name)} has {len(name):,} bytes; expected at most {MOST_ID}")
    try:
        fine = name.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        fine = False
    if not fine:
        raise ValueError(f"the query's name {quote_word(name)} is not printable text in UTF-8")
    return name


def _value(word: bytes, index: int) -> float:
    if word in MISSING:
        return math.nan
    if not NUMBER.fullmatch(word):
        bare = word.lstrip(b"+-").lower()
        if bare.startswith((b"nan", b"inf")):
            raise ValueError(f"feature {index} is {quote_word(word)}; expected a finite number, or to leave it out")
        raise ValueError(f"feature {index} has {quote_word(word)} for a value; expected a number such as 0.25")
    value = nearest_float32(word)
    if not np.isfinite(value):
        raise ValueError(
            f"feature {index} is {quote_word(word)}; expected a number below 3.4e38, which float32 can hold"
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
    exact = Decimal(word.decode("ascii"))
    middle = Decimal(wide)
    if exact == middle:
        return near
    if exact > middle:
        return max(near, other)
    return min(near, other)


def parse_block(text: bytes) -> ParsedBlock:
    """Parse whole lines; InvalidLine names the first that is wrong."""
    return parse_plain_lines(text) or parse_lines(text)


def parse_lines(text: bytes) -> ParsedBlock:
    """Parse a block line by line."""
    numbers: list[int] = []
    rows: list[ParsedLine] = []
    for number, line in enumerate(text.split(b"\n")):
        if line.partition(b"#")[0].strip(b" \t\r"):
            try:
                rows.append(parse_line(line))
            except ValueError as error:
                raise InvalidLine(number, str(error)) from error
            numbers.append(number)
    return ParsedBlock(
        np.array(numbers, np.int64),
        np.array([row.grade for row in rows], np.int64),
        [row.query for row in rows],
        np.array([len(row.indices) for row in rows], np.int64),
        np.fromiter(itertools.chain.from_iterable(row.indices for row in rows), np.int64),
        np.fromiter(itertools.chain.from_iterable(row.values for row in rows), np.float32),
    )


def parse_plain_lines(text: bytes) -> ParsedBlock | None:
    """The same for lines with single blanks and numbers such as -0.25 or 1e-05; None if any line is not so plain.

    Without its digits a plain line is a mark for its query and a blank and a colon for each feature.
    """
    if b"#" in text:
        text = re.sub(rb"#[^\n]*", b"", text)
    if not text.endswith(b"\n"):
        text += b"\n"
    text = text.translate(BLANKS)
    text = text.replace(b"  \n", b"\n").replace(b" \n", b"\n")
    text, unlabelled, gaps = _mark_gaps(text)
    queries = QUERY.findall(text)
    text = QUERY.sub(b"q", text)
    short = text
    if b"e" in text or b"E" in text:
        short = EXPONENT.sub(b"", text)
    bare = short.translate(None, b"0123456789")
    rows = len(queries)
    many = bare.count(b":")
    # Whatever is not plain is left to `parse_line`: no features at all, an index that begins with 0, a minus anywhere
    # but before a value, a line without one query, and marks in any other order.
    if (
        not many
        or b" 0" in text
        or short.count(b"-") != short.count(b":-")
        or (b"\n" + bare).count(b"\nq") != rows
        or bare.replace(b" :-", b" :").replace(b" :.", b" :").replace(b" :", b"") != b"q\n" * rows
    ):
        return None
    flat = text.translate(bytes.maketrans(b"q: ", b"\n\n\n"))
    numbers = read_numbers(flat, rows + 2 * many)
    if numbers is None:
        return None
    letters = np.frombuffer(bare, np.uint8)
    counts = np.diff(np.cumsum(letters == ord(":"))[letters == ord("\n")], prepend=0)
    firsts = np.cumsum(2 * counts + 1) - 2 * counts - 1
    grades, indices, values = numbers[firsts], *np.delete(numbers, firsts).reshape(-1, 2).T.copy()
    if (grades > MOST_PLACE + unlabelled).any() or indices.max() > MOST_FEATURES:
        return None
    # A number for each line and feature repeats if the feature stands in a line twice. Mostly all are ascending, which
    # is known without sorting them.
    keys = np.repeat(np.arange(rows) * (MOST_FEATURES + 1), counts) + indices.astype(np.int64)
    if (np.diff(keys) <= 0).any() and len(np.unique(keys)) < many:
        return None
    missing = values == float(NO_VALUE) if gaps else np.zeros(many, bool)
    values[missing] = 0
    size = np.abs(values)
    # `nearest_float32` decides where rounding twice may go wrong, and where SciPy's reader forgets the sign of -0.
    odd = ((values.view(np.int64) & CUT) == HALF) | (size > LARGEST)  # half way between two float32, or beyond them
    odd |= (size < SMALLEST) & ((size > 0) | (b"-" in text)) & ~missing  # the sign of -0 is lost
    with np.errstate(over="ignore", under="ignore"):
        near = values.astype(np.float32)
    if odd.any():
        words = flat.split()
        places = np.delete(np.arange(len(words)), firsts)[1::2]
        near[odd] = [nearest_float32(words[k]) for k in places[odd]]
    if not np.isfinite(near).all():
        return None
    near[missing] = np.nan
    grades[grades > MOST_PLACE] = UNLABELLED
    return ParsedBlock(np.arange(rows), grades.astype(np.int64), queries, counts, indices.astype(np.int64), near)


def _mark_gaps(text: bytes) -> tuple[bytes, bool, bool]:
    """Lines with placeholder numbers for -1 and NULL, and whether there were any of either.

    A file that has those numbers itself keeps its -1 and NULL, which are not plain: it is read by line.
    """
    unlabelled = b"-1 qid:" in text and NO_GRADE not in text
    if unlabelled:
        text = re.sub(rb"(?m)^-1(?= qid:)", NO_GRADE, text)
    gaps = any(b":" + word in text for word in MISSING) and NO_VALUE not in text
    if gaps:
        for word in MISSING:
            text = re.sub(rb":" + re.escape(word) + rb"(?=[ \n])", b":" + NO_VALUE, text)
    return text, unlabelled, gaps


log = logging.getLogger("mutirao")

LONG = 32  # where more documents of a query all have different numbers, these are an order and no grades
STEPS = 5  # grades that an order is divided into


def clean_data(data: RankingData, file: Path) -> RankingData:
    """Data with a value for every feature and a grade for every document, ready to train on."""
    fill_missing(data.x, data.queries)
    data = drop_unlabelled(data, file)
    if is_order(data.grades, data.queries):
        log.warning("%s has an order of each query's documents; it is divided into %d grades", file, STEPS)
        return RankingData(data.x, grade_order(data.grades, data.queries), data.queries, data.query_ids)
    if (most := int(data.grades.max())) > MOST_GRADE:
        raise ConfigError(
            f"{file}: grade {most} cannot be used; expected whole numbers from 0 to {MOST_GRADE}, or an order "
            f"in which all documents of a query have different numbers"
        )
    return data


def fill_missing(x: Floats, queries: Ints) -> None:
    """Fill a missing value with the smallest of the feature among the query's documents; 0 if all are missing.

    LETOR's publishers make the MIN variant of a set from its NULL variant like this (Qin and Liu, 2013).
    """
    for column in np.flatnonzero([np.isnan(x[:, i]).any() for i in range(x.shape[1])]).tolist():
        gap = np.isnan(x[:, column])
        least = np.full(int(queries.max()) + 1, np.inf, np.float32)
        np.minimum.at(least, queries[~gap], x[~gap, column])
        x[gap, column] = np.where(np.isinf(least), 0, least)[queries[gap]]


def drop_unlabelled(data: RankingData, file: Path) -> RankingData:
    """Only documents with a grade: a supervised ranker learns nothing from the others."""
    labelled = data.grades != UNLABELLED
    if labelled.all():
        return data
    if not labelled.any():
        raise ConfigError(f"{file}: none of its documents has a label (all have grade -1); expected some grades")
    log.info("%s: %d of %d documents have no label and are left out", file, int((~labelled).sum()), len(data))
    return data.take(np.flatnonzero(labelled))


def is_order(grades: Ints, queries: Ints) -> bool:
    """Whether no two documents of a query have the same number, in lists too long for that to be grades."""
    # Lists of up to LONG documents may have different grades by chance.
    pairs = np.stack([queries, grades])
    return bool(np.bincount(queries).max() > LONG and np.unique(pairs, axis=1).shape[1] == len(grades))


def grade_order(places: Ints, queries: Ints) -> Ints:
    """Fifths of each query's documents as grades 0 to 4; the larger the number, the better the document.

    >>> grade_order(np.array([7, 9, 1, 3, 5]), np.zeros(5, np.int64)).tolist()
    [3, 4, 0, 1, 2]
    """
    order = np.lexsort((places, queries))
    sizes = np.bincount(queries)
    within = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    grades = np.empty(len(places), np.int64)
    grades[order] = within * STEPS // sizes[queries[order]]
    return grades
