"""What simulated sites remember when that is much: some of it in memory, the rest in files.

A mapping from clients to their states. Those used last are held in memory, up to `most` bytes; the others are read when
somebody asks for them. Whoever keeps a run on disk writes the `content` of what has `changed`, round by round, and
tells by `settle` where.
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

FEW = 8 * 2**20  # bytes of all states together: so few every checkpoint holds whole, and there are no files
MOST = 256 * 2**20  # bytes of states in memory
NOW = "now"  # the file of states that a round has changed and that there is no room for in memory


@dataclass(frozen=True)
class StateFile:
    """Where in a file a state lies, and what it must be like."""

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
    """States of clients, of which at most `most` bytes are in memory; `home` is where the others go.

    Until there are more than `few` bytes in all, everything is in memory, and they are not `many`. None: MOST and FEW.
    """

    def __init__(self, home: Path, most: int | None = None, few: int | None = None) -> None:
        self.home = home
        self.most, self.few = MOST if most is None else most, FEW if few is None else few
        self.many = False
        self.changed: set[ClientId] = set()  # since all was last settled
        self._held: OrderedDict[ClientId, Arrays] = OrderedDict()  # the least recently used first
        self._sizes: dict[ClientId, int] = {}  # of all states, in bytes
        self._filed: dict[ClientId, StateFile] = {}  # those that are on disk as they are now
        self._now: dict[ClientId, Arrays] = {}  # what is of this round alone, of states that are not held
        self._in_memory = self._total = self._spilled = 0

    def __getitem__(self, client: ClientId) -> Arrays:
        """A state, from memory or from its file; it is not to be changed in place."""
        if client in self._held:
            self._held.move_to_end(client)
            return self._held[client]
        state = self._filed[client].load() | self._now.pop(client, {})
        self._hold(client, state)
        return state

    def __setitem__(self, client: ClientId, state: Arrays) -> None:
        self._drop(client)
        self._sizes[client] = nbytes(state)
        self._total += self._sizes[client]
        self.many = self.many or self._total > self.few
        self.changed.add(client)
        self._hold(client, state)

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
        """A state as it is to be kept: without what is of this round alone."""
        filed = self._filed.get(client)
        return encode(self._held[client]) if filed is None else filed.read()

    def settle(self, places: Mapping[ClientId, StateFile]) -> None:
        """All that has changed is kept there now; nothing is left to be kept."""
        self._filed.update(places)
        self.changed.clear()
        self._spilled = 0
        (self.home / NOW).unlink(missing_ok=True)

    def adopt(self, filed: dict[ClientId, StateFile]) -> None:
        """Begin anew with states that are in files; nothing of them is in memory, and nothing has changed."""
        self._held.clear()
        self._now.clear()
        self.changed.clear()
        self._filed = dict(filed)
        self._sizes = {client: f.size for client, f in filed.items()}
        self._spilled = 0
        self._in_memory, self._total = 0, sum(self._sizes.values())
        self.many = bool(filed)

    def _hold(self, client: ClientId, state: Arrays) -> None:
        self._held[client] = state
        self._in_memory += nbytes(state)
        while self.many and self._in_memory > self.most and len(self._held) > 1:
            self._let_go(*self._held.popitem(last=False))

    def _let_go(self, client: ClientId, state: Arrays) -> None:
        self._in_memory -= nbytes(state)
        if now := {k: v for k, v in state.items() if k.startswith(FLEETING)}:
            self._now[client] = now
        if client not in self._filed:
            content, path = encode(state), self.home / NOW
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, content)
            self._filed[client] = place(path, self._spilled, content)
            self._spilled += len(content)

    def _drop(self, client: ClientId) -> None:
        if client in self._held:
            self._in_memory -= nbytes(self._held.pop(client))
        self._total -= self._sizes.pop(client, 0)
        self._filed.pop(client, None)
        self._now.pop(client, None)


def encode(state: Arrays) -> bytes:
    """What stays of a state, as a file holds it."""
    from safetensors.numpy import save

    return bytes(save({k: np.asarray(v, order="C") for k, v in state.items() if not k.startswith(FLEETING)}))


def place(path: Path, begin: int, content: bytes) -> StateFile:
    """Where that content lies, if it is written there."""
    return StateFile(path, begin, len(content), hashlib.sha256(content).hexdigest())
