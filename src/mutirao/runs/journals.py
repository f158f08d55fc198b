"""An append-only file of blocks, each of whose hashes rests on the one before: how long it was tells all it held."""

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

LENGTH = 8  # bytes before a block that say how long it is
EMPTY = hashlib.sha256(b"").hexdigest()


class BlockFile:
    """The file; a `mark` is its length and the hash of all that it held by then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.head = 0, EMPTY
        self._heads: dict[int, str] = {}  # of the file as found, by length: read once, for all who ask

    @property
    def mark(self) -> list[Any]:
        """What a state file says of it."""
        return [self.size, self.head]

    def append(self, block: bytes) -> None:
        """Add a block."""
        append_whole(self.path, len(block).to_bytes(LENGTH, "little") + block)
        self.size, self.head = self.size + LENGTH + len(block), chain(self.head, block)

    def go_on_after(self, mark: list[Any] | None) -> None:
        """Drop what was written after that mark."""
        self.size, self.head = mark or (0, EMPTY)
        self._heads = {}
        if self.path.exists():
            with name_path_in_errors(self.path):
                os.truncate(self.path, self.size)

    def check(self, mark: list[Any]) -> None:
        """Damaged if the file does not hold what a state file says it does."""
        if not self._heads:
            head, end = EMPTY, 0
            with read_blocks(self.path) as blocks:
                for block in blocks:
                    head, end = chain(head, block), end + LENGTH + len(block)
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
    """The whole blocks of a file, one after the other, without reading all of it into memory."""
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


WASTE = 2  # times the bytes of all states that files with any of them may have


class StateIndex:
    """Which state lies in which file, followed from round to round."""

    def __init__(self) -> None:
        self.last: dict[ClientId, StateFile] = {}  # where the states of now lie
        self.files: dict[Path, int] = {}  # files with any of them, the oldest first, and their bytes
        self.past: deque[tuple[int, Path, int]] = deque()  # files without, since which round, and their bytes
        self._left: dict[Path, set[ClientId]] = {}
        self.needed = self.taken = 0  # bytes of the states of now, and of the files that they lie in

    def move(self, number: int, places: dict[ClientId, StateFile | None]) -> int:
        """Enter the states of a round, None for one that is gone; how many bytes only earlier rounds need now."""
        freed = 0
        for client, filed in places.items():
            if filed is not None:
                self.files[filed.path] = self.files.get(filed.path, 0) + filed.size
                self.needed, self.taken = self.needed + filed.size, self.taken + filed.size
                self._left.setdefault(filed.path, set()).add(client)
            if (before := self.last.pop(client, None)) is not None:
                self.needed -= before.size
                self._left[before.path].discard(client)
                if not self._left[before.path]:
                    del self._left[before.path]
                    self.past.append((number, before.path, size := self.files.pop(before.path)))
                    self.taken, freed = self.taken - size, freed + size
            if filed is not None:
                self.last[client] = filed
        return freed

    def wasteful(self) -> set[ClientId]:
        """Whose states are better written anew, so that old files with little in them can go."""
        again: set[ClientId] = set()
        taken = self.taken
        for path, size in self.files.items():
            if taken <= WASTE * self.needed:
                break
            again |= self._left[path]
            taken -= size
        return again


class StateJournal:
    """The states of a run. `save` after each round; `go_on_after` before the first one that follows."""

    def __init__(self, checkpoints: Path) -> None:
        self.home = checkpoints / "sites"
        self.journal = BlockFile(checkpoints / "sites.journal")
        self.states = ClientStates(self.home)
        self.shelf = StateIndex()
        self._new: list[Path] = []  # since they were last forced to the disk
        self._good: set[StateFile] = set()  # looked at already: a state is of many rounds

    @property
    def is_used(self) -> bool:
        """Whether the states have grown too large for a state file."""
        return self.journal.size > 0

    def save(self, number: int, durable: bool) -> int:
        """Write the states that the round changed, if they are many; how many bytes only earlier rounds need now."""
        if not self.states.many or not self.states.changed:
            return 0
        changed = self.states.changed
        path, due = self.path(number), changed | self.shelf.wasteful()
        places = write_states(path, self.states, sorted(client for client in due if client in self.states))
        told = {client: [f.begin, f.size, f.sha] for client, f in places.items()}
        gone = sorted(client for client in changed if client not in self.states)
        freed = self.shelf.move(number, {**places, **dict.fromkeys(gone)})
        self.states.settle(places)
        self.journal.append(json.dumps([number, told, gone]).encode())
        self._new.append(path)
        if durable:
            for file in [*self._new, self.journal.path]:
                sync(file)
            self._new = []
        return freed

    def forget(self, oldest: int) -> None:
        """Remove the files that no checkpoint from the `oldest` on needs."""
        while self.shelf.past and self.shelf.past[0][0] <= oldest:
            self.shelf.past.popleft()[1].unlink(missing_ok=True)

    def go_on_after(self, mark: list[Any] | None, oldest: int) -> None:
        """Take up the states as of a mark; what was written after it goes, and what no checkpoint needs."""
        self.shelf = self._read(mark) if mark else StateIndex()
        self.journal.go_on_after(mark)
        self.states.adopt(self.shelf.last)
        while self.shelf.past and self.shelf.past[0][0] <= oldest:
            self.shelf.past.popleft()
        needed = {*self.shelf.files, *(path for _, path, _ in self.shelf.past)}
        for file in self.home.iterdir() if self.home.is_dir() else ():
            if file not in needed:
                file.unlink()

    def check(self, mark: list[Any]) -> None:
        """Damaged if a state of that mark is missing or is not the one that was written."""
        for filed in self._read(mark).last.values():
            if filed not in self._good:
                filed.read()
                self._good.add(filed)

    def read(self, mark: list[Any]) -> Arrays:
        """All states of that mark at once, as a fleet's `snapshot` gives them."""
        states = {client: filed.load() for client, filed in self._read(mark).last.items()}
        return {json.dumps([client, name]): v for client, state in states.items() for name, v in state.items()}

    def path(self, number: int) -> Path:
        """Where the states lie that a round has changed."""
        return self.home / f"states_{number:03d}"

    def _read(self, mark: list[Any]) -> StateIndex:
        """Where everything lay at that mark."""
        shelf = StateIndex()
        try:
            with self.journal.until(mark) as blocks:
                for block in blocks:
                    number, told, gone = json.loads(bytes(block))
                    path = self.path(int(number))
                    places = {c: StateFile(path, int(b), int(size), str(sha)) for c, (b, size, sha) in told.items()}
                    shelf.move(int(number), {**places, **dict.fromkeys(gone)})
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise Damaged(f"{self.journal.path} holds what is no list of states") from error
        return shelf


def write_states(path: Path, states: ClientStates, clients: list[ClientId]) -> dict[ClientId, StateFile]:
    """Write these states one after the other into a file; where each is."""
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
