"""Find local copies of published data sets: each in a folder of its own, below the folders in `$MUTIRAO_DATA`."""

import os
from pathlib import Path

from mutirao.datasets.image_files import cache_home
from mutirao.datasets.published import PUBLISHED
from mutirao.errors import ConfigError

DEBIAN = Path("/usr/share/datasets")  # where Debian's packages put theirs


def data_folders() -> list[Path]:
    """The folders in `$MUTIRAO_DATA`, or else one in the user's cache; downloads go into the first."""
    listed = os.environ.get("MUTIRAO_DATA", "").split(os.pathsep)
    return [Path(folder).expanduser() for folder in listed if folder] or [cache_home() / "data"]


def find_copy(name: str, folders: list[Path] | None = None) -> Path | None:
    """The folder of a local copy of a published set; None if there is none."""
    if name not in PUBLISHED:
        return None
    for home in [*data_folders(), DEBIAN] if folders is None else folders:
        for folder in PUBLISHED[name].folders:
            if (home / folder).is_dir():
                return home / folder
    return None


def require_copy(name: str) -> Path:
    """The folder of a local copy of a published set; ConfigError says how to get one."""
    if copy := find_copy(name):
        return copy
    raise ConfigError(f"data: {name} is not here: {how_to_get(name)}, or give the path of a copy")


def how_to_get(name: str) -> str:
    """How to get a published set: with a command, or by hand."""
    data_set = PUBLISHED[name]
    if data_set.files:
        return f"mutirao data get {name} fetches it ({data_set.size}, {data_set.terms})"
    return f"see {data_set.page} ({data_set.by_hand}), and put it into {data_folders()[0] / data_set.folders[0]}"


def find_data(data: Path | str) -> Path:
    """The path itself if it exists, or the local copy of the set that it names."""
    path = Path(data).expanduser()
    name = str(data)
    if name in PUBLISHED and PUBLISHED[name].folders and not path.exists():
        return require_copy(name)
    return path
