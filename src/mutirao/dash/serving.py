"""Start the live page: a free port, a fresh token, and the address to open."""

import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from mutirao.errors import ConfigError


def serve(root: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the folder until interrupted; `say` is told the address once it answers."""
    try:
        import uvicorn

        from mutirao.dash.app import make_app
    except ImportError as error:
        raise ConfigError(
            "the live page needs more packages; install them with: pip install 'mutirao[dash]'"
        ) from error

    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder")
    token = secrets.token_urlsafe(24)
    listening = listen(host, port)
    port = listening.getsockname()[1]
    local = host in ("127.0.0.1", "localhost", "::1")
    hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")) if local else None
    app = make_app(root, token, hosts)
    app.state.watcher.start()
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{port}/?token={token}")
    settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, **settings))  # type: ignore[arg-type]
    app.state.closing = lambda: server.should_exit  # streams of events end by themselves, then
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            server.run(sockets=[listening])
    finally:
        app.state.watcher.stop()


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
