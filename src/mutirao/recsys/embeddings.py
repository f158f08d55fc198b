"""Item vectors with the catalogue they belong to: saved, loaded, and carried over to another catalogue."""

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.files import load_arrays, save_arrays
from mutirao.errors import ConfigError, Damaged

log = logging.getLogger("mutirao")

KIND = "embeddings"
SPREAD = 0.1  # standard deviation of vectors that nobody has trained
YEAR = re.compile(r"\((\d{4})(?:\s*[-–/]\s*\d{0,4})?\)\s*$")
ID_COLUMNS = ("id", "item", "item_id", "itemid", "movieid", "movie_id")


@dataclass(frozen=True)
class Catalogue:
    """What is being recommended, a row an item: `ids` and `titles` as the publisher ships them, 0 for unknown years."""

    ids: tuple[str, ...]
    titles: tuple[str, ...]
    years: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]  # ratings of each item (0 if unknown)

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.titles) == len(self.years) == len(self.counts):
            raise ValueError("a catalogue needs an id, a title, a year and a count for every item")
        if len(set(self.ids)) < len(self.ids):
            twice = next(i for k, i in enumerate(self.ids) if i in self.ids[:k])
            raise ConfigError(f"the catalogue has item {twice!r} twice")

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self) -> dict[str, int]:
        """Where each id stands."""
        return {name: row for row, name in enumerate(self.ids)}

    def take(self, rows: npt.NDArray[np.intp]) -> "Catalogue":
        """The catalogue of these items alone."""
        pick = rows.tolist()
        return Catalogue(
            tuple(self.ids[r] for r in pick), tuple(self.titles[r] for r in pick), self.years[rows], self.counts[rows]
        )


@dataclass(frozen=True)
class Embeddings:
    """A vector for every item of a catalogue, and a card that says how they were trained."""

    catalogue: Catalogue
    vectors: npt.NDArray[np.float32]  # items x dimension
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.catalogue):
            raise ValueError(f"{len(self.catalogue)} items cannot have vectors of shape {self.vectors.shape}")


def save(embeddings: Embeddings, path: Path) -> None:
    """Write vectors, catalogue and card as one safetensors file; whole or not at all."""
    catalogue = embeddings.catalogue
    arrays: Arrays = {
        "vectors": np.asarray(embeddings.vectors, np.float32),
        "years": catalogue.years,
        "counts": catalogue.counts,
    }
    facts = {"kind": KIND, "ids": catalogue.ids, "titles": catalogue.titles, "card": embeddings.card}
    save_arrays(path, arrays, facts)


def load(path: Path) -> Embeddings:
    """The embeddings of a file written by `save`."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there: no item vectors to read")
    arrays, facts = load_arrays(path)
    if facts.get("kind") != KIND or not {"vectors", "years", "counts"} <= arrays.keys():
        raise Damaged(f"{path} holds no item embeddings")
    ids, titles = (tuple(map(str, facts.get(key, ()))) for key in ("ids", "titles"))
    try:
        catalogue = Catalogue(ids, titles, arrays["years"].astype(np.int32), arrays["counts"].astype(np.int64))
        found = Embeddings(catalogue, arrays["vectors"].astype(np.float32), dict(facts.get("card", {})))
    except (ValueError, ConfigError) as error:
        raise Damaged(f"{path} does not fit together: {error}") from error
    if not np.isfinite(found.vectors).all():
        raise Damaged(f"{path} holds NaN or infinity")
    return found


def transfer(
    target: Catalogue,
    source: Embeddings,
    pairs: Sequence[tuple[str, str]],
    *,
    dimension: int,
    rng: np.random.Generator,
    share: float = 1.0,
    by: Literal["popularity", "random"] = "popularity",
) -> npt.NDArray[np.float32]:
    """The first item matrix of `target`: matched items begin at the vector of their pair, others at N(0, 0.1).

    `pairs` are (id in target, id in source). Of the pairs only a `share` is carried over: the most popular ones
    (ratings in the source, or in the target if the source counted none), or as many drawn at random.
    """
    if source.vectors.shape[1] != dimension:
        raise ConfigError(f"the vectors to transfer have dimension {source.vectors.shape[1]}, the model {dimension}")
    if not 0 <= share <= 1:
        raise ConfigError(f"share is {share!r}, but must be from 0 to 1")
    items = rng.normal(0.0, SPREAD, (len(target), dimension)).astype(np.float32)
    mine, theirs = target.rows(), source.catalogue.rows()
    for a, b in pairs:
        if a not in mine or b not in theirs:
            where, name = ("target", a) if a not in mine else ("source", b)
            raise ConfigError(f"a pair names item {name!r}, which the {where} catalogue does not have")
    to = np.array([mine[a] for a, _ in pairs], np.intp)
    of = np.array([theirs[b] for _, b in pairs], np.intp)
    if by == "random":
        order = rng.permutation(len(pairs))
    else:
        known = source.catalogue.counts.any()
        order = np.argsort(-(source.catalogue.counts[of] if known else target.counts[to]), kind="stable")
    chosen = order[: round(share * len(pairs))]
    if has_biases(source.card):  # column 0: what is known of an unmatched item is what items are like on average
        items[:, 0] = source.vectors[of[chosen], 0].mean() if len(chosen) else 0.0
    items[to[chosen]] = source.vectors[of[chosen]]
    return items


def has_biases(card: Mapping[str, Any]) -> bool:
    """Whether column 0 of the vectors holds the items' biases; vectors carried over are as their source was."""
    source = card.get("source")
    return bool(card["biases"]) if "biases" in card else isinstance(source, Mapping) and has_biases(source)


def read_catalogue(path: Path) -> Catalogue:
    """The catalogue at `path`, in any of the forms publishers ship, or of an embeddings file.

    A folder or file of MovieLens (`movies.dat`, `u.item`, `movies.csv`), Netflix's `movie_titles.txt`, or a CSV
    with columns id, title and (if known) year. In a folder that holds ratings too, the ratings of each item are
    counted.
    """
    if path.suffix == ".safetensors":
        return load(path).catalogue
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
    from mutirao.recsys.reading import has_ratings, read  # late: it reads titles by this module

    if not has_ratings(folder):
        return known.counts
    rated = read(folder).catalogue
    times = dict(zip(rated.ids, rated.counts.tolist(), strict=True))
    return np.array([times.get(name, 0) for name in known.ids], np.int64)


def read_titles(file: Path) -> Catalogue:
    """The catalogue in a file of titles; nothing is counted."""
    rows = list(_rows(file))
    if not rows:
        raise ConfigError(f"{file} is an empty catalogue; right would be at least one item")
    seen: dict[str, int] = {}
    for line, name, _, _ in rows:
        if name in seen:
            raise ConfigError(f"{file}, line {line}: item {name!r} stands in line {seen[name]} already")
        seen[name] = line
    _, ids, titles, years = zip(*rows, strict=True)
    return Catalogue(ids, titles, np.array(years, np.int32), np.zeros(len(ids), np.int64))


FILES = ("movies.dat", "u.item", "movies.csv", "movie_titles.txt")


def catalogue_file(path: Path) -> Path | None:
    """The file that holds the catalogue: `path` itself, or one of the usual names in the folder."""
    if path.is_dir():
        return next((path / name for name in FILES if (path / name).is_file()), None)
    return path if path.is_file() else None


def _rows(file: Path) -> Iterator[tuple[int, str, str, int]]:
    """Line, id, title and year of each item."""
    text = _decoded(file)
    if file.name == "movie_titles.txt":
        yield from _netflix(file, text)
    elif file.suffix == ".csv":
        yield from _csv(file, text)
    else:
        yield from _movielens(file, text, "|" if file.name == "u.item" else "::")


def _decoded(file: Path) -> str:
    """The text of a file: UTF-8 if it is, or else latin-1, in which MovieLens and Netflix ship their titles."""
    content = file.read_bytes()
    if b"\0" in content:
        raise ConfigError(f"{file} is not a text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r")


def _movielens(file: Path, text: str, separator: str) -> Iterator[tuple[int, str, str, int]]:
    for number, line in _lines(text):
        name, *rest = line.split(separator)
        if not rest or not name.strip():
            raise ConfigError(f"{file}, line {number}: right would be ID{separator}TITLE{separator}...")
        title = rest[0].strip()
        released = re.search(r"(\d{4})$", rest[1].strip()) if separator == "|" and len(rest) > 1 else None
        yield number, name.strip(), title, _year(title) or (int(released[1]) if released else 0)


def _netflix(file: Path, text: str) -> Iterator[tuple[int, str, str, int]]:
    for number, line in _lines(text):
        name, _, rest = line.partition(",")
        year, comma, title = rest.partition(",")  # a title may hold commas of its own
        if not comma or not name.strip() or not (year.strip().isdecimal() or year.strip() in ("NULL", "")):
            raise ConfigError(f"{file}, line {number}: right would be ID,YEAR,TITLE, with NULL for an unknown year")
        yield number, name.strip(), title.strip(), int(year) if year.strip().isdecimal() else 0


def _csv(file: Path, text: str) -> Iterator[tuple[int, str, str, int]]:
    reader = csv.reader(io.StringIO(text))
    header = [name.strip().lower() for name in next(reader, [])]
    at: Mapping[str, int] = {name: k for k, name in enumerate(header)}
    key = next((at[name] for name in ID_COLUMNS if name in at), None)
    if key is None or "title" not in at:
        raise ConfigError(
            f"{file}, line 1: the columns are {', '.join(header) or 'none'}; right would be id,title,year"
        )
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header) or not cells[key].strip():
            raise ConfigError(f"{file}, line {reader.line_num}: {len(cells)} cells, or no id; {len(header)} are needed")
        title, year = cells[at["title"]].strip(), cells[at["year"]].strip() if "year" in at else ""
        if year and year != "NULL" and not re.fullmatch(r"\d{1,4}(\.0)?", year):
            raise ConfigError(f"{file}, line {reader.line_num}: {year!r} is not a year")
        number = int(float(year)) if year and year != "NULL" else _year(title)
        yield reader.line_num, cells[key].strip(), title, number


def _year(title: str) -> int:
    found = YEAR.search(title)
    return int(found[1]) if found else 0
