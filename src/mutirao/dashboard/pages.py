"""What the served pages share: who may ask them, and the files that they load."""

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse

from mutirao.report.html_page import ASSETS as REPORT
from mutirao.templates import render

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
}


class Guard:
    """Lets through who came by the right address with the right token; everybody else learns nothing."""

    def __init__(self, app: Any, token: str, hosts: frozenset[str] | None) -> None:
        self.app = app
        self.token = token
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check host, origin and token, and put the safe headers on every answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                told = dict(message.get("headers", []))
                extra = {b"content-security-policy": POLICY.encode(), **HEADERS}
                message["headers"] = [*message.get("headers", []), *((k, v) for k, v in extra.items() if k not in told)]
            await send(message)

        if problem := self.problem(scope):
            await PlainTextResponse(problem, status_code=403)(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def problem(self, scope: Scope) -> str:
        """Why a request is refused; nothing if it is not."""
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("host", "")
        # Against DNS rebinding: another page can make a name of its own point to this address.
        if self.hosts is not None and host.lower() not in self.hosts:
            return "this page answers to its own address only"
        writes = scope["method"] not in ("GET", "HEAD")
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "same-origin")
        # Against forged requests of other pages (CSRF): the browser sets both headers, and no page can change them.
        if writes and ((origin is not None and origin != f"http://{host}") or site not in ("same-origin", "none")):
            return "another page may not change anything here"
        if scope["path"].startswith("/assets/") and not writes:
            return ""  # the same for everybody
        given = headers.get("x-mutirao-token", "")
        # A link or an event stream cannot carry a header; a write must.
        if not given and not writes:
            given = (parse_qs(scope["query_string"].decode("latin-1")).get("token") or [""])[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "the token is missing or wrong; open the address that was printed at the start"
        return ""


HERE = Path(__file__).parent / "assets"
SHARED = (REPORT / "style.css", HERE / "app.css", HERE / "kit.js")
KINDS = {".css": "text/css", ".js": "text/javascript"}


def page_app(
    template: str,
    assets: Iterable[Path],
    token: str,
    hosts: frozenset[str] | None,
    inner: Iterable[Any] = (),
    **values: Any,
) -> FastAPI:
    """An application that shows a page, made from a template and values, to who has the token.

    It gives out the assets, and those that all pages share, without a token. `hosts` are the addresses it answers to
    (None: any); what `inner` names is asked after the token.
    """
    app = FastAPI(title="Mutirão", docs_url=None, redoc_url=None, openapi_url=None)
    for middleware in inner:
        app.add_middleware(middleware)
    # The one that is added last is called first: nothing else sees a request without the token.
    app.add_middleware(Guard, token=token, hosts=hosts)
    files = {path.name: path for path in (*SHARED, *assets)}

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(render(template, **values))

    @app.get("/assets/{name}")
    def asset(name: str) -> FileResponse:
        if name not in files:
            raise HTTPException(404)
        kind = KINDS[files[name].suffix]
        return FileResponse(files[name], media_type=kind, headers={"cache-control": "no-cache"})

    return app
