"""Start the live page: a free port, a fresh token, and the address to open."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

Make = Callable[[str, frozenset[str] | None], AbstractContextManager["FastAPI"]]


def serve(root: Path, host: str, port: int, say: Callable[[str], None], read_only: bool = False) -> None:
    """Serve the folder until interrupted; `say` gets the address once it answers."""
    with needing_packages():
        from mutirao.dashboard.app import make_app

    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder")

    @contextlib.contextmanager
    def watched(token: str, hosts: frozenset[str] | None) -> Iterator["FastAPI"]:
        app = make_app(root, token, hosts, read_only)
        app.state.watcher.start()
        try:
            yield app
        finally:
            app.state.watcher.stop()

    serve_page(watched, host, port, say)


@contextlib.contextmanager
def needing_packages() -> Iterator[None]:
    """Say what to install where a page's packages are missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigError("the page needs more packages; install them with: pip install 'mutirao[dash]'") from error


def serve_page(make: Make, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve a page until interrupted: `make` opens it for a fresh token and the addresses it answers to."""
    with needing_packages():
        import uvicorn

    token = secrets.token_urlsafe(24)
    listening = listen(host, port)
    port = listening.getsockname()[1]
    # On loopback all possible addresses are known, so that any other is refused.
    hosts: frozenset[str] | None = None
    if host in ("127.0.0.1", "localhost", "::1"):
        hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))
    shown = f"[{host}]" if ":" in host else host
    with make(token, hosts) as app:
        say(f"http://{shown}:{port}/?token={token}")
        settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2, "server_header": False}
        server = uvicorn.Server(uvicorn.Config(app, **settings))  # type: ignore[arg-type]
        # Streams of events ask for it, and then end by themselves: the server waits for its last response.
        app.state.closing = lambda: server.should_exit
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket on that address; ConfigError if there is none to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return made
