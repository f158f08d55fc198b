"""Where copies of data sets lie: in folders that hold one folder a set, of which `$MUTIRAO_DATA` names the first."""

import os
from pathlib import Path

from mutirao.datasets.image_files import cache_home
from mutirao.datasets.published import PUBLISHED
from mutirao.errors import ConfigError

DEBIAN = Path("/usr/share/datasets")  # where Debian's packages put theirs


def own_homes() -> list[Path]:
    """The folders that `$MUTIRAO_DATA` names, or else the one in the user's cache; the first is where sets are put."""
    named = [Path(p).expanduser() for p in os.environ.get("MUTIRAO_DATA", "").split(os.pathsep) if p]
    return named or [cache_home() / "data"]


def homes() -> list[Path]:
    """All folders in which sets are looked for."""
    return [*own_homes(), DEBIAN]


def find_copy(name: str, places: list[Path] | None = None) -> Path | None:
    """The folder in which a published set lies; None if none is at hand."""
    for home in homes() if places is None else places:
        for folder in PUBLISHED[name].folders if name in PUBLISHED else ():
            if (home / folder).is_dir():
                return home / folder
    return None


def find_named(name: str) -> Path:
    """The folder of a published set, or one line that says how to get it."""
    if found := find_copy(name):
        return found
    raise ConfigError(f"data: {name} is not here: {say_how(name)}, or give the path of a copy")


def say_how(name: str) -> str:
    """How a set comes here: by a command, or by hand."""
    known = PUBLISHED[name]
    if known.files:
        return f"mutirao data get {name} fetches it ({known.size}, {known.terms})"
    return f"see {known.page} ({known.by_hand}), and put it into {own_homes()[0] / known.folders[0]}"


def find_data(data: Path | str) -> Path:
    """The path itself if something lies there, or the copy of the set that it names."""
    path = Path(data).expanduser()
    name = str(data)
    if name in PUBLISHED and PUBLISHED[name].folders and not path.exists():
        return find_named(name)
    return path
