"""Append-only journals in `checkpoints/`: the roster of many clients, and large states of simulated clients.

A small roster and few states are stored whole in every state file. Large ones go into journals, to which each round
adds only what it changed. A state file then stores the journal's length after its round and the hash of its content, so
that any round can be restored from the one file.
"""

import contextlib
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId
from mutirao.core.roster import COUNTS, Roster
from mutirao.errors import Damaged
from mutirao.io import append_whole, name_path_in_errors, sync
from mutirao.simulation.client_states import ClientStates, StateFile, place

LENGTH = 8  # bytes before a block, for its length
EMPTY = hashlib.sha256(b"").hexdigest()


class BlockFile:
    """An append-only file of blocks; a `mark` is its length and the hash of all blocks up to there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.head = EMPTY
        # The hash at each length of the file on disk: it is read once for the checks of all rounds.
        self._heads: dict[int, str] = {}

    @property
    def mark(self) -> list[Any]:
        """The length and hash that a state file stores."""
        return [self.size, self.head]

    def append(self, block: bytes) -> None:
        """Add a block."""
        append_whole(self.path, len(block).to_bytes(LENGTH, "little") + block)
        self.size += LENGTH + len(block)
        self.head = chain(self.head, block)

    def go_on_after(self, mark: list[Any] | None) -> None:
        """Remove the blocks after that mark."""
        self.size, self.head = mark or (0, EMPTY)
        self._heads = {}
        if self.path.exists():
            with name_path_in_errors(self.path):
                os.truncate(self.path, self.size)

    def check(self, mark: list[Any]) -> None:
        """Raise Damaged if the file does not have that length and hash."""
        if not self._heads:
            head = EMPTY
            end = 0
            with read_blocks(self.path) as blocks:
                for block in blocks:
                    head = chain(head, block)
                    end += LENGTH + len(block)
                    self._heads[end] = head
        known = isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], int)
        if not known or self._heads.get(mark[0]) != mark[1]:
            raise Damaged(f"{self.path} was altered or cut off")

    @contextlib.contextmanager
    def until(self, mark: list[Any]) -> Iterator[Iterator[memoryview]]:
        """The blocks up to a mark, which is checked first."""
        self.check(mark)

        def each(blocks: Iterator[memoryview]) -> Iterator[memoryview]:
            left = mark[0]
            for block in blocks:
                yield block
                left -= LENGTH + len(block)
                if not left:
                    return

        with read_blocks(self.path) as blocks:
            yield each(blocks)


def chain(head: str, block: Any) -> str:
    """The hash of a file after one more block."""
    sha = hashlib.sha256(head.encode())
    sha.update(block)
    return sha.hexdigest()


@contextlib.contextmanager
def read_blocks(path: Path) -> Iterator[Iterator[memoryview]]:
    """The complete blocks of a file, one after the other, without reading all of it into memory."""
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
        # Release the last view: a map cannot be closed while a view of it exists.
        found.close()


FEW = 10_000  # clients with any contact: up to so many, each state file stores the whole roster


class RosterJournal:
    """The changed rows of the roster, round by round. `save` after each round; `go_on_after` when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.blocks = BlockFile(path)
        self._ids: list[str] = []
        self._last: Arrays = {}  # the columns as they were written last

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self.blocks.path

    @property
    def is_used(self) -> bool:
        """Whether the roster is too large for a state file."""
        return self.blocks.size > 0

    @property
    def mark(self) -> list[Any]:
        """The length and hash that a state file stores."""
        return self.blocks.mark

    def save(self, roster: Roster) -> None:
        """Append the rows that changed since the last call, if the roster is large."""
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
        """Remove what was written after that mark; `roster` is the roster as of then."""
        self.blocks.go_on_after(mark)
        if mark:
            self._ids = roster.ids
            self._last = {name: column.copy() for name, column in roster_columns(roster).items()}

    def check(self, mark: list[Any]) -> None:
        """Raise Damaged if the file does not have that length and hash."""
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
                except Exception as error:
                    # safetensors raises errors of its own, not ValueError.
                    raise Damaged(f"{self.path} contains a block that is no roster") from error
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
        """The rows that differ from what was written last; a new client's were zeros and NaN."""
        now = roster_columns(roster)
        # The roster is sorted by name: new clients shift the rows of the others.
        if self._ids is not roster.ids:
            place = np.array([roster.row(c) for c in self._ids], np.intp)
            before = self._last
            self._ids = roster.ids
            self._last = {name: unknown_column(name, len(roster), column) for name, column in (before | now).items()}
            for name, column in before.items():
                self._last[name][place] = column
        differs = np.zeros(len(roster), np.bool_)
        for name, column in now.items():
            last = self._last.setdefault(name, unknown_column(name, len(roster), column))
            # Bits are compared, because NaN as a value is not equal to itself.
            changed = column.view(np.int64) != last.view(np.int64)
            if changed.ndim > 1:
                changed = changed.any(axis=1)
            differs |= changed
        return np.flatnonzero(differs)


def roster_columns(roster: Roster) -> dict[str, Array]:
    """All stored columns, by their names in files."""
    out = {name: getattr(roster, name) for name in COUNTS} | {f"figure.{k}": v for k, v in roster.figures.items()}
    return out | {f"vector.{k}": v for k, v in roster.vectors.items()}


def unknown_column(name: str, rows: int, like: Array) -> Array:
    """A column of the same shape, of clients without any contact."""
    if name in COUNTS:
        return np.zeros(rows, np.int64)
    return np.full((rows, *like.shape[1:]), np.nan)


WASTE = 2  # the files may take so many times the bytes of the current states


class StateIndex:
    """Which file each client's current state is in, updated from round to round."""

    def __init__(self) -> None:
        self.last: dict[ClientId, StateFile] = {}  # of the current states
        self.files: dict[Path, int] = {}  # files with any current state, the oldest first, and their bytes
        # (round, file, bytes): files without any current state since that round. Earlier checkpoints still need them.
        self.past: deque[tuple[int, Path, int]] = deque()
        self._left: dict[Path, set[ClientId]] = {}
        self.needed = 0  # bytes of the current states
        self.taken = 0  # bytes of the files that contain them

    def move(self, number: int, places: dict[ClientId, StateFile | None]) -> int:
        """Enter the states of a round, None for a removed one; return the bytes that only earlier rounds still need."""
        freed = 0
        for client, filed in places.items():
            if filed is not None:
                self.files[filed.path] = self.files.get(filed.path, 0) + filed.size
                self.needed += filed.size
                self.taken += filed.size
                self._left.setdefault(filed.path, set()).add(client)
            if (before := self.last.pop(client, None)) is not None:
                self.needed -= before.size
                self._left[before.path].discard(client)
                if not self._left[before.path]:
                    del self._left[before.path]
                    size = self.files.pop(before.path)
                    self.past.append((number, before.path, size))
                    self.taken -= size
                    freed += size
            if filed is not None:
                self.last[client] = filed
        return freed

    def wasteful(self) -> set[ClientId]:
        """Clients to write again, so that old files with few current states can be removed."""
        again: set[ClientId] = set()
        taken = self.taken
        for path, size in self.files.items():
            if taken <= WASTE * self.needed:
                break
            again |= self._left[path]
            taken -= size
        return again


class StateJournal:
    """The states of a run's simulated clients. `save` after each round; `go_on_after` when a run is resumed.

    Each round writes one file in `checkpoints/sites` with the states that it changed; `sites.journal` lists them with
    their places and hashes. Files that no checkpoint needs are removed, and so are files of rounds never committed.
    """

    def __init__(self, checkpoints: Path) -> None:
        self.home = checkpoints / "sites"
        self.journal = BlockFile(checkpoints / "sites.journal")
        self.states = ClientStates(self.home)
        self.index = StateIndex()
        self._new: list[Path] = []  # not yet forced to the disk
        # Checked already: the same state belongs to many rounds, and is read and hashed only once.
        self._good: set[StateFile] = set()

    @property
    def is_used(self) -> bool:
        """Whether the states are too large for a state file."""
        return self.journal.size > 0

    def save(self, number: int, durable: bool) -> int:
        """Write the states that the round changed, if they are large; return the bytes only earlier rounds need."""
        if not self.states.many or not self.states.changed:
            return 0
        changed = self.states.changed
        path = self.path(number)
        due = changed | self.index.wasteful()
        places = write_states(path, self.states, sorted(client for client in due if client in self.states))
        written = {client: [f.begin, f.size, f.sha] for client, f in places.items()}
        gone = sorted(client for client in changed if client not in self.states)
        freed = self.index.move(number, {**places, **dict.fromkeys(gone)})
        self.states.settle(places)
        self.journal.append(json.dumps([number, written, gone]).encode())
        self._new.append(path)
        if durable:
            for file in [*self._new, self.journal.path]:
                sync(file)
            self._new = []
        return freed

    def forget(self, oldest: int) -> None:
        """Remove the files that only checkpoints before `oldest` needed."""
        while self.index.past and self.index.past[0][0] <= oldest:
            self.index.past.popleft()[1].unlink(missing_ok=True)

    def go_on_after(self, mark: list[Any] | None, oldest: int) -> None:
        """Restore the states as of a mark; files written later, or needed by no checkpoint, are removed."""
        self.index = self._read(mark) if mark else StateIndex()
        self.journal.go_on_after(mark)
        self.states.adopt(self.index.last)
        while self.index.past and self.index.past[0][0] <= oldest:
            self.index.past.popleft()
        needed = {*self.index.files, *(path for _, path, _ in self.index.past)}
        if not self.home.is_dir():
            return
        for file in self.home.iterdir():
            if file not in needed:
                file.unlink()

    def check(self, mark: list[Any]) -> None:
        """Raise Damaged if a state as of that mark is missing or altered."""
        for filed in self._read(mark).last.values():
            if filed not in self._good:
                filed.read()
                self._good.add(filed)

    def read(self, mark: list[Any]) -> Arrays:
        """All states as of that mark, in the form of a fleet's `snapshot`."""
        arrays: Arrays = {}
        for client, filed in self._read(mark).last.items():
            for name, value in filed.load().items():
                arrays[json.dumps([client, name])] = value
        return arrays

    def path(self, number: int) -> Path:
        """The file with the states that a round changed."""
        return self.home / f"states_{number:03d}"

    def _read(self, mark: list[Any]) -> StateIndex:
        """The index as of that mark."""
        index = StateIndex()
        try:
            with self.journal.until(mark) as blocks:
                for block in blocks:
                    number, written, gone = json.loads(bytes(block))
                    path = self.path(int(number))
                    places = {c: StateFile(path, int(b), int(size), str(sha)) for c, (b, size, sha) in written.items()}
                    index.move(int(number), {**places, **dict.fromkeys(gone)})
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise Damaged(f"{self.journal.path} contains a block that is no list of states") from error
        return index


def write_states(path: Path, states: ClientStates, clients: list[ClientId]) -> dict[ClientId, StateFile]:
    """Write these states one after the other into a file; return the place of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places: dict[ClientId, StateFile] = {}
    at = 0
    with name_path_in_errors(path), path.open("wb") as file:
        for client in clients:
            content = states.content(client)
            file.write(content)
            places[client] = place(path, at, content)
            at += len(content)
    return places
