"""Start a page: a free port, a fresh token, and the address to open."""

import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.errors import ConfigError

LOCAL = ("127.0.0.1", "localhost", "::1")
Hosts = frozenset[str] | None  # the addresses a page answers to; None: any


def serve(root: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the folder until interrupted; `say` is told the address once it answers."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder")

    begun: list[Any] = []

    def make(token: str, hosts: Hosts) -> Any:
        from mutirao.dash.app import make_app

        app = make_app(root, token, hosts)
        begun.append(app.state.watcher)
        app.state.watcher.start()
        return app

    try:
        serve_app(make, host, port, say)
    finally:
        for watcher in begun:
            watcher.stop()


def serve_app(make: Callable[[str, Hosts], Any], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the application that `make` gives for a token and its own addresses, until interrupted."""
    token = secrets.token_urlsafe(24)
    listening = listen(host, port)
    port = listening.getsockname()[1]
    hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")) if host in LOCAL else None
    try:
        import uvicorn

        app = make(token, hosts)
    except ImportError as error:
        listening.close()
        raise ConfigError(
            "the live page needs more packages; install them with: pip install 'mutirao[dash]'"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{port}/?token={token}")
    settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, **settings))  # type: ignore[arg-type]
    app.state.closing = lambda: server.should_exit  # streams of events end by themselves, then
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
