"""Download published data sets: fetch the files, verify their checksums, unpack them, and move them into place.

A set appears in its folder only when it is complete. An interrupted download continues where it stopped: the bytes grow
in NAME.part, and NAME.part.tag keeps the server's version of the file (its ETag, or the date), without which nothing is
continued. Archives are not trusted: no file outside the folder, no link, no more bytes than is plausible.
"""

import contextlib
import fnmatch
import hashlib
import http.client
import json
import shutil
import ssl
import subprocess
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mutirao.config import nearest
from mutirao.datasets import DATA_SETS
from mutirao.datasets.published import FORMATS, DataSet, File, data_folders, find_copy
from mutirao.errors import ConfigError
from mutirao.io import write_whole

DOWNLOADS = ".downloads"  # unfinished downloads, in the folder of data sets
CHECKSUMS = "checksums.json"  # those of first copies, where none are published

CHUNK = 1 << 18
MAX_ATTEMPTS = 4  # connections in a row that may break without a byte more
RETRY_PAUSE = 1.0  # seconds before the second attempt, and longer before the next
TIMEOUT = 60  # seconds without a byte, until a connection counts as broken
UNKNOWN_SIZE_LIMIT = 1 << 30  # bytes of a file if neither we nor the server know its size
LOOPBACK = ("127.0.0.1", "::1", "localhost")
USER_AGENT = "mutirao"

MAX_UNPACKED_BYTES = 20 << 30  # of all files of one archive
MAX_COMPRESSION_RATIO = 200  # no honest archive of images or ratings is above
MAX_FILES = 200_000
UNPACK_CHUNK = 1 << 20
ARCHIVE_SUFFIXES = (".zip", ".tar.gz", ".tgz", ".7z")
# Programs that can unpack 7z, by name; Python cannot.
SEVEN_ZIP_COMMANDS = (("7z", "x", "-y", "-bd"), ("7zz", "x", "-y", "-bd"), ("bsdtar", "-xf"))

Progress = Callable[[int, int], None]  # takes the bytes so far, and in all (0: unknown)
OnFile = Callable[[File], Progress]  # called before each file is fetched; returns its progress callback
Member = tuple[str, int, Callable[[], IO[bytes] | None]]  # a file's name, its size, and a function that opens it


class Unreachable(Exception):
    """There is no network, or the server does not answer."""


def get_data_set(
    name: str, to: Path | None = None, mirror: str = "", on_file: OnFile | None = None, data_set: DataSet | None = None
) -> tuple[Path, bool]:
    """Return the folder of a set, and whether it was fetched now; into `to`, or the first of your data folders.

    `mirror` is an address under which the same files are found.

    >>> get_data_set("netflix", Path("nowhere"))
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: netflix is not fetched ...
    """
    if found := find_copy(name, [to] if to else None):
        return found, False
    data_set = data_set or downloadable(name)
    home = (to or data_folders()[0]).expanduser().absolute()
    target = home / data_set.folders[0]
    downloads = home / DOWNLOADS / name
    ready = downloads / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    try:
        for file in data_set.files:
            url = file.url
            if mirror:
                url = f"{mirror.rstrip('/')}/{file.name}"
            fetch_and_verify(file, url, downloads / file.name, home, on_file)
    except Unreachable as error:
        for empty in (downloads, downloads.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
        raise ConfigError(
            f"{name}: no answer from {error}; is there a network? By hand: get it from {data_set.page} and put it "
            f"into {target} ({data_set.layout})"
        ) from error
    for file in data_set.files:
        if is_archive(file.name):
            unpack_archive(downloads / file.name, ready, file.inside, file.leave_out)
        else:
            ready.mkdir(parents=True, exist_ok=True)
            shutil.move(downloads / file.name, ready / file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    ready.rename(target)
    shutil.rmtree(downloads)
    return target, True


def downloadable(name: str) -> DataSet:
    """Return a set that can be downloaded; ConfigError says where any other is to be had."""
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}; mutirao data list has them all")
    data_set = DATA_SETS[name]
    if data_set.files:
        return data_set
    if not data_set.folders:
        what = "a format for data of your own" if name in FORMATS else data_set.source
        raise ConfigError(f"{name} is nothing to fetch: {what}")
    raise ConfigError(
        f"{name} is not fetched ({data_set.terms}): go to {data_set.page} ({data_set.by_hand}), put it into "
        f"{data_folders()[0] / data_set.folders[0]}, and look at it with mutirao data check {name}"
    )


# ---- checksums -------------------------------------------------------------------------------------------------------


def fetch_and_verify(file: File, url: str, target: Path, home: Path, on_file: OnFile | None) -> None:
    """Fetch a file unless an earlier attempt left it, and verify its checksum.

    Where none is published, the checksum of the first copy is kept and later copies are compared with it.
    """
    if not target.exists():
        fetch_file(url, target, file.size, on_file(file) if on_file else None)
    checksums_file = home / CHECKSUMS
    first_copies = read_checksums(checksums_file)
    expected = file.checksum or first_copies.get(file.name, "")
    algorithm = expected.partition(":")[0] or "sha256"
    found = f"{algorithm}:{hash_file(target, algorithm)}"
    if not expected:
        write_whole(checksums_file, json.dumps(first_copies | {file.name: found}, indent=2) + "\n")
    elif found != expected:
        target.unlink()
        origin = "" if file.checksum else f", that of the first copy (in {checksums_file})"
        raise ConfigError(
            f"{target} was removed: what {host_of(url)} sent has the checksum {found}, right would be "
            f"{expected}{origin}"
        )


def hash_file(path: Path, algorithm: str) -> str:
    """The hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def read_checksums(path: Path) -> dict[str, str]:
    """Read the checksums of first copies."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged; remove it to take the next copies as the first") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"{path} is damaged; remove it to take the next copies as the first")
    return found


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class HttpsRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to https addresses only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request to go on with."""
        check_address(newurl, loopback=urllib.parse.urlsplit(req.full_url).hostname in LOOPBACK)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_address(url: str, loopback: bool) -> None:
    """Refuse every address but https; plain http is allowed for a mirror on this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or (loopback and parts.scheme == "http" and parts.hostname in LOOPBACK):
        return
    raise ConfigError(f"refused: {url[:200]!r} is not an https address; its content could be forged on the way")


@dataclass(frozen=True)
class ResponseHead:
    """What the headers of a response say: the first byte's offset, the size of the whole file, and its version."""

    start: int
    total: int  # 0: unknown
    tag: str

    @classmethod
    def of(cls, status: int, headers: Message) -> "ResponseHead":
        """From the status and the headers; a partial response (206) says where it begins."""
        tag = headers.get("ETag", "")
        # A weak ETag does not guarantee equal bytes (RFC 9110, 8.8.1), so it cannot continue a download.
        if not tag or tag.startswith("W/"):
            tag = headers.get("Last-Modified", "")
        if status != 206:
            length = headers.get("Content-Length", "")
            return cls(0, int(length) if length.isdecimal() else 0, tag)
        unit, _, span = headers.get("Content-Range", "").partition(" ")
        byte_range, _, total = span.partition("/")
        first = byte_range.partition("-")[0]
        if unit != "bytes" or not first.isdecimal():
            return cls(-1, 0, tag)
        return cls(int(first), int(total) if total.isdecimal() else 0, tag)


def fetch_file(url: str, target: Path, size: int = 0, progress: Progress | None = None) -> None:
    """Download `url` to `target`, continuing an earlier attempt; `size` is the expected size, if it is known.

    Raises Unreachable if no server answers, and ConfigError for every other failure.
    """
    check_address(url, loopback=urllib.parse.urlsplit(url).hostname in LOOPBACK)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    previous = -1
    stalled = 0
    while not continue_download(part, url, size, progress):
        have = bytes_in(part)
        stalled += 1
        # A line that breaks often but brings something each time is slow, not broken.
        if have > previous:
            stalled = 0
        previous = have
        if stalled >= MAX_ATTEMPTS:
            raise ConfigError(
                f"the connection to {host_of(url)} broke at {have:,} bytes of {target.name}; run the same command "
                f"again: it goes on from there"
            )
        time.sleep(stalled * RETRY_PAUSE)
    version_file(part).unlink(missing_ok=True)
    part.replace(target)


def bytes_in(part: Path) -> int:
    """The size of a part; 0 if there is none yet."""
    if part.exists():
        return part.stat().st_size
    return 0


def continue_download(part: Path, url: str, size: int, progress: Progress | None) -> bool:
    """Open one more connection, which may break; return whether the file is complete."""
    have = bytes_in(part)
    tag = read_version(part)
    # The checksum will say whether it is the right file.
    if size and have == size:
        return True
    # Not compressed on the way: offsets and checksums are those of the file itself.
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    # If-Range: a server that has another version now sends all of it, not the rest.
    if have and tag:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.build_opener(HttpsRedirects).open(request, timeout=TIMEOUT) as response:
            head = ResponseHead.of(response.status, response.headers)
            # Checked although If-Range was sent: the rest of another version must not be appended.
            if response.status == 206 and (head.start != have or head.tag != tag):
                discard(part)
                return False
            return write_content(response, part, head, size, progress)
    except urllib.error.HTTPError as error:
        # 416: the file ends before our offset, so the part is of another file.
        if error.code == 416 and have:
            discard(part)
            return False
        raise ConfigError(f"{url} answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise ConfigError(
                f"{host_of(url)} cannot prove who it is ({error.reason.verify_message}): nothing was fetched"
            ) from error
        raise Unreachable(f"{host_of(url)}: {error.reason}") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError):
        return False


def write_content(response: Any, part: Path, head: ResponseHead, size: int, progress: Progress | None) -> bool:
    """Append what the response brings to the part; return whether the file is complete."""
    limit = size or head.total or UNKNOWN_SIZE_LIMIT
    if head.total and (head.total > limit or (size and head.total != size)):
        raise ConfigError(f"the file there has {head.total:,} bytes, the known one {size:,}: it is another one")
    if limit > UNKNOWN_SIZE_LIMIT and not size:
        raise ConfigError(f"the file there has {limit:,} bytes: too many for one of unknown size")
    free = shutil.disk_usage(part.parent).free
    if limit - head.start > free and (size or head.total):
        raise ConfigError(f"{part.parent} has room for {free:,} bytes, and {limit - head.start:,} are to come")
    done = head.start
    version_file(part).write_text(head.tag, "utf-8")
    with part.open("r+b" if done else "wb") as file:
        file.seek(done)
        while block := response.read(CHUNK):
            done += len(block)
            if done > limit:
                raise ConfigError(f"more than {limit:,} bytes come: it is another file than the known one")
            file.write(block)
            if progress:
                progress(done, size or head.total)
    if size or head.total:
        return done == limit
    return True


def version_file(part: Path) -> Path:
    """The file that keeps the server's version of a part."""
    return part.with_name(f"{part.name}.tag")


def read_version(part: Path) -> str:
    """The server's version of a part; empty if it is unknown."""
    try:
        return version_file(part).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def discard(part: Path) -> None:
    """Delete a part, so that the download begins again."""
    for file in (part, version_file(part)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def host_of(url: str) -> str:
    """The host name in an address."""
    return urllib.parse.urlsplit(url).hostname or url


# ---- archives --------------------------------------------------------------------------------------------------------


def is_archive(name: str) -> bool:
    """Whether `unpack` handles a file of this name."""
    return name.endswith(ARCHIVE_SUFFIXES)


def unpack_archive(archive: Path, folder: Path, inside: str = "", leave_out: str = "") -> None:
    """Extract an archive into a folder: only files below the folder `inside`, and none that matches `leave_out`."""
    if archive.name.endswith(".7z"):
        unpack_7z(archive, folder)
        return
    limit = min(MAX_UNPACKED_BYTES, MAX_COMPRESSION_RATIO * archive.stat().st_size)
    total = 0
    count = 0
    with damage_as_config_error(archive), archive_members(archive) as found:
        # Against decompression bombs: declared sizes are added up before a file is written, and `write_member` holds
        # each file to its own.
        for name, size, opened in found:
            path = relative_target(archive, name, inside)
            if path is None or (leave_out and fnmatch.fnmatch(path.name.lower(), leave_out)):
                continue
            total += size
            count += 1
            if total > limit or count > MAX_FILES:
                raise ConfigError(f"{archive.name} unpacks to more than is plausible: it was not unpacked further")
            write_member(opened, size, folder / path, archive)
    if not count:
        where = f" in a folder {inside!r}" if inside else ""
        raise ConfigError(f"{archive.name} has nothing{where}: it is another one")


@contextmanager
def damage_as_config_error(archive: Path) -> Iterator[None]:
    """Turn the errors of a damaged archive into a ConfigError of one line."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {error}") from error


@contextmanager
def archive_members(archive: Path) -> Iterator[Iterator[Member]]:
    """The regular files of an archive; folders are created as needed, a link or a device is refused."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            yield (zip_member(archive, packed, info) for info in packed.infolist() if not info.is_dir())
    else:
        with tarfile.open(archive) as tar:
            yield (tar_member(archive, tar, info) for info in tar if not info.isdir())


def zip_member(archive: Path, packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """A file of a zip archive."""
    # The file type bits of a symbolic link: with one, a later file could be written outside the folder.
    if (info.external_attr >> 16) & 0o170000 == 0o120000:
        raise ConfigError(f"{archive.name} has a link in it ({info.filename[:80]!r}): refused")
    return info.filename, info.file_size, lambda: packed.open(info)


def tar_member(archive: Path, tar: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    """A file of a tar archive."""
    if not info.isreg():
        raise ConfigError(f"{archive.name} has a link or a device in it ({info.name[:80]!r}): refused")
    return info.name, info.size, lambda: tar.extractfile(info)


def relative_target(archive: Path, name: str, inside: str) -> PurePosixPath | None:
    """The path of an extracted file within the target folder; None if it is not below `inside`."""
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
    """Write one file, of exactly as many bytes as the archive declares."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stream = opened()
    if stream is None:
        raise ConfigError(f"{archive.name}: {target.name} has no content")
    with stream, target.open("wb") as file:
        left = size
        # One byte more than declared is asked for, so that a member that is longer is noticed.
        while block := stream.read(min(UNPACK_CHUNK, left + 1)):
            left -= len(block)
            if left < 0:
                raise ConfigError(f"{archive.name}: {target.name} has more bytes than the archive says: refused")
            file.write(block)
    if left:
        raise ConfigError(f"{archive.name}: {target.name} ends {left:,} bytes too early: it is damaged")


def unpack_7z(archive: Path, folder: Path) -> None:
    """Extract a 7z archive with an external program; its checksum has been verified before."""
    command = next((command for command in SEVEN_ZIP_COMMANDS if shutil.which(command[0])), None)
    if command is None:
        raise ConfigError(
            f"{archive} is fetched and its checksum is right, but unpacking it needs 7-Zip (7z) or bsdtar: install one "
            f"and run the same command again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([*command, str(archive.resolve())], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines() or [command[0]]
        raise ConfigError(f"{archive} cannot be unpacked: {output[-1][:200]}")
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise ConfigError(f"{archive.name} has a link in it ({link.name[:80]!r}): refused")
