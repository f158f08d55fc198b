"""The FastAPI application of the dashboard: its routes. No route reaches a file outside of the folder."""

import asyncio
import gzip
import json
import re
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header, HTTPException, Query
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from mutirao.dashboard.pages import HERE, POLICY, page_app
from mutirao.dashboard.run_control import Control, Refused
from mutirao.dashboard.run_index import Item, mark_of
from mutirao.dashboard.run_summary import Clients, clients_of, page_of, read_settings, settings_of
from mutirao.dashboard.watcher import Watcher
from mutirao.metrics import direction_of
from mutirao.report import charts, render
from mutirao.report.html_page import ASSETS as REPORT
from mutirao.report.html_page import is_steady
from mutirao.report.run_state import last_lines, state_in
from mutirao.report.sentences import sentences
from mutirao.report.study_report import best_of, cell_states, study_sentences, thresholds_of
from mutirao.research_notice import notice_of
from mutirao.runs.audit_trail import subtable
from mutirao.runs.notes import Changed, read_notes, write_notes
from mutirao.runs.reader import Record, clean, json_of, text_in

FIGURES = ("mean", "half_t", "best", "wobble", "difference", "difference_half", "p_t", "p_holm")


def study_of(folder: Path) -> dict[str, Any]:
    """The study's sentences, and a table for each of its metrics."""
    table = json_of(folder / "table.json")
    plan = json_of(folder / "study.json")
    lines = [x for x in table.get("lines") or [] if isinstance(x, dict) and "metric" in x and "method" in x]
    metrics = dict.fromkeys(str(x["metric"]) for x in lines)
    tables = [table_of(table, [x for x in lines if str(x["metric"]) == metric], metric) for metric in metrics]
    goals = thresholds_of(plan)
    tables = [found | {"threshold": goals.get(found["metric"])} for found in tables]
    planned = plan.get("cells")
    cells = [str(c) for c in planned] if isinstance(planned, list) else []
    words = list(study_sentences(table, lines, cell_states(folder, plan)))
    found: dict[str, Any] = {"words": words, "baseline": str(table.get("baseline", "")), "planned": cells}
    return found | {"tables": clean(tables)}


def table_of(table: dict[str, Any], lines: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The methods by one metric, the best first; in the order of the study if it is unknown which way is better."""
    known = [x for x in lines if isinstance(x.get("mean"), int | float)]
    top = best_of(known, metric, table)
    if top is not None:
        falling = all(top["mean"] >= x["mean"] for x in known)
        known = sorted(known, key=lambda x: x["mean"], reverse=falling)
    rows = [row_of(x, x is top, str(table.get("baseline", ""))) for x in known]
    return {"metric": metric, "rows": rows}


def row_of(line: dict[str, Any], top: bool, baseline: str) -> dict[str, Any]:
    """One method: its figures, and the comparison's verdict in a word."""
    numbers = {k: v for k in FIGURES if isinstance(v := line.get(k), int | float) and not isinstance(v, bool)}
    verdict = str(line.get("verdict", ""))
    word = {"not shown": "undecided"}.get(verdict, verdict)
    if str(line["method"]) == baseline:
        word = "baseline"
    values = line.get("values")
    runs = len(values) if isinstance(values, list) else 0
    reached = str(line.get("rounds_to") or "")
    return {"method": str(line["method"]), "top": top, "verdict": word, "runs": runs, "rounds_to": reached, **numbers}


ASSETS = (REPORT / "charts.js", *HERE.glob("*.css"), *HERE.glob("*.js"))
DOWNLOADS = re.compile(
    r"(config\.toml|history\.(csv|json)|clients\.csv|summary\.json|audit\.jsonl|run\.log|notes\.md|table\.\w+)"
)
LOG_LINES = 400
MOST_COMPARED = 60
FIRST_LOOK = 0.7  # seconds that the first list waits for a folder to be read
READ_ONLY = "this page was started to be looked at only (--read-only)"


class Shared:
    """Results that are dear to make, kept as long as the file they come from does not change."""

    def __init__(self, most: int = 32) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Any, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._most = most

    def get(self, what: str, item: Item, file: str, make: Callable[[], Any]) -> Any:
        """The result for a run, made anew if the file changed."""
        mark = (mark_of(item.path / file), item.facts.get("state"))
        with self._lock:
            found = self._kept.get((what, item.key))
            if found and found[0] == mark:
                self._kept.move_to_end((what, item.key))
                return found[1]
        # Made without the lock, so that a slow result delays no other; at worst two threads make the same.
        made = make()
        with self._lock:
            self._kept[what, item.key] = (mark, made)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made


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
    drawn = {title: [spec for spec in make(record) if not is_steady(spec)] for title, make in parts.items()}
    found = [{"title": title, "charts": clean(specs)} for title, specs in drawn.items()]
    return [part for part in found if part["charts"]]


def make_app(root: Path, token: str, hosts: frozenset[str] | None, read_only: bool = False) -> FastAPI:
    """The application over a folder; `hosts` are the addresses it answers to (None: any)."""
    app = page_app("dashboard/assets/dash.html", ASSETS, token, hosts)
    watcher = Watcher(root)
    control = Control()
    shared = Shared()
    app.state.watcher = watcher
    app.state.closing = lambda: False

    def item_of(id: str) -> Item:
        item = watcher.item(id)
        if item is None:
            raise HTTPException(404, "there is no such run")
        return item

    def whole_item(id: str) -> Item:
        item = item_of(id)
        if item.facts.get("state") == "unreadable":
            raise HTTPException(409, f"it is not read: {item.facts['why']}")
        return item

    def record_of(item: Item) -> Record:
        found: Record = shared.get("record", item, "audit.jsonl", lambda: Record.of(item.path))
        return found

    def words_of(item: Item) -> list[str]:
        record = record_of(item)
        told = (notice_of(record.config), *sentences(record, state_in(record)))
        return [said for said in told if said]

    def charts_of(item: Item) -> str:
        return json.dumps(sections_of(record_of(item)), separators=(",", ":"))

    @app.get("/api/runs")
    def runs(if_none_match: str = Header(""), accept_encoding: str = Header("")) -> Response:
        watcher.walked.wait(10)
        # Not until all is read: the latest runs of a large folder are shown meanwhile.
        watcher.looked.wait(FIRST_LOOK)
        left = watcher.left
        version, listed = watcher.listing()
        tag = f'"{version}-{left}"'
        if if_none_match == tag:
            return Response(status_code=304, headers={"etag": tag})
        about = {"root": watcher.shelf.root.name, "version": version, "left": left, "readonly": read_only}
        said = {key: problem for key in control.begun() if (problem := control.problem(key))}
        content = json.dumps(about | {"said": said})[:-1].encode() + b', "runs": ' + listed + b"}"
        headers = {"etag": tag}
        if "gzip" in accept_encoding and len(content) > 100_000:
            content, headers["content-encoding"] = gzip.compress(content, 1), "gzip"
        return Response(content, media_type="application/json", headers=headers)

    def told(facts: dict[str, Any]) -> dict[str, Any]:
        at_rest = facts["state"] in ("stopped", "failed", "new")
        if at_rest and (problem := control.problem(str(facts["id"]))):
            return facts | {"why": problem}
        return facts

    @app.get("/api/history")
    def history(id: str, only: Annotated[list[str], Query()] = []) -> dict[str, Any]:  # noqa: B006 - never changed
        item = whole_item(id)
        found = watcher.rows(id, only) or {"names": []}
        ways = subtable(json_of(item.path / "summary.json"), "directions")
        return found | {"ways": {name: way for name in found["names"] if (way := direction_of(name, ways))}}

    @app.get("/api/run")
    def run(id: str) -> dict[str, Any]:
        item = item_of(id)
        found = {"facts": told(item.facts), "words": [], "config": "", "notes": vars(read_notes(item.path))}
        if item.facts.get("state") == "unreadable":
            return found
        if item.kind == "study":
            return found | study_of(item.path)
        config = ""
        if path := watcher.shelf.file(id, "config.toml"):
            config = text_in(path)
        words = shared.get("words", item, "audit.jsonl", lambda: words_of(item))
        return found | {"words": words, "config": config}

    @app.get("/api/settings")
    def settings(id: Annotated[list[str], Query()]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in id[:MOST_COMPARED]:
            try:
                found[key] = clean(settings_of(read_settings(text_in(whole_item(key).path / "config.toml"))))
            except (ValueError, RecursionError):
                found[key] = {}
        return found

    @app.get("/api/charts")
    def charts_in(id: str) -> Response:
        item = whole_item(id)
        text = "[]"
        if item.kind == "run":
            text = shared.get("charts", item, "clients.csv", lambda: charts_of(item))
        return Response(text, media_type="application/json")

    @app.get("/api/clients")
    def clients(id: str, q: str = "", sort: str = "client", start: int = Query(0, ge=0)) -> dict[str, Any]:
        item = whole_item(id)
        everyone: Clients = shared.get("clients", item, "clients.csv", lambda: clients_of(record_of(item).clients))
        return page_of(everyone, q, sort, start)

    @app.get("/api/log")
    def log(id: str) -> dict[str, Any]:
        whole_item(id)
        path = watcher.shelf.file(id, "run.log")
        return {"lines": last_lines(path, LOG_LINES) if path else []}

    @app.get("/api/file")
    def file(id: str, name: str) -> Response:
        item_of(id)
        path = None
        if DOWNLOADS.fullmatch(name):
            path = watcher.shelf.file(id, name)
        if path is None:
            raise HTTPException(404, "there is no such file")
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(path.read_bytes(), media_type="application/octet-stream", headers=headers)

    @app.get("/report")
    def report(id: str) -> HTMLResponse:
        # Rendered here and now: a report that lies in the folder could hold any script.
        text = render(whole_item(id).path)
        policy = re.search(r'Content-Security-Policy content="([^"]+)"', text)
        more = "; frame-ancestors 'none'; sandbox allow-scripts allow-downloads allow-same-origin"
        return HTMLResponse(text, headers={"content-security-policy": (policy[1] if policy else POLICY) + more})

    @app.get("/events")
    async def events(watch: Annotated[list[str], Query()] = []) -> StreamingResponse:  # noqa: B006 - never changed
        async def stream() -> AsyncIterator[str]:
            with watcher.listening(frozenset(watch[:MOST_COMPARED])) as listener:
                # What came before is not sent: a page with another version requests the list.
                hello = json.dumps({"version": watcher.version})
                yield f"retry: 1000\nevent: hello\ndata: {hello}\n\n"
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
        item = item_of(id)
        if read_only:
            raise HTTPException(403, READ_ONLY)
        try:
            act(item)
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

    @app.post("/api/notes")
    def notes(id: str = Body(), text: str = Body(), seen: str = Body()) -> Response:
        item = item_of(id)
        if read_only:
            raise HTTPException(403, READ_ONLY)
        try:
            kept = write_notes(item.path, text, seen)
        except Changed as error:
            return JSONResponse({"detail": str(error), "notes": vars(error.now)}, status_code=409)
        except (ValueError, OSError) as error:
            raise HTTPException(409, f"not kept: {getattr(error, 'strerror', None) or error}") from error
        return JSONResponse({"notes": vars(kept)})

    return app
