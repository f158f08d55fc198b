"""States of simulated clients when they are large: the most recently used in memory, the rest in files.

A mapping from clients to their states. The most recently used are in memory, up to `most` bytes; the others are read on
access. The run folder writes the `content` of the states that have `changed`, round by round, and passes the places
to `settle`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mutirao.core.arrays import Arrays, nbytes
from mutirao.core.fleet import FLEETING, ClientId
from mutirao.errors import Damaged
from mutirao.io import append_whole

FEW = 8 * 2**20  # bytes of all states together that every checkpoint can contain, so that no files are needed
MOST = 256 * 2**20  # bytes of states in memory
NOW = "now"  # the file of states that a round has changed and that do not fit into memory


@dataclass(frozen=True)
class StateFile:
    """Where in a file a state is, and its hash."""

    path: Path
    begin: int
    size: int  # bytes
    sha: str

    def read(self) -> bytes:
        """The state as it was written; Damaged if there is anything else."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                content = file.read(self.size)
        except FileNotFoundError as error:
            raise Damaged(f"{self.path} is missing") from error
        if hashlib.sha256(content).hexdigest() != self.sha:
            raise Damaged(f"{self.path} was altered or cut off")
        return content

    def load(self) -> Arrays:
        """The state; Damaged if it is not the one that was written."""
        from safetensors.numpy import load

        return load(self.read())  # what has the right hash is what was written


class ClientStates(MutableMapping[ClientId, Arrays]):
    """States of clients, of which at most `most` bytes are in memory; the others are in files in `home`.

    Up to `few` bytes in all, everything stays in memory and `many` is False. None: MOST and FEW.
    """

    def __init__(self, home: Path, most: int | None = None, few: int | None = None) -> None:
        self.home = home
        self.most = MOST if most is None else most
        self.few = FEW if few is None else few
        self.many = False
        self.changed: set[ClientId] = set()  # since the last `settle`
        self._loaded: OrderedDict[ClientId, Arrays] = OrderedDict()  # the least recently used first
        self._sizes: dict[ClientId, int] = {}  # of all states, in bytes
        self._stored: dict[ClientId, StateFile] = {}  # states that are on disk in their current version
        self._now: dict[ClientId, Arrays] = {}  # arrays of this round alone, of states that are in files
        self._in_memory = 0  # bytes
        self._total = 0
        self._spilled = 0

    def __getitem__(self, client: ClientId) -> Arrays:
        """A state, from memory or from its file; it must not be changed in place."""
        if client in self._loaded:
            self._loaded.move_to_end(client)
            return self._loaded[client]
        state = self._stored[client].load() | self._now.pop(client, {})
        self._load(client, state)
        return state

    def __setitem__(self, client: ClientId, state: Arrays) -> None:
        self._drop(client)
        self._sizes[client] = nbytes(state)
        self._total += self._sizes[client]
        self.many = self.many or self._total > self.few
        self.changed.add(client)
        self._load(client, state)

    def __delitem__(self, client: ClientId) -> None:
        if client not in self._sizes:
            raise KeyError(client)
        self._drop(client)
        self.changed.add(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, client: object) -> bool:
        return client in self._sizes  # without reading it

    def content(self, client: ClientId) -> bytes:
        """A state as it is stored: without the arrays of this round alone."""
        stored = self._stored.get(client)
        if stored is None:
            return encode(self._loaded[client])
        return stored.read()

    def settle(self, places: Mapping[ClientId, StateFile]) -> None:
        """Note where all changed states have been stored."""
        self._stored.update(places)
        self.changed.clear()
        self._spilled = 0
        # Each state in this file has changed, and so it has a place in another one now.
        (self.home / NOW).unlink(missing_ok=True)

    def adopt(self, stored: dict[ClientId, StateFile]) -> None:
        """Replace all states by those in files, none of them in memory and none changed."""
        self._loaded.clear()
        self._now.clear()
        self.changed.clear()
        self._stored = dict(stored)
        self._sizes = {client: f.size for client, f in stored.items()}
        self._spilled = 0
        self._in_memory = 0
        self._total = sum(self._sizes.values())
        self.many = bool(stored)

    def _load(self, client: ClientId, state: Arrays) -> None:
        self._loaded[client] = state
        self._in_memory += nbytes(state)
        # The last one stays, even if it alone takes more: it is in use.
        while self.many and self._in_memory > self.most and len(self._loaded) > 1:
            self._spill(*self._loaded.popitem(last=False))

    def _spill(self, client: ClientId, state: Arrays) -> None:
        self._in_memory -= nbytes(state)
        # Arrays of this round alone, such as secrets, are never written to disk.
        if now := {k: v for k, v in state.items() if k.startswith(FLEETING)}:
            self._now[client] = now
        if client not in self._stored:
            content = encode(state)
            path = self.home / NOW
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, content)
            self._stored[client] = place(path, self._spilled, content)
            self._spilled += len(content)

    def _drop(self, client: ClientId) -> None:
        if client in self._loaded:
            self._in_memory -= nbytes(self._loaded.pop(client))
        self._total -= self._sizes.pop(client, 0)
        self._stored.pop(client, None)
        self._now.pop(client, None)


def encode(state: Arrays) -> bytes:
    """A state as the content of a file."""
    from safetensors.numpy import save

    return bytes(save({k: np.asarray(v, order="C") for k, v in state.items() if not k.startswith(FLEETING)}))


def place(path: Path, begin: int, content: bytes) -> StateFile:
    """The place of that content once it is written."""
    return StateFile(path, begin, len(content), hashlib.sha256(content).hexdigest())
