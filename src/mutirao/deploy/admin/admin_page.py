"""The page of a server or of a site: for who has its token, on this machine alone; what it changes, it writes down."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from mutirao.dashboard.pages import Receive, Scope, Send, page_app
from mutirao.deploy.admin.facts import overview, why_not_working
from mutirao.deploy.keys import key_fingerprint
from mutirao.deploy.layout import Node, Server, check_name
from mutirao.deploy.processes import running
from mutirao.deploy.provisioning import check_key, store_key
from mutirao.deploy.server.control_calls import admit, dismiss, node_id_of
from mutirao.deploy.site.pause import set_pause
from mutirao.errors import ConfigError, MutiraoError

HERE = Path(__file__).parent / "assets"
ASSETS = (HERE / "admin.css", HERE / "admin.js")
MOST = 16 * 1024  # bytes of what the page sends; a public key has about 250
Text = Annotated[str, Body(max_length=4096)]


class Bounded:
    """Lets in no request that is long, or does not say how long it is."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        if scope["type"] == "http" and (problem := self.problem(scope)):
            await JSONResponse({"detail": problem}, status_code=413)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def problem(self, scope: Scope) -> str:
        """Why a request is not read; nothing if it is."""
        headers = dict(scope["headers"])
        said = headers.get(b"content-length", b"0")
        # A chunked request states no length: it could go on without end.
        if b"transfer-encoding" in headers or not said.isdigit() or int(said) > MOST:
            return f"this is too long: {MOST} bytes are the most; a site's public key is one line of about 250"
        return ""


def make_app(place: Server | Node, token: str, hosts: frozenset[str] | None) -> FastAPI:
    """The application over the folder of a server or a site; `hosts` are the addresses it answers to."""
    template = f"deploy/admin/assets/{place.role}.html"
    app = page_app(template, ASSETS, token, hosts, inner=[Bounded], role=place.role)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Any, error: Exception) -> Response:
        return JSONResponse({"detail": "the request is not as this page sends it"}, status_code=400)

    @app.exception_handler(MutiraoError)
    def refused(request: Any, error: Exception) -> Response:
        return JSONResponse({"detail": " ".join(str(error).split())}, status_code=409)

    @app.get("/api/facts")
    def facts() -> Response:
        return Response(json.dumps(facts_of(place)), media_type="application/json")

    if isinstance(place, Server):
        add_doors(app, place)
    else:

        @app.post("/api/pause")
        def switch(on: bool = Body(embed=True)) -> dict[str, bool]:
            return {"turned": set_pause(place.folder, on)}

    return app


def facts_of(place: Server | Node) -> dict[str, Any]:
    """What the page shows."""
    process = running(place.folder)
    why = "it does not run"
    since = ""
    if process is not None:
        why = why_not_working(place, process)
        since = process.since()
    about = {"name": place.name, "folder": str(place.folder), "runs": process is not None, "works": not why, "why": why}
    return about | {"since": since} | overview(place, not why)


def add_doors(app: FastAPI, server: Server) -> None:
    """Admit and dismiss, each in two steps: what is confirmed is what was shown."""

    @app.post("/api/key")
    def look(key: Text, name: Text = "", client: Text = "") -> dict[str, str]:
        return with_key(server, key, name, client, lambda path: {})

    @app.post("/api/admit")
    def let_in(key: Text, name: Text, client: Text, fingerprint: Text) -> dict[str, str]:
        def keep(path: Path) -> dict[str, str]:
            if key_fingerprint(path) != fingerprint:
                raise ConfigError("this is another key than the one that was shown; look at it again")
            # Asked first: if the SuperLink does not answer, the error says so, and the key is not stored.
            node_id_of(server, path)
            admit(server.folder, store_key(server.folder, path, name, client))
            return {}

        return with_key(server, key, name, client, keep)

    @app.post("/api/dismiss")
    def shut_out(name: Text, typed: Text) -> dict[str, str]:
        if typed.strip() != name:
            raise ConfigError(f"type {name} to dismiss it; {typed.strip()[:80]!r} is another name")
        dismiss(server.folder, name)
        return {"name": name}


def with_key(
    server: Server, text: str, name: str, client: str, use: Callable[[Path], dict[str, str]]
) -> dict[str, str]:
    """Check a public key that was sent as text, apply `use` to it, and return its name, client and fingerprint."""
    name = check_name(name.strip() or "key")
    with tempfile.TemporaryDirectory(prefix="mutirao-") as place:
        path = Path(place) / f"{name}.pub"
        path.write_text(text.strip() + "\n", encoding="utf-8")
        try:
            kept, known = check_key(server.folder, path, name, client.strip())
            return {"name": kept.stem, "client": known, "fingerprint": key_fingerprint(path), **use(path)}
        except MutiraoError as error:
            # The temporary folder means nothing to the reader of the message.
            raise ConfigError(str(error).replace(f"{place}/", "")) from error
