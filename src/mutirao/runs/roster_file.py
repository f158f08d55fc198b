"""What the server knows of very many clients, on disk: each round adds the rows that it changed, and no others.

A small roster lies whole in every state file. A large one goes into `roster.journal`, block by block; a state file then
says how long the journal was after its round, and the hash of all that it held, each block's resting on the one before.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays
from mutirao.core.roster import COUNTS, Roster
from mutirao.errors import Damaged
from mutirao.runs.block_file import BlockFile

FEW = 10_000  # clients that were ever heard of: of so many a state file holds all


class RosterJournal:
    """An append-only file of changed rows. `save` after each round; `go_on_after` before the first that follows."""

    def __init__(self, path: Path) -> None:
        self.blocks = BlockFile(path)
        self._ids: list[str] = []
        self._last: Arrays = {}  # the columns as they were written last

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.blocks.path

    @property
    def is_used(self) -> bool:
        """Whether the roster has grown too large for a state file."""
        return self.blocks.size > 0

    @property
    def mark(self) -> list[Any]:
        """What a state file says of the journal."""
        return self.blocks.mark

    def save(self, roster: Roster) -> None:
        """Add the rows that changed since the last time, if the roster is a large one."""
        if not self.is_used and (len(roster) <= FEW or np.count_nonzero(roster.touched()) <= FEW):
            return
        changed = self._changed(roster)
        if not len(changed) and self.is_used:
            return
        from safetensors.numpy import save

        self.blocks.append(save(roster.to_arrays(changed)))
        for name, column in roster_columns(roster).items():
            self._last[name][changed] = column[changed]

    def go_on_after(self, mark: list[Any] | None, roster: Roster) -> None:
        """Drop what was written after the round of that mark, whose roster this is."""
        self.blocks.go_on_after(mark)
        if mark:
            self._ids, self._last = roster.ids, {k: v.copy() for k, v in roster_columns(roster).items()}

    def check(self, mark: list[Any]) -> None:
        """Damaged if the file does not hold what a state file says it does."""
        self.blocks.check(mark)

    def read(self, mark: list[Any]) -> Roster:
        """The roster as of that mark."""
        from safetensors.numpy import load

        index: dict[str, int] = {}
        rows: list[npt.NDArray[np.intp]] = []
        parts: list[Arrays] = []
        with self.blocks.until(mark) as blocks:
            for block in blocks:
                try:
                    part = load(bytes(block))
                except Exception as error:  # safetensors raises its own kinds
                    raise Damaged(f"{self.path} holds what is no block of a roster") from error
                names = json.loads(part.pop("ids").tobytes())
                rows.append(np.array([index.setdefault(name, len(index)) for name in names], np.intp))
                parts.append(part)
        names = list(index)
        order = np.array(sorted(range(len(names)), key=names.__getitem__), np.intp)
        place = np.empty(len(names), np.intp)
        place[order] = np.arange(len(names))
        found: Arrays = {}
        for at, part in zip(rows, parts, strict=True):
            for name, values in part.items():
                if name not in found:
                    shape = (len(names), *values.shape[1:])
                    found[name] = np.full(shape, 0 if name in COUNTS else np.nan, values.dtype)
                found[name][place[at]] = values
        return Roster.of([names[i] for i in order.tolist()], found)

    def _changed(self, roster: Roster) -> npt.NDArray[np.intp]:
        """The rows that are not as they were written last; a newcomer's are zeros, and figures not known."""
        now = roster_columns(roster)
        if self._ids is not roster.ids:
            place = np.array([roster.row(c) for c in self._ids], np.intp)
            self._ids, before = roster.ids, self._last
            self._last = {k: unknown_column(k, len(roster), v) for k, v in (before | now).items()}
            for name, column in before.items():
                self._last[name][place] = column
        differs = np.zeros(len(roster), np.bool_)
        for name, column in now.items():
            last = self._last.setdefault(name, unknown_column(name, len(roster), column))
            changed = column.view(np.int64) != last.view(np.int64)  # by their bits: what is not known stays so
            differs |= changed if changed.ndim == 1 else changed.any(axis=1)
        return np.flatnonzero(differs)


def roster_columns(roster: Roster) -> dict[str, Array]:
    """All columns that are kept, by the names they have in files."""
    out = {name: getattr(roster, name) for name in COUNTS} | {f"figure.{k}": v for k, v in roster.figures.items()}
    return out | {f"vector.{k}": v for k, v in roster.vectors.items()}


def unknown_column(name: str, rows: int, like: Array) -> Array:
    """A column like this one, of clients that nothing is known of."""
    return np.zeros(rows, np.int64) if name in COUNTS else np.full((rows, *like.shape[1:]), np.nan)
