"""Notes that people write about a run, in `notes.md` of its folder; the audit trail does not cover them."""

import contextlib
import hashlib
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

NAME = "notes.md"
MOST = 20_000  # bytes
WRITING = threading.Lock()  # held from reading the notes until they are replaced


@dataclass(frozen=True)
class RunNotes:
    """The notes of a run, and a mark that changes with their text."""

    text: str = ""
    mark: str = ""  # empty without notes
    problem: str = ""  # why they cannot be shown or changed


class Changed(Exception):
    """The notes were changed by others since they were read; nothing was replaced."""

    def __init__(self, now: RunNotes) -> None:
        super().__init__("the notes have been changed by others meanwhile")
        self.now = now


def read_notes(folder: Path) -> RunNotes:
    """The notes of a run or study."""
    file = folder / NAME
    # The folder may come from elsewhere: no link out of it is followed, and a pipe in it does not block.
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return RunNotes()
    except OSError as error:
        return RunNotes(problem=f"{NAME} cannot be read: {error.strerror}")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return RunNotes(problem=f"{NAME} is not a plain file")
    with os.fdopen(handle, "rb") as opened:
        content = opened.read(MOST + 1)
    if len(content) > MOST:
        return RunNotes(problem=f"{NAME} is longer than {MOST:,} bytes and cannot be edited here")
    return RunNotes(content.decode("utf-8", errors="replace"), hashlib.sha256(content).hexdigest()[:16])


def write_notes(folder: Path, text: str, seen: str) -> RunNotes:
    """Replace the notes atomically if their mark is still `seen`; a blank text removes them."""
    content = text.replace("\r\n", "\n").encode("utf-8", errors="replace")
    if len(content) > MOST:
        raise ValueError(f"expected at most {MOST:,} bytes of notes, got {len(content):,}")
    with WRITING:
        now = read_notes(folder)
        if now.problem:
            raise ValueError(now.problem)
        if now.mark != seen:
            raise Changed(now)
        if not text.strip():
            (folder / NAME).unlink(missing_ok=True)
            return RunNotes()
        # A random name, so that no symbolic link can have been placed under it.
        part = folder / f".{NAME}.{secrets.token_hex(8)}"
        try:
            with part.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(folder / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    return read_notes(folder)
