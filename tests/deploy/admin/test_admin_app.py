"""The admin pages seen by somebody who should not see them, and by one who sends nonsense."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mutirao.deploy.admin.admin_page import MOST, make_app
from mutirao.deploy.keys import key_fingerprint
from mutirao.deploy.layout import Node, Server
from mutirao.deploy.provisioning import create_server, create_site
from superlinks import FakeLink

TOKEN, HOST = "a-long-token", "127.0.0.1:8000"
READS, WRITES = ["/", "/api/facts"], ["/api/key", "/api/admit", "/api/dismiss"]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return create_server(tmp_path / "server", ["localhost"])


@pytest.fixture
def recife(tmp_path: Path) -> Node:
    return create_site(tmp_path / "recife", "recife", "localhost:9092", client="c0")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    return FakeLink(monkeypatch)


def client(place: Server | Node, token: str = TOKEN, **headers: str) -> TestClient:
    app = make_app(place, TOKEN, frozenset({HOST}))
    return TestClient(app, f"http://{HOST}", headers={"X-Mutirao-Token": token, **headers} if token else headers)


def send(place: Server | Node, path: str, **content: Any) -> tuple[int, Any]:
    answer = client(place).post(path, json=content)
    return answer.status_code, answer.json().get("detail", answer.json())


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("token", ["", "wrong"])
def test_nothing_is_read_without_the_token(server: Server, path: str, token: str) -> None:
    answer = client(server, token).get(path)
    assert (answer.status_code, "server" in answer.text) == (403, False)
    assert client(server, "").get(f"{path}?token={TOKEN}").status_code == 200


@pytest.mark.parametrize("path", WRITES)
def test_nothing_is_written_without_the_token_in_a_header(server: Server, path: str) -> None:
    assert client(server, "").post(f"{path}?token={TOKEN}", json={}).status_code == 403
    assert client(server, "wrong").post(path, json={}).status_code == 403


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}]
)
def test_another_origin_cannot_write_even_with_the_token(server: Server, path: str, headers: dict[str, str]) -> None:
    assert client(server, **headers).post(path, json={}).status_code == 403


def test_a_site_is_not_paused_from_elsewhere(recife: Node) -> None:
    for who in (client(recife, ""), client(recife, Origin="http://evil.example"), client(recife, Host="evil.example")):
        assert who.post("/api/pause", json={"on": True}).status_code == 403
    assert not (recife.folder / "paused").exists()
    assert send(recife, "/api/pause", on=True) == (200, {"turned": True})
    assert (recife.folder / "paused").exists()
    assert send(recife, "/api/pause", on=False) == (200, {"turned": True})


def test_a_name_that_points_here_is_not_our_address(server: Server) -> None:
    answer = client(server, Host="evil.example:8000").get("/api/facts")
    assert (answer.status_code, answer.text) == (403, "this page answers to its own address only")


def test_the_page_may_load_and_run_nothing_from_elsewhere(server: Server, recife: Node) -> None:
    for place in (server, recife):
        answer = client(place).get("/")
        policy = answer.headers["content-security-policy"]
        assert ("default-src 'none'" in policy, "unsafe" in policy) == (True, False)
        assert answer.headers["x-frame-options"] == "DENY"
        for name in ("admin.js", "admin.css", "style.css"):
            assert client(place, "").get(f"/assets/{name}").status_code == 200
        assert client(place).get("/assets/server.html").status_code == 404


def test_what_is_too_long_is_not_read(server: Server) -> None:
    status, said = send(server, "/api/key", key="x" * MOST, name="recife")
    assert (status, said.startswith("this is too long: 16384 bytes are the most")) == (413, True)
    parts = client(server).post("/api/key", content=iter([b"{}"]))  # of a length that it does not say
    assert parts.status_code == 413
    assert send(server, "/api/key", key="x" * 5000, name="recife") == (400, "the request is not as this page sends it")


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("nonsense", "recife", "recife.pub is no public key of a site"),
        ("", "recife", "recife.pub is no public key of a site"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIH\u00e9", "recife", "recife.pub is no public key of a site"),
        ("{key}", "../../etc/passwd", "'../../etc/passwd' is no name"),
        ("{key}\n{key}", "recife", "recife.pub"),
    ],
)
def test_a_bad_key_is_one_line_and_nothing_is_kept(
    server: Server, recife: Node, link: FakeLink, key: str, name: str, said: str
) -> None:
    text = key.format(key=recife.public_key.read_text().strip())
    status, line = send(server, "/api/key", key=text, name=name)
    assert status == 409
    assert line.startswith(said), line
    assert "\n" not in line
    assert "/tmp" not in line
    shown = key_fingerprint(recife.public_key)
    assert send(server, "/api/admit", key=text, name=name, client="", fingerprint=shown)[0] == 409
    assert list(server.sites.iterdir()) == link.nodes == []


def test_a_site_is_admitted_as_it_was_shown_and_dismissed_by_its_name(
    server: Server, recife: Node, link: FakeLink
) -> None:
    key = recife.public_key.read_text()
    status, shown = send(server, "/api/key", key=key, name="recife")
    assert (status, shown) == (
        *(200,),
        {"name": "recife", "client": "c0", "fingerprint": key_fingerprint(recife.public_key)},
    )
    assert (list(server.sites.iterdir()), link.nodes) == ([], [])  # so far it was only looked at
    status, said = send(server, "/api/admit", key=key, **shown | {"fingerprint": "SHA256:another"})
    assert (status, "another key than the one that was shown" in said) == (409, True)
    link.away = True
    status, said = send(server, "/api/admit", key=key, **shown)
    assert (status, "the SuperLink does not answer" in said, list(server.sites.iterdir())) == (409, True, [])
    link.away = False
    assert send(server, "/api/admit", key=key, **shown)[0] == 200
    assert [n.status for n in link.nodes] == ["registered"]
    status, said = send(server, "/api/key", key=key, name="natal")
    assert (status, "holds this key already, under another name" in said) == (409, True)
    status, said = send(server, "/api/dismiss", name="recife", typed="recif")
    assert (status, said) == (409, "type recife to dismiss it; 'recif' is another name")
    assert [n.status for n in link.nodes] == ["registered"]
    assert send(server, "/api/dismiss", name="recife", typed="recife") == (200, {"name": "recife"})
    assert [n.status for n in link.nodes] == ["unregistered"]
    assert [p.name for p in server.sites.iterdir()] == ["recife.pub.dismissed"]
    status, said = send(server, "/api/dismiss", name="recife", typed="recife")
    assert (status, "is not there" in said) == (409, True)


def test_a_page_offers_only_what_its_folder_can_do(server: Server, recife: Node) -> None:
    assert client(recife).post("/api/dismiss", json={"name": "a", "typed": "a"}).status_code == 404
    assert client(server).post("/api/pause", json={"on": True}).status_code == 404
    for nonsense in (b"?", b"[]", b'{"name": 3}'):
        headers = {"content-type": "application/json"}
        answer = client(server).post("/api/dismiss", content=nonsense, headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (400, "the request is not as this page sends it")
