"""Archives from elsewhere, unpacked without trust: nothing outside the folder, no link, no more than is plausible."""

import fnmatch
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from mutirao.errors import ConfigError

MOST_BYTES = 20 << 30  # of all that one archive holds
MOST_TIMES = 200  # its own size, which no honest one of pictures or ratings is above
MOST_FILES = 200_000
BLOCK = 1 << 20
ENDINGS = (".zip", ".tar.gz", ".tgz", ".7z")
SEVEN = (("7z", "x", "-y", "-bd"), ("7zz", "x", "-y", "-bd"), ("bsdtar", "-xf"))  # programs that know 7z, by name

Member = tuple[str, int, Callable[[], IO[bytes] | None]]  # its name, its bytes, and how they are read


def is_archive(name: str) -> bool:
    """Whether a file of this name is one that `unpack` takes apart."""
    return name.endswith(ENDINGS)


def unpack(archive: Path, folder: Path, inside: str = "", leave_out: str = "") -> None:
    """Put the files of an archive into a folder: those below `inside`, if it is given, without what matches."""
    if archive.name.endswith(".7z"):
        unpack_seven(archive, folder)
        return
    limit, total, count = min(MOST_BYTES, MOST_TIMES * archive.stat().st_size), 0, 0
    with reading(archive), members(archive) as found:
        for name, size, opened in found:
            path = place(archive, name, inside)
            if path is None or (leave_out and fnmatch.fnmatch(path.name.lower(), leave_out)):
                continue
            total, count = total + size, count + 1
            if total > limit or count > MOST_FILES:
                raise ConfigError(f"{archive.name} unpacks to more than is plausible: it was not unpacked further")
            write_member(opened, size, folder / path, archive)
    if not count:
        raise ConfigError(
            f"{archive.name} has nothing{f' in a folder {inside!r}' if inside else ''}: it is another one"
        )


@contextmanager
def reading(archive: Path) -> Iterator[None]:
    """One line for an archive that is broken."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {error}") from error


@contextmanager
def members(archive: Path) -> Iterator[Iterator[Member]]:
    """The plain files of an archive; folders are made as they are needed, a link or a device is refused."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            yield (zip_member(archive, packed, info) for info in packed.infolist() if not info.is_dir())
    else:
        with tarfile.open(archive) as tape:
            yield (tar_member(archive, tape, info) for info in tape if not info.isdir())


def zip_member(archive: Path, packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """A file of a zip."""
    if (info.external_attr >> 16) & 0o170000 == 0o120000:
        raise ConfigError(f"{archive.name} has a link in it ({info.filename[:80]!r}): refused")
    return info.filename, info.file_size, lambda: packed.open(info)


def tar_member(archive: Path, tape: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    """A file of a tape archive."""
    if not info.isreg():
        raise ConfigError(f"{archive.name} has a link or a device in it ({info.name[:80]!r}): refused")
    return info.name, info.size, lambda: tape.extractfile(info)


def place(archive: Path, name: str, inside: str) -> PurePosixPath | None:
    """Where a file goes, seen from the folder; None if it is not below `inside`."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or "\0" in name:
        raise ConfigError(f"{archive.name} wants to write to {name[:80]!r}, outside its folder: refused")
    if not inside:
        return path
    folders = [part.lower() for part in path.parts[:-1]]
    if inside.lower() not in folders:
        return None
    return PurePosixPath(*path.parts[folders.index(inside.lower()) + 1 :])


def write_member(opened: Callable[[], IO[bytes] | None], size: int, target: Path, archive: Path) -> None:
    """One file, as many bytes as the archive said and no more."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stream = opened()
    if stream is None:
        raise ConfigError(f"{archive.name}: {target.name} has no content")
    with stream, target.open("wb") as file:
        left = size
        while block := stream.read(min(BLOCK, left + 1)):
            left -= len(block)
            if left < 0:
                raise ConfigError(f"{archive.name}: {target.name} has more bytes than the archive says: refused")
            file.write(block)
    if left:
        raise ConfigError(f"{archive.name}: {target.name} ends {left:,} bytes too early: it is damaged")


def unpack_seven(archive: Path, folder: Path) -> None:
    """A 7z archive, by a program that knows it: Python does not. Its checksum was known before."""
    known = next((command for command in SEVEN if shutil.which(command[0])), None)
    if known is None:
        raise ConfigError(
            f"{archive} is fetched and its checksum is right, but unpacking it needs 7-Zip (7z) or bsdtar: install one "
            f"and run the same command again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([*known, str(archive.resolve())], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{archive} cannot be unpacked: {said[-1][:200] if said else known[0]}")
    if odd := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise ConfigError(f"{archive.name} has a link in it ({odd.name[:80]!r}): refused")
