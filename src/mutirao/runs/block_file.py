"""An append-only file of blocks, each of whose hashes rests on the one before: how long it was tells all it held."""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from mutirao.errors import Damaged
from mutirao.io import append_whole, name_path_in_errors

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
