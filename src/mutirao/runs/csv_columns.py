"""A CSV file by columns, in about as much memory as it takes on disk, also with a million rows."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.io import plain_value
from mutirao.runs.csv_tables import read_csv_parts

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.intp]
LARGEST = 2.0**53  # the bound of integers in a file, which may contain anything
BREAK = "\n"  # between the cells of a column; our own tables have none within a cell


class Columns:
    """A CSV file by columns; a missing column is empty."""

    def __init__(self, path: Path) -> None:
        self.names: list[str] = []
        self.lengths: list[int] = []  # of each part, in rows
        self._parts: dict[str, list[str]] = {}  # a column as one text for each part, a line for each cell
        self._numbers: dict[str, Floats] = {}
        self._codes: dict[str, tuple[list[str], Codes]] = {}
        for self.names, rows in read_csv_parts(path):
            if rows:
                self.lengths.append(len(rows))
                for name, cells in zip(self.names, zip(*rows, strict=True), strict=True):
                    self._parts.setdefault(name, []).append(join_cells(cells))
        self.length = sum(self.lengths)

    def __len__(self) -> int:
        return self.length

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def cells(self, name: str) -> Iterator[list[str]]:
        """A column's cells as text, part by part."""
        if name not in self._parts:
            yield from ([""] * length for length in self.lengths)
            return
        for text in self._parts[name]:
            yield text.split(BREAK)

    def texts(self, name: str) -> tuple[str, ...]:
        """A column's cells as text; use `codes` for long tables."""
        return tuple(cell for part in self.cells(name) for cell in part)

    def codes(self, name: str) -> tuple[list[str], Codes]:
        """A column's distinct texts, in the order of their first rows, and each row's index into them."""
        if name not in self._codes:
            seen: dict[str, int] = {}
            codes = np.zeros(self.length, np.intp)
            at = 0
            for part in self.cells(name):
                codes[at : at + len(part)] = [seen.setdefault(cell, len(seen)) for cell in part]
                at += len(part)
            self._codes[name] = list(seen), codes
        return self._codes[name]

    def where(self, name: str, text: str) -> npt.NDArray[np.bool_]:
        """The rows in which a column has this text."""
        texts, codes = self.codes(name)
        if text not in texts:
            return np.zeros(self.length, np.bool_)
        return np.asarray(codes == texts.index(text))

    def numbers(self, name: str) -> Floats:
        """A column as numbers, NaN for other cells."""
        if name not in self._numbers:
            parts = [numbers_of(part) for part in self.cells(name)] if name in self else []
            self._numbers[name] = np.concatenate(parts) if parts else np.full(self.length, np.nan)
        return self._numbers[name]

    def wholes(self, name: str) -> npt.NDArray[np.int64]:
        """A column as integers, 0 for other cells."""
        return np.clip(np.nan_to_num(self.numbers(name)), -LARGEST, LARGEST).astype(np.int64)


def join_cells(cells: tuple[str, ...]) -> str:
    """Cells as one text, a line for each."""
    text = BREAK.join(cells)
    if text.count(BREAK) < len(cells):
        return text
    return BREAK.join(str(plain_value(cell)) for cell in cells)


def numbers_of(cells: list[str]) -> Floats:
    """Cells as numbers, NaN for all that are not finite."""
    try:
        values = np.array([cell or "nan" for cell in cells], np.float64)
    except ValueError:  # not all of them are numbers
        return np.array([finite_or_nan(cell) for cell in cells], np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def finite_or_nan(text: str) -> float:
    """A finite number, or NaN."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    if math.isfinite(value):
        return value
    return math.nan
