"""Notes that people keep with a run, in `notes.md` of its folder: never part of what was audited."""

import contextlib
import hashlib
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

NAME = "notes.md"
MOST = 20_000  # bytes of a note
WRITING = threading.Lock()  # between looking at the notes and replacing them


@dataclass(frozen=True)
class RunNotes:
    """What is noted, and a mark that changes with it."""

    text: str = ""
    mark: str = ""  # empty: there are none
    problem: str = ""  # why they can be neither shown nor changed


class Changed(Exception):
    """Somebody else wrote since; nothing was replaced."""

    def __init__(self, now: RunNotes) -> None:
        super().__init__("somebody else has changed the notes meanwhile")
        self.now = now


def read_notes(folder: Path) -> RunNotes:
    """The notes of a run or study."""
    file = folder / NAME
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
        return RunNotes(problem=f"{NAME} is longer than {MOST:,} bytes; it is left as it is")
    return RunNotes(content.decode("utf-8", errors="replace"), hashlib.sha256(content).hexdigest()[:16])


def write_notes(folder: Path, text: str, seen: str) -> RunNotes:
    """Replace the notes in one step if they are still those with the mark `seen`; without a word in them they go."""
    content = text.replace("\r\n", "\n").encode("utf-8", errors="replace")
    if len(content) > MOST:
        raise ValueError(f"notes have at most {MOST:,} bytes, and these have {len(content):,}")
    with WRITING:
        now = read_notes(folder)
        if now.problem:
            raise ValueError(now.problem)
        if now.mark != seen:
            raise Changed(now)
        if not text.strip():
            (folder / NAME).unlink(missing_ok=True)
            return RunNotes()
        part = folder / f".{NAME}.{secrets.token_hex(8)}"  # new: no link can lie in wait under its name
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
