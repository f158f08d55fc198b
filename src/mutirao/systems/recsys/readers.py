"""Read ratings and catalogues as publishers ship them: MovieLens, the Netflix Prize, or any table with named columns.

`read_line` defines what a line of ratings means. `fast_block` reads many lines at once with NumPy; a block with
anything unusual is left to `read_line`, which reads it or raises an error with file and line.
"""

import csv
import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.datasets.published import find_data
from mutirao.errors import ConfigError
from mutirao.io import BOM, decode_text, read_rows
from mutirao.systems.recsys.catalogues import Catalogue, catalogue_file, read_titles
from mutirao.systems.recsys.embeddings import load_embeddings
from mutirao.systems.recsys.ratings import Ratings, gather

MAX_DIGITS = 18  # of whole numbers that fit into 64 bits
MAX_ID_LENGTH = 200
WHOLE = re.compile(r"0|[1-9]\d{0,17}")
NUMBER = re.compile(r"-?(?:\d{1,15}\.?\d{0,15}|\.\d{1,15})")
SECONDS = re.compile(r"\d{1,15}(?:\.\d*)?")
EPOCH = datetime.date(1970, 1, 1)
DAY = 86_400

Ids = npt.NDArray[np.int64] | npt.NDArray[np.str_]
Ints = npt.NDArray[np.int64]
Letters = npt.NDArray[np.uint8]


class Columns(NamedTuple):
    """Columns of ratings. Ids are whole numbers if all of them are, otherwise text."""

    users: Ids
    items: Ids
    values: npt.NDArray[np.float64]
    times: Ints


@dataclass(frozen=True)
class Layout:
    """The layout of a line: separator, number of cells, and the index of each column (-1: there is none)."""

    separator: str
    cells: int
    user: int
    item: int
    rating: int = -1
    time: int = -1
    header: bool = False

    @property
    def form(self) -> str:
        """A line of this layout, for error messages."""
        names = {self.user: "USER", self.item: "ITEM", self.rating: "RATING", self.time: "TIME"}
        return self.separator.join(names.get(k, "...") for k in range(self.cells))


MOVIELENS_100K = Layout("\t", 4, 0, 1, 2, 3)
MOVIELENS_1M = Layout("::", 4, 0, 1, 2, 3)
NETFLIX = Layout(",", 3, 0, -1, 1, 2)  # the item is in a heading
BLOCK = 1 << 22  # bytes of text read at once, which bounds the working arrays
KEYS = ("user", "item", "rating", "time")
ALIASES = {
    "user": ("user", "userid", "user_id", "customer", "customerid", "customer_id"),
    "item": ("item", "itemid", "item_id", "movie", "movieid", "movie_id"),
    "rating": ("rating", "value", "score", "stars"),
    "time": ("time", "timestamp", "date", "unixtime"),
}
HEADING = re.compile(rb"^(\d+):[ \r]*\n", re.MULTILINE)
FILES = {"ratings.dat": MOVIELENS_1M, "u.data": MOVIELENS_100K}


# Lines


def read_block(text: bytes, layout: Layout, file: Path, first: int) -> Columns:
    """Read whole lines, beginning with line `first` of the file."""
    # `fast_block` only looks at the columns it needs and could pass over a zero byte; `decode_text` refuses it.
    if b"\0" not in text and (columns := fast_block(text, layout)) is not None:
        return columns
    rows = []
    for number, line in enumerate(decode_text(text, file, first).split("\n"), first):
        if line.strip():
            try:
                rows.append(read_line(line.rstrip("\r"), layout))
            except (ValueError, csv.Error) as error:
                raise ConfigError(f"{file}, line {number}: {error}; expected {layout.form!r}") from error
    users, items, values, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Columns(_ids(users), _ids(items), np.array(values, np.float64), np.array(times, np.int64))


def read_line(line: str, layout: Layout) -> tuple[int | str, int | str, float, int]:
    """User, item, rating and time of a line. Raises ValueError for a malformed line.

    >>> read_line("1::1193::5::978300760", MOVIELENS_1M)
    (1, 1193, 5.0, 978300760)
    """
    if "\r" in line:
        raise ValueError("a carriage return is inside the line")
    if len(layout.separator) > 1:
        cells = line.split(layout.separator)
    else:
        cells = next(csv.reader([line], delimiter=layout.separator), [])
    if len(cells) != layout.cells:
        raise ValueError(f"{len(cells)} cells instead of {layout.cells}")
    cells = [cell.strip() for cell in cells]
    user = _id(cells[layout.user], "user")
    item: int | str = 0
    rating = "1"
    time = 0
    if layout.item >= 0:
        item = _id(cells[layout.item], "item")
    if layout.rating >= 0:
        rating = cells[layout.rating]
    if not NUMBER.fullmatch(rating):
        raise ValueError(f"{rating[:40]!r} is not a rating")
    if layout.time >= 0:
        time = _time(cells[layout.time])
    return user, item, float(rating), time


def _id(cell: str, what: str) -> int | str:
    if not cell or len(cell) > MAX_ID_LENGTH or not cell.isprintable():
        raise ValueError(f"{cell[:40]!r} is not a valid {what} id")
    if WHOLE.fullmatch(cell):
        return int(cell)
    return cell


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
    """Read all lines at once if they consist of plain digits; otherwise None."""
    text = text.replace(b"\r\n", b"\n")
    if not text.endswith(b"\n"):
        text += b"\n"
    separator = layout.separator
    if len(separator) > 1:
        # Bytes are compared one by one, so "::" becomes a tab, unless the text has tabs of its own.
        if b"\t" in text:
            return None
        text = text.replace(separator.encode(), b"\t")
        separator = "\t"
    letters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((letters == ord(separator)) | (letters == ord("\n")))
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
    times = _seconds(letters, *cell(layout.time)) if layout.time >= 0 else np.zeros(len(table), np.int64)
    if users is None or items is None or values is None or times is None:
        return None
    return Columns(users, items, values, times)


def _whole(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    """Whole numbers without leading zeros. Others are text: "007" and "7" are different ids."""
    invalid = (width < 1) | (width > MAX_DIGITS) | ((letters[begin] == ord("0")) & (width > 1))
    if invalid.any():
        return None
    return _digits(letters, begin, width)


def _digits(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    number = np.zeros(len(begin), np.int64)
    for k in range(int(width.max(initial=0))):
        inside = width > k
        # In uint8 a letter below "0" wraps around to above 9, so that one comparison finds all that are no digits.
        digit = letters[np.where(inside, begin + k, 0)] - np.uint8(ord("0"))
        if (digit[inside] > 9).any():
            return None
        number = np.where(inside, 10 * number + digit, number)
    return number


def _decimal(letters: Letters, begin: Ints, width: Ints) -> npt.NDArray[np.float64] | None:
    """Numbers such as 4 or 3.5, with one digit on either side of the point: these are exact."""
    has_point = width == 3
    if not (has_point | (width == 1)).all() or (letters[begin[has_point] + 1] != ord(".")).any():
        return None
    whole = _digits(letters, begin, np.ones_like(width))
    tenth = _digits(letters, begin + 2, has_point.astype(np.int64))
    if whole is None or tenth is None:
        return None
    # The quotient of two whole numbers is rounded once, as by `float`; whole + tenth / 10 would be rounded twice.
    return (10 * whole + tenth) / 10


def _seconds(letters: Letters, begin: Ints, width: Ints) -> Ints | None:
    """Seconds as a whole number, or the day of a date YYYY-MM-DD."""
    seconds = _whole(letters, begin, width)
    if seconds is not None or (width != 10).any():
        return seconds
    if (letters[begin + 4] != ord("-")).any() or (letters[begin + 7] != ord("-")).any():
        return None
    year, month, day = (_digits(letters, begin + at, np.full_like(width, n)) for at, n in ((0, 4), (5, 2), (8, 2)))
    if year is None or month is None or day is None or (month < 1).any() or (month > 12).any() or (year < 1).any():
        return None
    months = (year - 1970) * 12 + month - 1
    start, end = (m.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for m in (months, months + 1))
    if (day < 1).any() or (day > end - start).any():
        return None
    return (start + day - 1) * DAY


# Files and folders


def read_ratings(path: Path, columns: str = "") -> Ratings:
    r"""The ratings at `path`: a folder as published, or a file. `columns` describes a file of your own.

    `columns` is "item,user,rating" (the order in a file without a header), or "user=reader,item=book,rating=stars"
    (names in the header, where they are not the usual ones). Without a rating column every rating is 1.

    >>> _ = Path("ratings.csv").write_text("user,item,rating\nana,alien,5\nana,brazil,3\nbia,alien,1\n")
    >>> ratings = read_ratings(Path("ratings.csv"))
    >>> ratings.users, ratings.catalogue.ids, ratings.counts()
    (('ana', 'bia'), ('alien', 'brazil'), array([2, 1]))
    """
    path = find_data(path)
    parts: list[Columns] = []
    for source in sources(path, columns):
        parts += source()
    if not sum(len(part.users) for part in parts):
        raise ConfigError(f"{path} holds no ratings")
    users = concatenate_ids([part.users for part in parts])
    items = concatenate_ids([part.items for part in parts])
    values = np.concatenate([part.values for part in parts])
    times = np.concatenate([part.times for part in parts])
    return gather(users, items, values, times, titles_beside(path))


def check_ratings(path: Path | str | None) -> list[str]:
    """A summary of a set of ratings, in a few lines."""
    if path is None:
        raise ConfigError("name the folder, such as: mutirao data check movielens ~/ml-1m")
    ratings = read_ratings(Path(path))
    counts = ratings.counts()
    catalogue = ratings.catalogue
    titled = sum(bool(title) for title in catalogue.titles)
    filled = len(ratings) / (len(ratings.users) * len(catalogue))
    low = ratings.values.min()
    high = ratings.values.max()
    mean = ratings.values.mean(dtype=np.float64)
    return [
        f"{len(ratings):,} ratings of {len(catalogue):,} items by {len(ratings.users):,} users: {filled:.2%}",
        f"ratings from {low:g} to {high:g}, {mean:.3f} on average; {titled:,} items have titles",
        f"a user has {counts.min():,} to {counts.max():,} ratings, half of them at most {int(np.median(counts)):,}",
    ]


def read_catalogue(path: Path) -> Catalogue:
    r"""The catalogue at `path`, in any of the forms publishers ship, or of an embeddings file.

    A folder or file of MovieLens (`movies.dat`, `u.item`, `movies.csv`), Netflix's `movie_titles.txt`, or a CSV
    with columns id, title and (if known) year. If the folder has ratings too, those of each item are counted.

    >>> _ = Path("films.csv").write_text("id,title,year\n1,Alien,1979\n2,Brazil,1985\n")
    >>> catalogue = read_catalogue(Path("films.csv"))
    >>> catalogue.titles, catalogue.years
    (('Alien', 'Brazil'), array([1979, 1985], dtype=int32))
    """
    if path.suffix == ".safetensors":
        return load_embeddings(path).catalogue
    file = catalogue_file(path)
    if file is None:
        raise ConfigError(
            f"{path} holds no catalogue; expected movies.dat, u.item, movies.csv, movie_titles.txt, "
            f"a CSV with columns id, title and year, or an embeddings file"
        )
    known = read_titles(file)
    if path.is_dir():
        return replace(known, counts=_counts_beside(path, known))
    return known


def _counts_beside(folder: Path, known: Catalogue) -> npt.NDArray[np.int64]:
    """The number of ratings of each item in the folder's ratings; 0 if the folder has none."""
    if not has_ratings(folder):
        return known.counts
    rated = read_ratings(folder).catalogue
    times = dict(zip(rated.ids, rated.counts.tolist(), strict=True))
    return np.array([times.get(name, 0) for name in known.ids], np.int64)


def concatenate_ids(ids: Sequence[Ids]) -> Ids:
    """Ids of several parts; text if those of any part are."""
    kind = np.int64 if all(part.dtype == np.int64 for part in ids) else np.str_
    return np.concatenate([part.astype(kind) for part in ids])


def titles_beside(path: Path) -> Catalogue | None:
    """The catalogue in the folder of the ratings, if there is one."""
    file = catalogue_file(path if path.is_dir() else path.parent)
    if file is not None:
        return read_titles(file)
    return None


def sources(path: Path, columns: str) -> list[Callable[[], Iterator[Columns]]]:
    """A reader for each of the files with ratings."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected a folder of MovieLens or Netflix, or a file of ratings")
    if not path.is_dir():
        return [reader(path, columns)]
    for name in (*FILES, "ratings.csv"):
        if (path / name).is_file():
            return [reader(path / name, columns)]
    for pattern in ("training_set*/mv_*.txt", "mv_*.txt", "combined_data_*.txt"):
        if found := sorted(path.glob(pattern)):
            return [partial(read_netflix, file) for file in found]
    raise ConfigError(
        f"{path} holds no ratings; expected ratings.dat, u.data, ratings.csv, training_set/mv_*.txt or "
        f"combined_data_*.txt in it"
    )


def has_ratings(folder: Path) -> bool:
    """Whether the folder has ratings as published."""
    try:
        return bool(sources(folder, ""))
    except ConfigError:
        return False


def reader(file: Path, columns: str) -> Callable[[], Iterator[Columns]]:
    """The reader of a file, chosen by its name."""
    if file.name in FILES and not columns:
        return partial(read_lines, file, FILES[file.name])
    if re.fullmatch(r"(mv_|combined_data_).*\.txt", file.name):
        return partial(read_netflix, file)
    if file.suffix == ".parquet":
        return partial(read_parquet, file, columns)
    if columns and "=" not in columns:
        return partial(read_lines, file, layout_of(file, [c.strip() for c in columns.split(",")], ",", "", False))
    with file.open("rb") as stream:
        first = decode_text(stream.readline().removeprefix(BOM), file)
    separator = "\t" if "\t" in first else ","
    _, header = next(read_rows(first, file, separator), (1, []))
    return partial(read_lines, file, layout_of(file, header, separator, columns, True))


def layout_of(file: Path, header: Sequence[str], separator: str, columns: str, in_file: bool) -> Layout:
    """The layout of a file with these column names."""
    at = column_numbers(file, header, columns)
    return Layout(separator, len(header), at["user"], at["item"], at["rating"], at["time"], in_file)


def column_numbers(file: Path, header: Sequence[str], columns: str) -> dict[str, int]:
    """The index of each column in a header, by the given names or the usual ones (-1: there is none)."""
    wanted = dict.fromkeys(KEYS, "")
    for pair in filter(None, columns.split(",")):
        key, _, name = (part.strip() for part in pair.partition("="))
        if key not in KEYS or not name:
            raise ConfigError(f"columns: {pair!r} is not of the form {'|'.join(KEYS)}=NAME")
        wanted[key] = name
    lower = [name.strip().lower() for name in header]
    at = {}
    for key, name in wanted.items():
        if name and name.lower() not in lower:
            raise ConfigError(f"{file} has no column {name!r}; it has {', '.join(header)[:200] or 'none'}")
        names = (name.lower(),) if name else ALIASES[key]
        at[key] = next((lower.index(n) for n in names if n in lower), -1)
    if at["user"] < 0 or at["item"] < 0:
        raise ConfigError(
            f"{file} does not say which columns hold users and items (its first line: {','.join(header)[:80]!r}); "
            f"expected columns=item,user,rating or columns=user=reader,item=book"
        )
    return at


def read_lines(file: Path, layout: Layout) -> Iterator[Columns]:
    """Read a text file in blocks of whole lines."""
    first = 1
    with file.open("rb") as stream:
        if layout.header:
            stream.readline()
            first = 2
        elif stream.peek(3)[:3] == BOM:
            stream.read(3)
        while text := stream.read(BLOCK):
            text += stream.readline()
            yield read_block(text, layout, file, first)
            first += text.count(b"\n")


def read_netflix(file: Path) -> Iterator[Columns]:
    """Read lines USER,RATING,YYYY-MM-DD under headings ITEM:, as in the Netflix Prize."""
    text = file.read_bytes().removeprefix(BOM)
    before, *rest = HEADING.split(text)
    if before.strip() or not rest:
        raise ConfigError(f"{file}, line 1: there is no heading ITEM: before the ratings; is this a file of Netflix's?")
    line = 1
    for item, lines in zip(rest[::2], rest[1::2], strict=True):
        columns = read_block(lines, NETFLIX, file, line + 1)
        yield columns._replace(items=np.full(len(columns.users), int(item), np.int64))
        line += 1 + lines.count(b"\n")


def read_parquet(file: Path, columns: str) -> Iterator[Columns]:
    """Read a Parquet file. Ids are whole numbers or text, times are seconds or timestamps."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{file}: Parquet needs pyarrow; install mutirao[recsys]") from error
    try:
        names = list(parquet.read_schema(file).names)
        at = {k: names[v] for k, v in column_numbers(file, names, columns).items() if v >= 0}
        found = parquet.read_table(file, columns=list(at.values()))
        table = {k: found.column(name).to_numpy() for k, name in at.items()}
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from error
    rows = len(table["user"])
    values = _finite(file, at, table, "rating", np.ones(rows))
    if "time" in table and table["time"].dtype.kind == "M":
        table["time"] = table["time"].astype("datetime64[s]").astype(np.int64)
    times = _finite(file, at, table, "time", np.zeros(rows)).astype(np.int64)
    ids = []
    for key in ("user", "item"):
        column = table[key]
        empty = None
        if column.dtype.kind == "O":
            empty = next((i for i, v in enumerate(column) if v is None or not str(v).strip()), None)
            column = column.astype(np.str_)
        elif column.dtype.kind in "iu":
            column = column.astype(np.int64)
        else:
            # Whole numbers with gaps arrive as floats: no row of them is an id.
            empty = 0
        if empty is not None:
            raise ConfigError(f"{file}, row {empty + 1}: column {at[key]!r} holds no id (whole number or text)")
        ids.append(column)
    yield Columns(ids[0], ids[1], values, times)


def _finite(
    file: Path,
    at: dict[str, str],
    table: dict[str, npt.NDArray[np.generic]],
    key: str,
    default: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    if key not in table:
        return default
    try:
        numbers = table[key].astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: column {at[key]!r} holds no numbers") from error
    if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
        raise ConfigError(f"{file}, row {wrong[0] + 1}: {at[key]} is {numbers[wrong[0]]}; expected a number")
    return numbers
