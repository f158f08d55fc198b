"""The fast reader of ranking files in NumPy, on whole arrays: slower than the compiled one, and always there."""

import numpy as np

from mutirao.ranking.parsing import (
    CLOSE,
    CUT,
    EXACT,
    HALF,
    MOST_FEATURES,
    MOST_GRADE,
    MOST_ID,
    NUMBER,
    POWERS,
    SMALLEST,
    Bytes,
    Floats,
    Found,
    Ints,
    Mask,
    nearest_float32,
)

# What a byte can be. The blanks come first, so that one comparison tells words from what is between them.
BLANK, BREAK, DIGIT, COLON, DOT, SIGN, E, TEXT, WILD = range(9)
KIND = np.full(256, WILD, np.uint8)
KIND[33:127] = TEXT
for _kind, _letters in ((BLANK, b" \t\r"), (BREAK, b"\n"), (DIGIT, b"0123456789"), (COLON, b":"), (DOT, b".")):
    KIND[list(_letters)] = _kind
KIND[list(b"+-")] = SIGN
KIND[list(b"eE")] = E


def scan_numpy(text: Bytes, x: Floats) -> Found:
    """Read a block with whole-array operations only."""
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
