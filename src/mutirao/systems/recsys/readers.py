"""Ratings and catalogues as publishers ship them: MovieLens, the Netflix Prize, or any table with named columns."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.datasets.locations import find_data
from mutirao.errors import ConfigError
from mutirao.io import BOM, decode_text, read_rows
from mutirao.systems.recsys.catalogues import Catalogue, catalogue_file, read_titles
from mutirao.systems.recsys.embeddings import load_embeddings
from mutirao.systems.recsys.rating_lines import MOVIELENS_1M, MOVIELENS_100K, NETFLIX, Columns, Ids, Layout, read_block
from mutirao.systems.recsys.ratings import Ratings, gather

BLOCK = 1 << 22  # bytes of text read at once: the working arrays stay small
KEYS = ("user", "item", "rating", "time")
ALIASES = {
    "user": ("user", "userid", "user_id", "customer", "customerid", "customer_id"),
    "item": ("item", "itemid", "item_id", "movie", "movieid", "movie_id"),
    "rating": ("rating", "value", "score", "stars"),
    "time": ("time", "timestamp", "date", "unixtime"),
}
HEADING = re.compile(rb"^(\d+):[ \r]*\n", re.MULTILINE)
FILES = {"ratings.dat": MOVIELENS_1M, "u.data": MOVIELENS_100K}


def read_ratings(path: Path, columns: str = "") -> Ratings:
    r"""The ratings at `path`: a folder as published, or a file. `columns` names those of a file of one's own.

    `columns` is "item,user,rating" (the order in a file without a header), or "user=reader,item=book,rating=stars"
    (the names in the header, where they are not the usual ones). Without a rating column every line counts 1.

    >>> _ = Path("ratings.csv").write_text("user,item,rating\nana,alien,5\nana,brazil,3\nbia,alien,1\n")
    >>> ratings = read_ratings(Path("ratings.csv"))
    >>> ratings.users, ratings.catalogue.ids, ratings.counts()
    (('ana', 'bia'), ('alien', 'brazil'), array([2, 1]))
    """
    path = find_data(path)
    parts = [part for source in sources(path, columns) for part in source()]
    if not sum(len(part.users) for part in parts):
        raise ConfigError(f"{path} holds no ratings")
    users, items = together([part.users for part in parts]), together([part.items for part in parts])
    values, times = np.concatenate([part.values for part in parts]), np.concatenate([part.times for part in parts])
    return gather(users, items, values, times, titles_beside(path))


def check_ratings(path: Path | str | None) -> list[str]:
    """What a set of ratings holds, in a few lines."""
    if path is None:
        raise ConfigError("name the folder, such as: mutirao data check movielens ~/ml-1m")
    ratings = read_ratings(Path(path))
    counts, catalogue = ratings.counts(), ratings.catalogue
    titled = sum(bool(title) for title in catalogue.titles)
    filled = len(ratings) / (len(ratings.users) * len(catalogue))
    low, high, mean = ratings.values.min(), ratings.values.max(), ratings.values.mean(dtype=np.float64)
    return [
        f"{len(ratings):,} ratings of {len(catalogue):,} items by {len(ratings.users):,} users: {filled:.2%}",
        f"ratings from {low:g} to {high:g}, {mean:.3f} on average; {titled:,} items have titles",
        f"a user has {counts.min():,} to {counts.max():,} ratings, half of them at most {int(np.median(counts)):,}",
    ]


def read_catalogue(path: Path) -> Catalogue:
    r"""The catalogue at `path`, in any of the forms publishers ship, or of an embeddings file.

    A folder or file of MovieLens (`movies.dat`, `u.item`, `movies.csv`), Netflix's `movie_titles.txt`, or a CSV
    with columns id, title and (if known) year. In a folder that holds ratings too, the ratings of each item are
    counted.

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
            f"{path} holds no catalogue; right would be movies.dat, u.item, movies.csv, movie_titles.txt, "
            f"a CSV with columns id, title and year, or an embeddings file"
        )
    known = read_titles(file)
    return replace(known, counts=_counts_beside(path, known)) if path.is_dir() else known


def _counts_beside(folder: Path, known: Catalogue) -> npt.NDArray[np.int64]:
    """How often each item was rated in the ratings of the folder; 0 for all if it holds none."""
    if not has_ratings(folder):
        return known.counts
    rated = read_ratings(folder).catalogue
    times = dict(zip(rated.ids, rated.counts.tolist(), strict=True))
    return np.array([times.get(name, 0) for name in known.ids], np.int64)


def together(ids: Sequence[Ids]) -> Ids:
    """Ids of several parts: text if any of them is."""
    kind = np.int64 if all(part.dtype == np.int64 for part in ids) else np.str_
    return np.concatenate([part.astype(kind) for part in ids])


def titles_beside(path: Path) -> Catalogue | None:
    """The catalogue that lies in the folder of the ratings, if there is one."""
    file = catalogue_file(path if path.is_dir() else path.parent)
    return read_titles(file) if file is not None else None


def sources(path: Path, columns: str) -> list[Callable[[], Iterator[Columns]]]:
    """How to read each of the files that hold the ratings."""
    if not path.exists():
        raise ConfigError(f"{path} is not there; right would be a folder of MovieLens or Netflix, or a file of ratings")
    if not path.is_dir():
        return [reader(path, columns)]
    for name in (*FILES, "ratings.csv"):
        if (path / name).is_file():
            return [reader(path / name, columns)]
    for pattern in ("training_set*/mv_*.txt", "mv_*.txt", "combined_data_*.txt"):
        if found := sorted(path.glob(pattern)):
            return [partial(read_netflix, file) for file in found]
    raise ConfigError(
        f"{path} holds no ratings; right would be ratings.dat, u.data, ratings.csv, training_set/mv_*.txt or "
        f"combined_data_*.txt in it"
    )


def has_ratings(folder: Path) -> bool:
    """Whether the folder holds ratings as published."""
    try:
        return bool(sources(folder, ""))
    except ConfigError:
        return False


def reader(file: Path, columns: str) -> Callable[[], Iterator[Columns]]:
    """How to read one file, judged by its name."""
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
    """Which column holds what, by the names asked for or the usual ones."""
    at = column_numbers(file, header, columns)
    return Layout(separator, len(header), at["user"], at["item"], at["rating"], at["time"], in_file)


def column_numbers(file: Path, header: Sequence[str], columns: str) -> dict[str, int]:
    """The place of each column in a header (-1: it has none)."""
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
            f"right would be columns=item,user,rating or columns=user=reader,item=book"
        )
    return at


def read_lines(file: Path, layout: Layout) -> Iterator[Columns]:
    """A text file a block of whole lines at a time."""
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
    """Lines USER,RATING,YYYY-MM-DD under headings ITEM: as in the Netflix Prize."""
    text = file.read_bytes().removeprefix(BOM)
    before, *rest = HEADING.split(text)
    if before.strip() or not rest:
        raise ConfigError(f"{file}, line 1: no heading ITEM: stands before the ratings; is this a file of Netflix's?")
    line = 1
    for item, body in zip(rest[::2], rest[1::2], strict=True):
        found = read_block(body, NETFLIX, file, line + 1)
        yield found._replace(items=np.full(len(found.users), int(item), np.int64))
        line += 1 + body.count(b"\n")


def read_parquet(file: Path, columns: str) -> Iterator[Columns]:
    """A Parquet file; ids are whole numbers or text, times seconds or timestamps."""
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
        if column.dtype.kind == "O":
            empty = next((i for i, v in enumerate(column) if v is None or not str(v).strip()), None)
            column = column.astype(np.str_)
        else:
            empty = None if column.dtype.kind in "iu" else 0
        if empty is not None:
            raise ConfigError(f"{file}, row {empty + 1}: column {at[key]!r} holds no id (whole number or text)")
        ids.append(column.astype(np.int64) if column.dtype.kind in "iu" else column)
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
        raise ConfigError(f"{file}, row {wrong[0] + 1}: {at[key]} is {numbers[wrong[0]]}; right would be a number")
    return numbers
