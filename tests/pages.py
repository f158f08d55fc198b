"""What the pages for newcomers show, taken out of their Markdown: commands in the order they stand, and files."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("mutirao", "make", "pip", "python", "python3", "py", "source", "cd", "docker")
INLINE = re.compile(r"`((?:{}) [^`]+)`".format("|".join(PROGRAMS)))


@dataclass(frozen=True)
class Shown:
    """A command of a page, and which block it stands in: a block begins in the folder the page begins in."""

    text: str
    block: int

    @property
    def words(self) -> list[str]:
        """The command as a shell would split it, without the remark behind it."""
        return shlex.split(self.text, comments=True)

    @property
    def command(self) -> str:
        """The command alone, its blanks made one: by this it is named in lists of exceptions."""
        return " ".join(self.words)


def commands(page: str) -> list[Shown]:
    """All commands of a page: lines of its console blocks, and code in a sentence or table that begins as one."""
    text = (HOME / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(rf"{FENCE.pattern}|{INLINE.pattern}", text, re.DOTALL | re.MULTILINE):
        kind, _, body, inline = match.groups()
        if inline:
            found.append(Shown(inline, match.start()))
        elif kind == "console":
            lines = [line.removeprefix("$ ") for line in body.splitlines()]
            found += [Shown(line, match.start()) for line in lines if line.strip()]
    return found


def files(page: str) -> dict[str, str]:
    """The files a page asks its reader to save: blocks with a title."""
    return {name: body for _, name, body in FENCE.findall((HOME / page).read_text(encoding="utf-8")) if name}
