"""A server of files on this machine that can do what real ones do: parts, cuts, changes, redirects, wrong bytes."""

import contextlib
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Shop:
    """What is served, how, and what was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # bytes after which the next connections break
    moved: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    longer: int = 0  # bytes that come after the end, without being told
    told: bool = True  # whether lengths are told
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and Range
    address: str = ""


@contextlib.contextmanager
def open_shop(**files: bytes) -> Iterator[Shop]:
    shop = Shop({name.replace("__", "."): content for name, content in files.items()})

    class Counter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range", "")
            shop.asked.append((name, wanted))
            if name in shop.moved:
                self.send_response(302)
                self.send_header("Location", shop.moved[name])
                self.end_headers()
                return
            if name not in shop.files:
                self.send_error(404)
                return
            content, tag = shop.files[name], shop.tags.get(name, f'"{hash(shop.files[name])}"')
            begin = 0
            if shop.ranges and wanted and self.headers.get("If-Range") == tag:
                begin = int(wanted.removeprefix("bytes=").rstrip("-"))
                if begin >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            if shop.told:
                self.send_header("Content-Length", str(len(content) - begin))
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            end = len(content) if not shop.cuts else begin + shop.cuts.pop(0)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[begin:end] + b"x" * shop.longer)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Counter)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    shop.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield shop
    finally:
        server.shutdown()
        server.server_close()


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    """An archive of these files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path
