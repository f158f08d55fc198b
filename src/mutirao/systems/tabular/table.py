"""Tables of columns, each of numbers, dates or categories, with missing values; and the kind of a column of text."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Rows = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.object_]
Kind = Literal["number", "date", "category", "empty"]

MISSING = {"", "na", "n/a", "nan", "null", "?"}
DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?")
COMMA = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")  # a number with a decimal comma
# Names of columns that number rows or people, which do not generalise.
IDENTIFIER = re.compile(r"(?i:|id|uuid|guid|index|rownames|unnamed: \d+|.*[_ .-](id|uuid|guid))|.*[a-z]I[dD]")
DAY = 86400.0
LONGEST = 200  # characters of the name of a column, a category or a class


@dataclass(frozen=True, eq=False)
class Column:
    """Values of one kind: numbers, dates as days since 1970, or text; missing ones are NaN, or '' in text."""

    kind: Kind
    values: Floats | Texts

    def take(self, rows: Rows) -> "Column":
        """Only these rows."""
        return Column(self.kind, self.values[rows])

    @property
    def numbers(self) -> Floats:
        """The values of a column of numbers or dates."""
        return np.asarray(self.values, np.float64)

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """A mask of the missing values."""
        if self.kind == "category":
            return np.asarray(self.values == "", bool)
        return np.isnan(self.numbers)

    def labels(self) -> list[str]:
        """Each value as text: numbers in their usual form, '' for a missing value."""
        if self.kind == "category":
            return [str(v) for v in self.values]
        return [format_number(v) for v in self.numbers.tolist()]


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of one length."""

    columns: Mapping[str, Column]
    rows: int

    def __len__(self) -> int:
        return self.rows

    def take(self, rows: Rows) -> "Table":
        """Only these rows."""
        return Table({name: column.take(rows) for name, column in self.columns.items()}, len(rows))

    def without(self, names: Sequence[str]) -> "Table":
        """Without these columns."""
        return Table({name: column for name, column in self.columns.items() if name not in names}, self.rows)


def format_number(value: float) -> str:
    """A number as the name of a class, a category or a client; '' for NaN.

    >>> format_number(3.0), format_number(0.5), format_number(float("nan"))
    ('3', '0.5', '')
    """
    if math.isnan(value):
        return ""
    if value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)


def is_name(text: str) -> bool:
    """Whether a text is valid as the name of a column, a category or a class in a profile or schema."""
    return len(text) <= LONGEST and text.isprintable()


def as_column(where: str, cells: Sequence[str], forced: str = "", comma: bool = False) -> Column:
    """Convert text to numbers or dates (ISO 8601) if all of it can be, or else to categories; `forced` sets the kind.

    With `comma`, numbers may have a decimal comma. `where` names the column in errors.
    """
    texts = [cell.strip() for cell in cells]
    known = [t for t in texts if t.casefold() not in MISSING]
    if not known and not forced:
        return Column("empty", np.full(len(texts), np.nan))
    for kind, read in (("number", parse_numbers), ("date", parse_dates)):
        if forced not in ("", kind):
            continue
        found = read(known, comma)
        if isinstance(found, str) and forced:
            raise ConfigError(f"{where}: {found[:40]!r} is no {kind}, but the setting columns= requires this kind")
        if not isinstance(found, str):
            values = np.full(len(texts), np.nan)
            values[[t.casefold() not in MISSING for t in texts]] = found
            if not np.isfinite(found).all():
                raise ConfigError(f"{where} contains an infinite number; leave the cell empty, or remove the column")
            return Column(kind, values)  # type: ignore[arg-type]
    # Some programs write True, others TRUE: sites with either have to agree on the same two categories.
    if {t.casefold() for t in known} <= {"true", "false"}:
        texts = [t.lower() for t in texts]
    return Column("category", np.array(["" if t.casefold() in MISSING else t for t in texts], object))


def parse_numbers(texts: Sequence[str], comma: bool) -> Floats | str:
    """Convert all texts to numbers, or return the first that is none."""
    if all(map(looks_numeric, texts)):
        return np.array(list(map(float, texts)), np.float64)
    if comma and all(COMMA.fullmatch(t) for t in texts):
        return np.array([float(t.replace(",", ".")) for t in texts], np.float64)
    return next(t for t in texts if not looks_numeric(t))


def looks_numeric(text: str) -> bool:
    """Whether a text is a number; Python's 1_000 is not accepted."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def parse_dates(texts: Sequence[str], comma: bool) -> Floats | str:
    """Convert all texts to days since 1970, or return the first that is no date; without an offset it is UTC."""
    days: list[float] = []
    for text in texts:
        if not DATE.fullmatch(text):
            return text
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:  # such as the 31st of February
            return text
        days.append(days_of(moment))
    return np.array(days, np.float64)


def days_of(moment: date | datetime) -> float:
    """Days since 1970-01-01."""
    if not isinstance(moment, datetime):
        return float(moment.toordinal() - date(1970, 1, 1).toordinal())
    if not moment.tzinfo:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() / DAY
