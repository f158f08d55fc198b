"""What the server knows of very many clients, on disk: each round adds the rows that it changed, and no others.

A small roster lies whole in every state file. A large one goes into `roster.journal`, block by block; a state file then
says how long the journal was after its round, and the hash of all that it held, each block's resting on the one before.
"""

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays
from mutirao.core.files import append_whole, naming
from mutirao.core.roster import COUNTS, Roster
from mutirao.errors import Damaged

FEW = 10_000  # clients that were ever heard of: of so many a state file holds all
LENGTH = 8  # bytes before a block that say how long it is
EMPTY = hashlib.sha256(b"").hexdigest()


class Journal:
    """An append-only file of changed rows. `save` after each round; `go_on_after` before the first that follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.head = 0, EMPTY
        self._ids: list[str] = []
        self._last: Arrays = {}  # the columns as they were written last
        self._heads: dict[int, str] = {}  # of the file as found, by length: read once, for all who ask

    @property
    def is_used(self) -> bool:
        """Whether the roster has grown too large for a state file."""
        return self.size > 0

    @property
    def mark(self) -> list[Any]:
        """What a state file says of the journal."""
        return [self.size, self.head]

    def save(self, roster: Roster) -> None:
        """Add the rows that changed since the last time, if the roster is a large one."""
        if not self.is_used and (len(roster) <= FEW or np.count_nonzero(roster.touched()) <= FEW):
            return
        changed = self._changed(roster)
        if not len(changed) and self.is_used:
            return
        from safetensors.numpy import save

        block = save(roster.to_arrays(changed))
        append_whole(self.path, len(block).to_bytes(LENGTH, "little") + block)
        self.size, self.head = self.size + LENGTH + len(block), chain(self.head, block)
        for name, column in columns_of(roster).items():
            self._last[name][changed] = column[changed]

    def go_on_after(self, mark: list[Any] | None, roster: Roster) -> None:
        """Drop what was written after the round of that mark, whose roster this is."""
        self.size, self.head = mark or (0, EMPTY)
        self._heads = {}
        if mark:
            self._ids, self._last = roster.ids, {k: v.copy() for k, v in columns_of(roster).items()}
        if self.path.exists():
            with naming(self.path):
                os.truncate(self.path, self.size)

    def check(self, mark: list[Any]) -> None:
        """Damaged if the file does not hold what a state file says it does."""
        if not self._heads:
            head, end = EMPTY, 0
            with blocks_of(self.path) as blocks:
                for block in blocks:
                    head, end = chain(head, block), end + LENGTH + len(block)
                    self._heads[end] = head
        known = isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], int)
        if not known or self._heads.get(mark[0]) != mark[1]:
            raise Damaged(f"{self.path} was altered or cut off")

    def read(self, mark: list[Any]) -> Roster:
        """The roster as of that mark."""
        from safetensors.numpy import load

        self.check(mark)
        index: dict[str, int] = {}
        rows: list[npt.NDArray[np.intp]] = []
        parts: list[Arrays] = []
        left = mark[0]
        with blocks_of(self.path) as blocks:
            for block in blocks:
                try:
                    part = load(bytes(block))
                except Exception as error:  # safetensors raises its own kinds
                    raise Damaged(f"{self.path} holds what is no block of a roster") from error
                names = json.loads(part.pop("ids").tobytes())
                rows.append(np.array([index.setdefault(name, len(index)) for name in names], np.intp))
                parts.append(part)
                left -= LENGTH + len(block)
                if not left:
                    break
        names = list(index)
        order = np.array(sorted(range(len(names)), key=names.__getitem__), np.intp)
        place = np.empty(len(names), np.intp)
        place[order] = np.arange(len(names))
        found: Arrays = {}
        for at, part in zip(rows, parts, strict=True):
            for name, values in part.items():
                if name not in found:
                    found[name] = np.full(len(names), 0 if name in COUNTS else np.nan, values.dtype)
                found[name][place[at]] = values
        return Roster.of([names[i] for i in order.tolist()], found)

    def _changed(self, roster: Roster) -> npt.NDArray[np.intp]:
        """The rows that are not as they were written last; a newcomer's are zeros, and figures not known."""
        now = columns_of(roster)
        if self._ids is not roster.ids:
            place = np.array([roster.row(c) for c in self._ids], np.intp)
            self._ids, before = roster.ids, self._last
            self._last = {k: newcomers(k, len(roster)) for k in now.keys() | before.keys()}
            for name, column in before.items():
                self._last[name][place] = column
        differs = np.zeros(len(roster), np.bool_)
        for name, column in now.items():
            last = self._last.setdefault(name, newcomers(name, len(roster)))
            differs |= column.view(np.int64) != last.view(np.int64)  # by their bits: what is not known stays so
        return np.flatnonzero(differs)


def columns_of(roster: Roster) -> dict[str, Array]:
    """All columns that are kept, by the names they have in files."""
    return {name: getattr(roster, name) for name in COUNTS} | {f"figure.{k}": v for k, v in roster.figures.items()}


def newcomers(name: str, rows: int) -> Array:
    """A column of clients that nothing is known of."""
    return np.zeros(rows, np.int64) if name in COUNTS else np.full(rows, np.nan)


def chain(head: str, block: Any) -> str:
    """The hash of a journal after one more block."""
    sha = hashlib.sha256(head.encode())
    sha.update(block)
    return sha.hexdigest()


@contextlib.contextmanager
def blocks_of(path: Path) -> Iterator[Iterator[memoryview]]:
    """The whole blocks of a journal, one after the other, without reading all of it into memory."""
    if not path.is_file() or not path.stat().st_size:
        yield iter(())
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:

        def each() -> Generator[memoryview, None, None]:
            at = 0
            while at + LENGTH <= len(content):
                end = at + LENGTH + int.from_bytes(content[at : at + LENGTH], "little")
                if end > len(content):
                    return
                with memoryview(content) as view, view[at + LENGTH : end] as block:
                    yield block
                at = end

        found = each()
        yield found
        found.close()
