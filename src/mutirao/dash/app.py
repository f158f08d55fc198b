"""The live page's server: reads for who has the token, writes only from the page itself, nothing outside the folder."""

import asyncio
import hmac
import json
import re
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import Body, FastAPI, HTTPException, Query
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from mutirao.dash.clients import Clients, clients_of, page_of
from mutirao.dash.control import Control, Refused
from mutirao.dash.shelf import Item, mark_of
from mutirao.dash.watching import Watcher
from mutirao.report import charts, render
from mutirao.report.page import asset
from mutirao.report.state import last_lines, state_in
from mutirao.report.words import sentences
from mutirao.runs.reader import Record, clean, text_of

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

HERE = Path(__file__).parent / "assets"
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
DOWNLOADS = re.compile(
    r"(config\.toml|history\.(csv|json)|clients\.csv|summary\.json|audit\.jsonl|run\.log|table\.\w+)"
)
KINDS = {"css": "text/css", "js": "text/javascript"}
LOG_LINES = 400


class Guard:
    """Lets through who came by the right address with the right token; everybody else learns nothing."""

    def __init__(self, app: Any, token: str, hosts: frozenset[str] | None) -> None:
        self.app, self.token, self.hosts = app, token, hosts

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
        if self.hosts is not None and host.lower() not in self.hosts:  # another name may point here
            return "this page answers to its own address only"
        writes = scope["method"] not in ("GET", "HEAD")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if writes and ((origin is not None and origin != f"http://{host}") or site not in ("same-origin", "none")):
            return "another page may not change anything here"
        if scope["path"].startswith("/assets/") and not writes:
            return ""  # the same for everybody
        given = headers.get("x-mutirao-token", "")
        if not given and not writes:  # a link or an event stream cannot carry a header; a write must
            given = (parse_qs(scope["query_string"].decode("latin-1")).get("token") or [""])[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "the token is missing or wrong; open the address that was printed at the start"
        return ""


class Shared:
    """Results that are dear to make, kept as long as the file they come from does not change."""

    def __init__(self, most: int = 32) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Any, Any]] = OrderedDict()
        self._lock, self._most = threading.Lock(), most

    def get(self, what: str, item: Item, file: str, make: Callable[[], Any]) -> Any:
        """The result for a run, made anew if the file changed."""
        mark = (mark_of(item.path / file), item.facts.get("state"))
        with self._lock:
            found = self._kept.get((what, item.key))
            if found and found[0] == mark:
                self._kept.move_to_end((what, item.key))
                return found[1]
        made = make()
        with self._lock:
            self._kept[what, item.key] = (mark, made)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made


@cache
def read_asset(name: str) -> str:
    """A file of the live page, or one it shares with reports."""
    return (HERE / name).read_text(encoding="utf-8") if (HERE / name).is_file() else asset(name)


ASSETS = ("dash.js", "dash.css", "charts.js", "style.css")


def sections_of(record: Record) -> list[dict[str, Any]]:
    """The charts of a run beyond its curves, as its report has them."""
    parts = {
        "The data": charts.chart_partition,
        "Who took part": charts.chart_participation,
        "Groups": charts.chart_groups,
        "Weights and what clients reported": charts.chart_weights,
        "What it cost": charts.chart_cost,
        "Failures and rejections": charts.chart_losses,
        "Privacy": charts.chart_privacy,
    }
    found = [{"title": title, "charts": clean(list(make(record)))} for title, make in parts.items()]
    return [part for part in found if part["charts"]]


def make_app(root: Path, token: str, hosts: frozenset[str] | None) -> FastAPI:
    """The application over a folder; `hosts` are the addresses it answers to (None: any)."""
    app = FastAPI(title="Mutirão", docs_url=None, redoc_url=None, openapi_url=None)
    watcher, control, shared = Watcher(root), Control(), Shared()
    app.state.watcher = watcher
    app.state.closing = lambda: False
    app.add_middleware(Guard, token=token, hosts=hosts)

    def item_of(id: str) -> Item:
        item = watcher.item(id)
        if item is None:
            raise HTTPException(404, "there is no such run")
        return item

    def record_of(item: Item) -> Record:
        found: Record = shared.get("record", item, "audit.jsonl", lambda: Record.of(item.path))
        return found

    def words_of(item: Item) -> list[str]:
        record = record_of(item)
        return sentences(record, state_in(record))

    def charts_of(item: Item) -> str:
        return json.dumps(sections_of(record_of(item)), separators=(",", ":"))

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse((HERE / "dash.html").read_text(encoding="utf-8"))

    @app.get("/assets/{name}")
    def assets(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404)
        kind = KINDS[name.rpartition(".")[2]]
        return Response(read_asset(name), media_type=kind, headers={"cache-control": "no-cache"})

    @app.get("/api/runs")
    def runs() -> Response:
        watcher.looked.wait(10)
        content = {"root": watcher.shelf.root.name, "runs": [told(f) for f in watcher.facts()]}
        return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")

    def told(facts: dict[str, Any]) -> dict[str, Any]:
        at_rest = facts["state"] in ("stopped", "failed", "new")
        return facts | {"why": problem} if at_rest and (problem := control.problem(str(facts["id"]))) else facts

    @app.get("/api/history")
    def history(id: str) -> dict[str, Any]:
        item_of(id)
        return watcher.rows(id) or {}

    @app.get("/api/run")
    def run(id: str) -> dict[str, Any]:
        item = item_of(id)
        config = text_of(path) if (path := watcher.shelf.file(id, "config.toml")) else ""
        cells = [f for f in watcher.facts() if f["study"] == id] if item.kind == "study" else []
        words = shared.get("words", item, "audit.jsonl", lambda: words_of(item)) if item.kind == "run" else []
        return {"facts": told(item.facts), "words": words, "config": config, "cells": cells}

    @app.get("/api/charts")
    def charts_in(id: str) -> Response:
        item = item_of(id)
        text = shared.get("charts", item, "clients.csv", lambda: charts_of(item)) if item.kind == "run" else "[]"
        return Response(text, media_type="application/json")

    @app.get("/api/clients")
    def clients(id: str, q: str = "", sort: str = "client", start: int = Query(0, ge=0)) -> dict[str, Any]:
        item = item_of(id)
        everyone: Clients = shared.get("clients", item, "clients.csv", lambda: clients_of(record_of(item).clients))
        return page_of(everyone, q, sort, start)

    @app.get("/api/log")
    def log(id: str) -> dict[str, Any]:
        item_of(id)
        path = watcher.shelf.file(id, "run.log")
        return {"lines": last_lines(path, LOG_LINES) if path else []}

    @app.get("/api/file")
    def file(id: str, name: str) -> Response:
        item_of(id)
        path = watcher.shelf.file(id, name) if DOWNLOADS.fullmatch(name) else None
        if path is None:
            raise HTTPException(404, "there is no such file")
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(path.read_bytes(), media_type="application/octet-stream", headers=headers)

    @app.get("/report")
    def report(id: str) -> HTMLResponse:
        text = render(item_of(id).path)  # made here and now: a file in the folder could hold anything
        policy = re.search(r'Content-Security-Policy content="([^"]+)"', text)
        more = "; frame-ancestors 'none'; sandbox allow-scripts allow-downloads allow-same-origin"
        return HTMLResponse(text, headers={"content-security-policy": (policy[1] if policy else POLICY) + more})

    @app.get("/events")
    async def events(watch: Annotated[list[str], Query()] = []) -> StreamingResponse:  # noqa: B006 - never changed
        async def stream() -> AsyncIterator[str]:
            with watcher.listening(frozenset(watch[:50])) as listener:
                yield "retry: 1000\nevent: hello\ndata: {}\n\n"
                idle = 0
                while True:
                    try:
                        message = await asyncio.wait_for(listener.queue.get(), 0.5)
                    except TimeoutError:
                        if app.state.closing():
                            return
                        idle += 1
                        if idle % 30 == 0:
                            yield ": still here\n\n"
                        continue
                    if "facts" in message:
                        message = {**message, "facts": told(message["facts"])}
                    yield f"event: {message['event']}\ndata: {json.dumps(message, separators=(',', ':'))}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def wish(act: Callable[[Item], None], id: str) -> dict[str, bool]:
        try:
            act(item_of(id))
        except Refused as error:
            raise HTTPException(409, str(error)) from error
        except OSError as error:
            raise HTTPException(409, f"it could not be done: {error.strerror}") from error
        return {"done": True}

    @app.post("/api/cancel")
    def cancel(id: str = Body(embed=True)) -> dict[str, bool]:
        return wish(control.cancel, id)

    @app.post("/api/resume")
    def resume(id: str = Body(embed=True)) -> dict[str, bool]:
        return wish(control.resume, id)

    return app
