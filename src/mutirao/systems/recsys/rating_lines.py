"""What a line of ratings means, in the layouts of MovieLens, of the Netflix Prize, or one of the user's own.

`read_line` is the definition. `fast_block` reads many lines at once with NumPy; a block it is not sure of in every cell
is left to the definition, which understands it or says what is wrong, with file and line.
"""

import csv
import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import decode_text

MOST_DIGITS = 18  # whole numbers up to here fit into 64 bits
LONGEST_ID = 200
WHOLE = re.compile(r"0|[1-9]\d{0,17}")
NUMBER = re.compile(r"-?(?:\d{1,15}\.?\d{0,15}|\.\d{1,15})")
SECONDS = re.compile(r"\d{1,15}(?:\.\d*)?")
EPOCH = datetime.date(1970, 1, 1)
DAY = 86_400

Ids = npt.NDArray[np.int64] | npt.NDArray[np.str_]
Ints = npt.NDArray[np.int64]
Letters = npt.NDArray[np.uint8]


class Columns(NamedTuple):
    """Ratings as read: ids are whole numbers where all of them are, or else text."""

    users: Ids
    items: Ids
    values: npt.NDArray[np.float64]
    times: Ints


@dataclass(frozen=True)
class Layout:
    """How a line is made: what separates its cells, how many there are, and which holds what (-1: none does)."""

    separator: str
    cells: int
    user: int
    item: int
    rating: int = -1
    time: int = -1
    header: bool = False

    @property
    def form(self) -> str:
        """What a right line looks like."""
        names = {self.user: "USER", self.item: "ITEM", self.rating: "RATING", self.time: "TIME"}
        return self.separator.join(names.get(k, "...") for k in range(self.cells))


MOVIELENS_100K = Layout("\t", 4, 0, 1, 2, 3)
MOVIELENS_1M = Layout("::", 4, 0, 1, 2, 3)
NETFLIX = Layout(",", 3, 0, -1, 1, 2)  # the item stands in a heading of its own


def read_block(text: bytes, layout: Layout, file: Path, first: int) -> Columns:
    """Whole lines, the first of which is line `first` of the file."""
    found = None if b"\0" in text else fast_block(text, layout)
    if found is not None:
        return found
    rows = []
    for number, line in enumerate(decode_text(text, file, first).split("\n"), first):
        if line.strip():
            try:
                rows.append(read_line(line.rstrip("\r"), layout))
            except (ValueError, csv.Error) as error:
                raise ConfigError(f"{file}, line {number}: {error}; right would be {layout.form!r}") from error
    users, items, values, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Columns(_ids(users), _ids(items), np.array(values, np.float64), np.array(times, np.int64))


def read_line(line: str, layout: Layout) -> tuple[int | str, int | str, float, int]:
    """User, item, rating and time of a line; ValueError says what is wrong.

    >>> read_line("1::1193::5::978300760", MOVIELENS_1M)
    (1, 1193, 5.0, 978300760)
    """
    if "\r" in line:
        raise ValueError("a carriage return stands inside the line")
    if len(layout.separator) > 1:
        cells = line.split(layout.separator)
    else:
        cells = next(csv.reader([line], delimiter=layout.separator), [])
    if len(cells) != layout.cells:
        raise ValueError(f"{len(cells)} cells instead of {layout.cells}")
    cells = [cell.strip() for cell in cells]
    user = _id(cells[layout.user], "user")
    item = _id(cells[layout.item], "item") if layout.item >= 0 else 0
    rating = cells[layout.rating] if layout.rating >= 0 else "1"
    if not NUMBER.fullmatch(rating):
        raise ValueError(f"{rating[:40]!r} is not a rating")
    return user, item, float(rating), _time(cells[layout.time]) if layout.time >= 0 else 0


def _id(cell: str, what: str) -> int | str:
    if not cell or len(cell) > LONGEST_ID or not cell.isprintable():
        raise ValueError(f"{cell[:40]!r} is no id of a {what}")
    return int(cell) if WHOLE.fullmatch(cell) else cell


def _time(cell: str) -> int:
    if SECONDS.fullmatch(cell):
        return int(float(cell))
    try:
        return (datetime.date.fromisoformat(cell[:10]) - EPOCH).days * DAY
    except ValueError as error:
        raise ValueError(f"{cell[:40]!r} is neither seconds nor a date YYYY-MM-DD") from error


def _ids(ids: Sequence[int | str]) -> Ids:
    if all(isinstance(i, int) for i in ids):
        return np.array(ids, np.int64)
    return np.array([str(i) for i in ids], np.str_)


def fast_block(text: bytes, layout: Layout) -> Columns | None:
    """The same for lines of plain digits, all at once; None if anything in the block is not as plain as that."""
    text = text.replace(b"\r\n", b"\n") + (b"" if text.endswith(b"\n") else b"\n")
    if len(layout.separator) > 1:
        if b"\t" in text:
            return None
        text = text.replace(layout.separator.encode(), b"\t")
    letters = np.frombuffer(text, np.uint8)
    separator = ord("\t") if len(layout.separator) > 1 else ord(layout.separator)
    ends = np.flatnonzero((letters == separator) | (letters == ord("\n")))
    if len(ends) % layout.cells:
        return None
    begins = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, layout.cells)
    table = ends.reshape(-1, layout.cells)
    breaks = letters[table] == ord("\n")
    if breaks[:, :-1].any() or not breaks[:, -1].all():
        return None

    def cell(k: int) -> tuple[Ints, Ints]:
        return begins[:, k], table[:, k] - begins[:, k]

    users = _whole(letters, *cell(layout.user))
    items = _whole(letters, *cell(layout.item)) if layout.item >= 0 else np.zeros(len(table), np.int64)
    values = _decimal(letters, *cell(layout.rating)) if layout.rating >= 0 else np.ones(len(table))
    times = _moment(letters, *cell(layout.time)) if layout.time >= 0 else np.zeros(len(table), np.int64)
    if users is None or items is None or values is None or times is None:
        return None
    return Columns(users, items, values, times)


def _whole(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    """Whole numbers without leading zeros, so that each is the only way to write it."""
    odd = (width < 1) | (width > MOST_DIGITS) | ((letters[begin] == ord("0")) & (width > 1))
    return None if odd.any() else _digits(letters, begin, width)


def _digits(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    number = np.zeros(len(begin), np.int64)
    for k in range(int(width.max(initial=0))):
        inside = width > k
        digit = letters[np.where(inside, begin + k, 0)] - np.uint8(ord("0"))  # below "0" wraps to above 9
        if (digit[inside] > 9).any():
            return None
        number = np.where(inside, 10 * number + digit, number)
    return number


def _decimal(letters: Letters, begin: Ints, width: Ints) -> npt.NDArray[np.float64] | None:
    """Numbers such as 4 or 3.5, with one digit on either side of the point: exact in any order of work."""
    pointed = width == 3
    if not (pointed | (width == 1)).all() or (letters[begin[pointed] + 1] != ord(".")).any():
        return None
    whole, tenth = _digits(letters, begin, np.ones_like(width)), _digits(letters, begin + 2, pointed.astype(np.int64))
    return None if whole is None or tenth is None else (10 * whole + tenth) / 10


def _moment(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    """Seconds as a whole number, or the day of a date YYYY-MM-DD."""
    seconds = _whole(letters, begin, width)
    if seconds is not None or (width != 10).any():
        return seconds
    if (letters[begin + 4] != ord("-")).any() or (letters[begin + 7] != ord("-")).any():
        return None
    parts = [_digits(letters, begin + at, np.full_like(width, size)) for at, size in ((0, 4), (5, 2), (8, 2))]
    year, month, day = parts
    if year is None or month is None or day is None or (month < 1).any() or (month > 12).any() or (year < 1).any():
        return None
    months = (year - 1970) * 12 + month - 1
    start, end = (m.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for m in (months, months + 1))
    if (day < 1).any() or (day > end - start).any():
        return None
    return (start + day - 1) * DAY
