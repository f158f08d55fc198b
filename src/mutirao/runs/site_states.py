"""What the sites of a simulation remember, on disk: each round writes the states that it changed, and no others.

Few states lie whole in every state file. Many go into `checkpoints/sites`, a file a round with the states that it
changed, and `sites.journal` says which those are, where in the file, with their hashes; a state file says how long the
journal was. A file that no checkpoint needs any more is removed; states that would keep a file alive in which most is
outdated are written anew. Files that no committed round names are of a round that never was.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId
from mutirao.errors import Damaged
from mutirao.io import name_path_in_errors, sync
from mutirao.runs.block_file import BlockFile
from mutirao.simulation.client_states import StateFile, ClientStates, place

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


class StateFiles:
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
