"""The fast reader of ranking files that numba compiles; it lets other threads run."""

import functools
import importlib
from typing import Any

import numpy as np

from mutirao.ranking.parsing import (
    CLOSE,
    CUT,
    EXACT,
    HALF,
    LARGEST,
    MOST_FEATURES,
    MOST_GRADE,
    MOST_ID,
    MOST_MANTISSA,
    POWERS,
    SMALLEST,
    Bytes,
    Floats,
    Found,
)


@functools.cache
def has_numba() -> bool:
    """Whether the compiled reader can be had; numba may be there and still refuse the NumPy it finds."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


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


@functools.cache
def _compiled() -> Any:
    """The compiled scan; numba keeps it on disk, so that only the first process ever waits for it.

    It is kept until this file changes. Who changes a constant of `parsing` that it uses must touch this file, too:
    constants are compiled in, which makes it a tenth faster than handing them over.
    """
    numba: Any = importlib.import_module("numba")
    try:
        return numba.njit(nogil=True, cache=True)(_scan)
    except RuntimeError:  # nowhere to keep it
        return numba.njit(nogil=True)(_scan)


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
