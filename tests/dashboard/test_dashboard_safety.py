"""The live page seen by somebody who should not see it, over real connections to the real server."""

import asyncio
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from living import PATIENCE, Live
from mutirao.dashboard.app import make_app
from mutirao.runs.execute import execute

CLIENT = httpx.Client(
    verify=False, trust_env=False, timeout=PATIENCE
)  # one for all: its certificates take long to load
READS = [
    "/",
    "/api/runs",
    "/api/run?id=alpha",
    "/api/history?id=alpha",
    "/api/charts?id=alpha",
    "/api/clients?id=alpha",
]
READS += [
    "/api/settings?id=alpha",
    "/api/log?id=alpha",
    "/api/file?id=alpha&name=config.toml",
    "/report?id=alpha",
    "/events",
]
WRITES = ["/api/cancel", "/api/resume", "/api/notes"]
WISH = {"id": "alpha", "text": "from elsewhere", "seen": ""}


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("token", ["", "wrong", "ü"])
def test_nothing_is_read_without_the_token(live: Live, path: str, token: str) -> None:
    sign = "&" if "?" in path else "?"
    answer = CLIENT.get(f"{live.base}{path}{sign}token={quote(token)}")
    assert answer.status_code == 403
    assert "alpha" not in answer.text
    assert CLIENT.get(live.base + path, headers={"X-Mutirao-Token": live.token + "x"}).status_code == 403


@pytest.mark.parametrize("path", WRITES)
def test_nothing_is_written_without_the_token_in_a_header(live: Live, path: str) -> None:
    for address in (f"{live.base}{path}", f"{live.base}{path}?token={live.token}"):
        assert CLIENT.post(address, json=WISH).status_code == 403
    assert CLIENT.post(live.base + path, json=WISH, headers={"X-Mutirao-Token": "no"}).status_code == 403
    assert not (live.folder / "alpha" / "notes.md").exists()


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_another_origin_cannot_write_even_with_the_token(live: Live, path: str, headers: dict[str, str]) -> None:
    told = {"X-Mutirao-Token": live.token, **headers}
    assert CLIENT.post(live.base + path, json=WISH, headers=told).status_code == 403
    own = {"X-Mutirao-Token": live.token, "Origin": live.base, "Sec-Fetch-Site": "same-origin"}
    assert CLIENT.post(live.base + path, json={**WISH, "id": "nowhere"}, headers=own).status_code == 404


def test_a_name_that_points_here_is_not_our_address(live: Live) -> None:
    headers = {"Host": "evil.example", "X-Mutirao-Token": live.token}
    assert CLIENT.get(f"{live.base}/api/runs", headers=headers).status_code == 403
    answer = CLIENT.options(f"{live.base}/api/cancel", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def raw(live: Live, path: str) -> tuple[int, str]:
    """A request whose path no client library has tidied up."""
    place = urlsplit(live.base)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", f"{place.hostname}:{place.port}")
    connection.putheader("X-Mutirao-Token", live.token)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "path",
    [
        "/api/file?id=alpha&name=..%2f..%2fsecret.txt",
        "/api/file?id=alpha&name=../../secret.txt",
        "/api/file?id=alpha&name=config.toml%00.png",
        "/api/file?id=alpha&name=%2fetc%2fpasswd",
        "/api/file?id=..%2f&name=config.toml",
        "/api/file?id=alpha%2f..%2f..&name=config.toml",
        "/api/file?id=%2fetc&name=config.toml",
        "/api/file?id=link&name=config.toml",
        "/api/file?id=linked&name=config.toml",
        "/api/file?id=linked&name=run.log",
        "/api/file?id=alpha&name=.lock",
        "/api/file?id=alpha&name=report.html",
        "/api/log?id=linked%2f..%2f..",
        "/report?id=..%2f..",
        "/assets/..%2f..%2fapp.py",
        "/assets/%2e%2e/app.py",
        "/..%2f..%2fsecret.txt",
    ],
)
def test_nothing_outside_the_folder_can_be_had(live: Live, path: str) -> None:
    secret = live.folder.parent / "secret.txt"
    secret.write_text("the secret")
    outside = live.folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "config.toml").write_text("recipe = 'the secret'\n")
    (outside / "audit.jsonl").write_text("")
    if not (live.folder / "link").exists():
        (live.folder / "link").symlink_to(outside)
        linked = live.folder / "linked"  # a run whose files are links to elsewhere
        linked.mkdir()
        (linked / "config.toml").symlink_to(secret)
        (linked / "run.log").symlink_to(secret)
        (linked / "audit.jsonl").write_text("")
    status, text = raw(live, path)
    assert status in (403, 404), (status, text)
    assert "secret" not in text
    if "linked" in path:
        status, text = raw(live, "/api/log?id=linked")
        assert "the secret" not in text


def test_the_page_may_load_and_run_nothing_from_elsewhere(live: Live) -> None:
    answer = CLIENT.get(live.address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    for name in ("dash.js", "table.js", "compare.js", "dash.css", "table.css", "charts.js", "style.css"):
        assert CLIENT.get(f"{live.base}/assets/{name}").status_code == 200
    assert CLIENT.get(f"{live.base}/assets/dash.html").status_code == 404


def test_runs_that_are_not_running_cannot_be_cancelled_nor_finished_ones_spoilt(live: Live) -> None:
    headers = {"X-Mutirao-Token": live.token}
    answer = CLIENT.post(f"{live.base}/api/cancel", json={"id": "alpha"}, headers=headers)
    assert answer.status_code == 409
    assert "nothing is running" in answer.json()["detail"]


def test_notes_are_written_into_the_folder_and_never_over_those_of_another(live: Live) -> None:
    headers = {"X-Mutirao-Token": live.token, "Origin": live.base}

    def write(text: str, seen: str) -> httpx.Response:
        return CLIENT.post(f"{live.base}/api/notes", json={"id": "alpha", "text": text, "seen": seen}, headers=headers)

    file = live.folder / "alpha" / "notes.md"
    try:
        mark = write("a <b>note</b>", "").json()["notes"]["mark"]
        assert file.read_text() == "a <b>note</b>"
        answer = write("of a page that did not see it", "")
        assert answer.status_code == 409
        assert answer.json()["notes"] == {"text": "a <b>note</b>", "mark": mark, "problem": ""}
        assert write("x" * 20_001, mark).status_code == 409
        assert write("x" * 3_000_000, mark).status_code == 409
        assert file.read_text() == "a <b>note</b>"
    finally:
        file.unlink(missing_ok=True)
    (live.folder / "alpha" / "notes.md").symlink_to(live.folder.parent / "slow.py")
    try:
        assert write("through a link", "").status_code == 409
        assert "through" not in (live.folder.parent / "slow.py").read_text()
    finally:
        file.unlink()


def test_a_page_to_be_looked_at_only_grants_no_wish(tmp_path: Path) -> None:
    execute("iris:iris", {"rounds": 1}, tmp_path / "runs" / "one")
    app = make_app(tmp_path / "runs", "token", None, read_only=True)
    app.state.watcher.look()
    app.state.watcher.looked.set()

    async def story() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            client.headers["X-Mutirao-Token"] = "token"
            listed = await client.get("/api/runs")
            assert listed.json()["readonly"]
            again = await client.get("/api/runs", headers={"If-None-Match": listed.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            return [(await client.post(path, json={**WISH, "id": "one"})).status_code for path in WRITES]

    with ThreadPoolExecutor(1) as pool:  # a thread of its own: this one may be a browser's
        assert pool.submit(asyncio.run, story()).result() == [403] * 3
    assert not (tmp_path / "runs" / "one" / "notes.md").exists()


def test_a_stream_of_events_begins_with_the_version_of_the_list(live: Live) -> None:
    def version() -> str:
        return str(CLIENT.get(f"{live.base}/api/runs?token={live.token}").json()["version"])

    before = version()
    with CLIENT.stream("GET", f"{live.base}/events?token={live.token}") as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert json.loads(data.removeprefix("data: "))["version"] in (before, version())
