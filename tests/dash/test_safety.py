"""The live page seen by somebody who should not see it, over real connections to the real server."""

import http.client
from urllib.parse import quote, urlsplit

import httpx
import pytest

from living import Live

CLIENT = httpx.Client(verify=False, trust_env=False)  # one for all: its certificates take long to load
READS = [
    "/",
    "/api/runs",
    "/api/run?id=alpha",
    "/api/history?id=alpha",
    "/api/charts?id=alpha",
    "/api/clients?id=alpha",
]
READS += ["/api/log?id=alpha", "/api/file?id=alpha&name=config.toml", "/report?id=alpha", "/events"]
WRITES = ["/api/cancel", "/api/resume"]


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
        assert CLIENT.post(address, json={"id": "alpha"}).status_code == 403
    assert CLIENT.post(live.base + path, json={"id": "alpha"}, headers={"X-Mutirao-Token": "no"}).status_code == 403


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_another_origin_cannot_write_even_with_the_token(live: Live, path: str, headers: dict[str, str]) -> None:
    told = {"X-Mutirao-Token": live.token, **headers}
    assert CLIENT.post(live.base + path, json={"id": "alpha"}, headers=told).status_code == 403
    own = {"X-Mutirao-Token": live.token, "Origin": live.base, "Sec-Fetch-Site": "same-origin"}
    assert CLIENT.post(live.base + path, json={"id": "nowhere"}, headers=own).status_code == 404


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
    for name in ("dash.js", "dash.css", "charts.js", "style.css"):
        assert CLIENT.get(f"{live.base}/assets/{name}").status_code == 200
    assert CLIENT.get(f"{live.base}/assets/dash.html").status_code == 404


def test_runs_that_are_not_running_cannot_be_cancelled_nor_finished_ones_spoilt(live: Live) -> None:
    headers = {"X-Mutirao-Token": live.token}
    answer = CLIENT.post(f"{live.base}/api/cancel", json={"id": "alpha"}, headers=headers)
    assert answer.status_code == 409
    assert "nothing is running" in answer.json()["detail"]
