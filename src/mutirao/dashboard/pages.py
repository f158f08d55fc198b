"""What the served pages share: who may ask them, and the files that they load."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse

from mutirao.dashboard.request_guard import Guard
from mutirao.report.html_page import ASSETS as REPORT
from mutirao.templates import render

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

    It gives out the assets and those that all pages share, to anybody. `hosts` are the addresses it answers to (None:
    any); what `inner` names is asked after the token.
    """
    app = FastAPI(title="Mutirão", docs_url=None, redoc_url=None, openapi_url=None)
    for middleware in inner:
        app.add_middleware(middleware)
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
