"""A published set from its publisher into a folder of data sets: fetched, checked, unpacked, there only when whole."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from mutirao.config import nearest
from mutirao.datasets import DATA_SETS
from mutirao.datasets.archives import is_archive, unpack
from mutirao.datasets.download import Unreachable, Watch, fetch_file, host_of
from mutirao.datasets.formats import FORMS
from mutirao.datasets.locations import find_copy, own_homes
from mutirao.datasets.published import DataSet, File
from mutirao.errors import ConfigError
from mutirao.io import write_whole

LOADING = ".downloads"  # what is on its way, in the folder of data sets
PINS = "checksums.json"  # those of first copies, where nobody publishes any

Begin = Callable[[File], Watch]  # told of each file before it comes; gives what watches its bytes


def get_data_set(
    name: str, to: Path | None = None, mirror: str = "", begin: Begin | None = None, known: DataSet | None = None
) -> tuple[Path, bool]:
    """Where a set is, and whether it was fetched now; into `to`, or the first of your own folders of data sets.

    `mirror` is an address under which the same files lie.

    >>> get_data_set("netflix", Path("nowhere"))
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: netflix is not fetched ...
    """
    if found := find_copy(name, [to] if to else None):
        return found, False
    known = known or fetchable(name)
    home = (to or own_homes()[0]).expanduser().absolute()
    target, loading = home / known.folders[0], home / LOADING / name
    ready = loading / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    try:
        for file in known.files:
            url = f"{mirror.rstrip('/')}/{file.name}" if mirror else file.url
            bring(file, url, loading / file.name, home, begin)
    except Unreachable as error:
        for empty in (loading, loading.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
        raise ConfigError(
            f"{name}: no answer from {error}; is there a network? By hand: get it from {known.page} and put it into "
            f"{target} ({known.layout})"
        ) from error
    for file in known.files:
        if is_archive(file.name):
            unpack(loading / file.name, ready, file.inside, file.leave_out)
        else:
            ready.mkdir(parents=True, exist_ok=True)
            shutil.move(loading / file.name, ready / file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    ready.rename(target)
    shutil.rmtree(loading)
    return target, True


def fetchable(name: str) -> DataSet:
    """A set that may be fetched, or one line that says where it is to be had."""
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}; mutirao data list has them all")
    known = DATA_SETS[name]
    if known.files:
        return known
    if not known.folders:
        what = "a form for data of your own" if name in FORMS else known.source
        raise ConfigError(f"{name} is nothing to fetch: {what}")
    raise ConfigError(
        f"{name} is not fetched ({known.terms}): go to {known.page} ({known.by_hand}), put it into "
        f"{own_homes()[0] / known.folders[0]}, and look at it with mutirao data check {name}"
    )


def bring(file: File, url: str, target: Path, home: Path, begin: Begin | None) -> None:
    """One file, fetched if it is not there from an earlier try, with the right checksum."""
    if not target.exists():
        fetch_file(url, target, file.size, begin(file) if begin else None)
    pins = home / PINS
    kept = read_pins(pins)
    wanted = file.checksum or kept.get(file.name, "")
    kind = wanted.partition(":")[0] or "sha256"
    found = f"{kind}:{digest_of(target, kind)}"
    if not wanted:
        write_whole(pins, json.dumps(kept | {file.name: found}, indent=2) + "\n")
    elif found != wanted:
        target.unlink()
        whose = "" if file.checksum else f", that of the first copy (in {pins})"
        raise ConfigError(
            f"{target} was removed: what {host_of(url)} sent has the checksum {found}, right would be {wanted}{whose}"
        )


def digest_of(path: Path, kind: str) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def read_pins(path: Path) -> dict[str, str]:
    """The checksums of first copies."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged; remove it to take the next copies as the first") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"{path} is damaged; remove it to take the next copies as the first")
    return found
