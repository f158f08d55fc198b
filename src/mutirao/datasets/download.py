"""A file from the network into a folder: what was interrupted goes on where it stopped, a changed file begins anew.

The bytes grow in NAME.part; beside it NAME.part.tag keeps what the server calls this version (its ETag, or the date),
without which nothing is continued.
"""

import contextlib
import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from mutirao.errors import ConfigError

BLOCK = 1 << 18
TRIES = 4  # times that a broken connection is taken up again without a byte more
PAUSE = 1.0  # seconds before the second of them, and longer before the next
SECONDS = 60  # without a byte, until a connection counts as broken
MOST_BYTES = 1 << 30  # of a file whose size nobody told
LOOPBACK = ("127.0.0.1", "::1", "localhost")
AGENT = "mutirao"

Watch = Callable[[int, int], None]  # bytes so far, and in all (0: not known)


class Unreachable(Exception):
    """There is no network, or nobody answers at the other end."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to where a file may be fetched from, and no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The request to go on with."""
        check_address(newurl, loopback=urllib.parse.urlsplit(req.full_url).hostname in LOOPBACK)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_address(url: str, loopback: bool) -> None:
    """Refuse what is not https; plain http is for a mirror on this very machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or (loopback and parts.scheme == "http" and parts.hostname in LOOPBACK):
        return
    raise ConfigError(f"refused: {url[:200]!r} is not an https address; what comes from there could be anybody's")


@dataclass(frozen=True)
class Answer:
    """What a server says before the bytes: where they begin, how many there are in all, and of which version."""

    start: int
    total: int  # 0: not told
    tag: str

    @classmethod
    def of(cls, status: int, headers: Message) -> "Answer":
        """From the status line and the headers; a part (206) says where it begins."""
        etag = headers.get("ETag", "")
        tag = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        if status != 206:
            length = headers.get("Content-Length", "")
            return cls(0, int(length) if length.isdecimal() else 0, tag)
        unit, _, span = headers.get("Content-Range", "").partition(" ")
        place, _, total = span.partition("/")
        first = place.partition("-")[0]
        if unit != "bytes" or not first.isdecimal():
            return cls(-1, 0, tag)
        return cls(int(first), int(total) if total.isdecimal() else 0, tag)


def fetch_file(url: str, target: Path, size: int = 0, watch: Watch | None = None) -> None:
    """Bring `url` to `target`, going on with what is there in part; `size` is what it must have, if that is known.

    Unreachable if nobody answers at all; ConfigError in one line for everything else.
    """
    check_address(url, loopback=urllib.parse.urlsplit(url).hostname in LOOPBACK)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    before, still = -1, 0
    while not is_whole(part, url, size, watch):
        have = part.stat().st_size if part.exists() else 0
        still = still + 1 if have <= before else 0
        before = have
        if still >= TRIES:
            raise ConfigError(
                f"the connection to {host_of(url)} broke at {have:,} bytes of {target.name}; run the same command "
                f"again: it goes on from there"
            )
        time.sleep(still * PAUSE)
    tag_of(part).unlink(missing_ok=True)
    part.replace(target)


def is_whole(part: Path, url: str, size: int, watch: Watch | None) -> bool:
    """Whether the file is there after one more connection, which may have broken."""
    have, tag = part.stat().st_size if part.exists() else 0, read_tag(part)
    if size and have == size:
        return True  # the checksum says whether it is the right one
    wanted = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if have and tag:
        wanted |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        with urllib.request.build_opener(Redirects).open(
            urllib.request.Request(url, headers=wanted), timeout=SECONDS
        ) as response:
            answer = Answer.of(response.status, response.headers)
            begin_again = answer.start != have or answer.tag != tag
            if response.status == 206 and begin_again:
                forget(part)  # another version than that of the part
                return False
            return copy(response, part, answer, size, watch)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing from there on: the part is not of this file
            forget(part)
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


def copy(response: Any, part: Path, answer: Answer, size: int, watch: Watch | None) -> bool:
    """Write what comes behind what is there; whether that was all."""
    most = size or answer.total or MOST_BYTES
    if answer.total and (answer.total > most or (size and answer.total != size)):
        raise ConfigError(f"the file there has {answer.total:,} bytes, the known one {size:,}: it is another one")
    if most > MOST_BYTES and not size:
        raise ConfigError(f"the file there has {most:,} bytes: too many for one whose size nobody told")
    free = shutil.disk_usage(part.parent).free
    if most - answer.start > free and (size or answer.total):
        raise ConfigError(f"{part.parent} has room for {free:,} bytes, and {most - answer.start:,} are to come")
    done = answer.start
    tag_of(part).write_text(answer.tag, "utf-8")
    with part.open("r+b" if done else "wb") as file:
        file.seek(done)
        while block := response.read(BLOCK):
            done += len(block)
            if done > most:
                raise ConfigError(f"more than {most:,} bytes come: it is another file than the known one")
            file.write(block)
            if watch:
                watch(done, size or answer.total)
    return done == most if size or answer.total else True


def tag_of(part: Path) -> Path:
    """Where the version of a part is kept."""
    return part.with_name(f"{part.name}.tag")


def read_tag(part: Path) -> str:
    """The version of a part; nothing if it is not known."""
    try:
        return tag_of(part).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def forget(part: Path) -> None:
    """Begin anew."""
    for file in (part, tag_of(part)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def host_of(url: str) -> str:
    """The machine that an address names."""
    return urllib.parse.urlsplit(url).hostname or url
