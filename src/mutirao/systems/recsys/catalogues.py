"""Catalogues of items, as publishers ship them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text

YEAR = re.compile(r"\((\d{4})(?:\s*[-–/]\s*\d{0,4})?\)\s*$")
ID_COLUMNS = ("id", "item", "item_id", "itemid", "movieid", "movie_id")
FILES = ("movies.dat", "u.item", "movies.csv", "movie_titles.txt")
NO_GENRES = ("", "(no genres listed)", "unknown")
FLAGS = 5  # u.item: number of cells before the flags of genres

Row = tuple[int, str, str, int, tuple[str, ...]]


@dataclass(frozen=True)
class Catalogue:
    """Items, one for each row: `ids` and `titles` as the publisher ships them, 0 for unknown years.

    >>> films = Catalogue(("1", "2"), ("Alien", "Brazil"), np.array([1979, 1985], np.int32), np.array([120, 40]))
    >>> films.rows()["2"], films.take(np.array([1])).titles
    (1, ('Brazil',))
    """

    ids: tuple[str, ...]
    titles: tuple[str, ...]
    years: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]  # ratings of each item (0 if unknown)
    genres: tuple[tuple[str, ...], ...] = ()  # of each item; empty if they are unknown

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.titles) == len(self.years) == len(self.counts):
            raise ValueError("a catalogue needs an id, a title, a year and a count for every item")
        if len(self.genres) not in (0, len(self.ids)):
            raise ValueError(f"{len(self.genres)} items have genres, of {len(self.ids)}")
        if len(set(self.ids)) < len(self.ids):
            twice = next(i for k, i in enumerate(self.ids) if i in self.ids[:k])
            raise ConfigError(f"the catalogue has item {twice!r} twice")

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self) -> dict[str, int]:
        """The row of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    def take(self, rows: npt.NDArray[np.intp]) -> "Catalogue":
        """The catalogue of these items alone."""
        pick = rows.tolist()
        ids = tuple(self.ids[r] for r in pick)
        titles = tuple(self.titles[r] for r in pick)
        genres = tuple(self.genres[r] for r in pick) if self.genres else ()
        return Catalogue(ids, titles, self.years[rows], self.counts[rows], genres)


def read_titles(file: Path) -> Catalogue:
    """The catalogue in a file of titles, without counts of ratings."""
    rows = list(_rows(file))
    if not rows:
        raise ConfigError(f"{file} is an empty catalogue; expected at least one item")
    seen: dict[str, int] = {}
    for line, name, *_ in rows:
        if name in seen:
            raise ConfigError(f"{file}, line {line}: item {name!r} is in line {seen[name]} already")
        seen[name] = line
    _, ids, titles, years, genres = zip(*rows, strict=True)
    known = genres if any(genres) else ()
    return Catalogue(ids, titles, np.array(years, np.int32), np.zeros(len(ids), np.int64), known)


def catalogue_file(path: Path) -> Path | None:
    """The file that holds the catalogue: `path` itself, or one of the usual names in the folder."""
    if path.is_dir():
        return next((path / name for name in FILES if (path / name).is_file()), None)
    if path.is_file():
        return path
    return None


def _rows(file: Path) -> Iterator[Row]:
    """Line, id, title, year and genres of each item."""
    text = read_text(file, latin1=file.suffix != ".csv")  # MovieLens and Netflix ship their titles in Latin-1
    if file.name == "movie_titles.txt":
        yield from _netflix(file, text)
    elif file.suffix == ".csv":
        yield from _csv(file, text)
    else:
        yield from _movielens(file, text, "|" if file.name == "u.item" else "::")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r")


def _movielens(file: Path, text: str, separator: str) -> Iterator[Row]:
    names: dict[int, str] = {}
    if separator == "|":
        names = dict(enumerate(_flag_names(file)))
    for number, line in _lines(text):
        name, *rest = line.split(separator)
        if not rest or not name.strip():
            raise ConfigError(f"{file}, line {number}: expected ID{separator}TITLE{separator}...")
        title = rest[0].strip()
        year = _year(title)
        genres: list[str] = []
        if separator == "|":
            # The cell after the title is a release date such as 01-Jan-1995. It serves titles without a year.
            if not year and len(rest) > 1 and (released := re.search(r"(\d{4})$", rest[1].strip())):
                year = int(released[1])
            flags = [k for k, flag in enumerate(rest[FLAGS - 1 :]) if flag.strip() == "1"]
            genres = [names.get(k, f"genre {k}") for k in flags]
        elif len(rest) > 1:
            genres = rest[1].split("|")
        yield number, name.strip(), title, year, _genres(genres)


def _flag_names(file: Path) -> list[str]:
    """The genres of the flags in u.item, from MovieLens-100K's u.genre with NAME|NUMBER on each line."""
    beside = file.with_name("u.genre")
    if not beside.is_file():
        return []
    return [line.partition("|")[0].strip() for _, line in _lines(read_text(beside, latin1=True))]


def _genres(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in names if name.strip() not in NO_GENRES)


def _netflix(file: Path, text: str) -> Iterator[Row]:
    for number, line in _lines(text):
        name, _, rest = line.partition(",")
        # Only the first two commas separate cells: titles contain commas and are not quoted.
        year, comma, title = rest.partition(",")
        if not comma or not name.strip() or not (year.strip().isdecimal() or year.strip() in ("NULL", "")):
            raise ConfigError(f"{file}, line {number}: expected ID,YEAR,TITLE, with NULL for an unknown year")
        known_year = 0
        if year.strip().isdecimal():
            known_year = int(year)
        yield number, name.strip(), title.strip(), known_year, ()


def _csv(file: Path, text: str) -> Iterator[Row]:
    rows = read_rows(text, file)
    header = [name.strip().lower() for name in next(rows, (1, []))[1]]
    at: Mapping[str, int] = {name: k for k, name in enumerate(header)}
    key = next((at[name] for name in ID_COLUMNS if name in at), None)
    if key is None or "title" not in at:
        raise ConfigError(f"{file}, line 1: the columns are {', '.join(header) or 'none'}; expected id,title,year")
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header) or not cells[key].strip():
            raise ConfigError(f"{file}, line {line}: {len(cells)} cells, or no id; {len(header)} are needed")
        title = cells[at["title"]].strip()
        year = cells[at["year"]].strip() if "year" in at else ""
        number = _year(title)
        if year and year != "NULL":
            # A column of whole numbers with gaps is often saved as 1995.0.
            if not re.fullmatch(r"\d{1,4}(\.0)?", year):
                raise ConfigError(f"{file}, line {line}: {year!r} is not a year")
            number = int(float(year))
        genres: list[str] = []
        if "genres" in at:
            genres = cells[at["genres"]].split("|")
        yield line, cells[key].strip(), title, number, _genres(genres)


def _year(title: str) -> int:
    found = YEAR.search(title)
    if found:
        return int(found[1])
    return 0
