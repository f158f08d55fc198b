"""The doctor finds each fault that was planted, says what to do, and is content with what is sound."""

import http.server
import json
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.core.agreement import versions
from mutirao.deploy import doctor
from mutirao.deploy.doctor import GIGABYTE, Finding, examine, is_healthy
from mutirao.deploy.keys import create_authority, create_server_certificate
from mutirao.deploy.layout import Node, Server, free_port
from mutirao.deploy.policy.rules import policy_template
from mutirao.deploy.provisioning import create_server, create_site, renew
from mutirao.deploy.rehearsal import permit_training
from sets import write_classes


class Answer(http.server.BaseHTTPRequestHandler):
    """Stands in for a server of ours; `facts` are what it tells."""

    facts: dict[str, Any]
    status = 200

    def do_GET(self) -> None:
        body = json.dumps(self.facts | {"time": time.time() - self.facts.get("behind", 0)}).encode()
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return create_server(tmp_path / "server", ["localhost", "fed.example.org"], free_port())


@pytest.fixture
def answer(server: Server) -> Iterator[type[Answer]]:
    """The server answers over TLS, with a certificate that is read anew for each connection."""
    kind = type("Answer", (Answer,), {"facts": {"versions": versions(), "admitted": True}})

    class Listening(http.server.ThreadingHTTPServer):
        def get_request(self) -> Any:
            line, address = super().get_request()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server.certificate, server.key)
            try:
                return context.wrap_socket(line, server_side=True), address
            except OSError:
                line.close()
                raise

    listening = Listening(("0.0.0.0", server.port), kind)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield kind
    listening.shutdown()
    thread.join(60)
    listening.server_close()


@pytest.fixture
def node(server: Server, tmp_path: Path) -> Node:
    data = tmp_path / "data"
    data.mkdir()
    (data / "cells.npy").write_bytes(b"1")
    made = create_site(
        tmp_path / "recife", "recife", f"localhost:{server.port}", server.ca, str(data), recipes=["quickstart"]
    )
    text = made.policy_file.read_text().replace("requests = []", 'requests = ["train", "agree"]')
    made.policy_file.write_text(text.replace("arrays = []", 'arrays = ["*"]'))
    return made


def of(place: Server | Node, check: str) -> Finding:
    """What the doctor says of one thing; whatever is wrong must come with a remedy."""
    findings = examine(place.folder)
    assert all(f.remedy for f in findings if f.state in ("warn", "fail"))
    return worst([f for f in findings if f.check == check])


def worst(findings: list[Finding]) -> Finding:
    return max(findings, key=lambda f: ["skip", "ok", "warn", "fail"].index(f.state))


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_what_is_sound_is_called_sound(server: Server, node: Node, answer: type[Answer]) -> None:
    findings = examine(node.folder)
    assert is_healthy(findings), findings
    assert {f.check for f in findings if f.state == "ok"} >= {
        *("python", "packages", "folder", "private key", "key pair", "authority", "policy", "data"),
        *("server", "versions", "clock", "admitted", "disk", "memory", "gpu"),
    }
    done = CliRunner().invoke(main, ["site", "doctor", str(node.folder), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["ok"] is True


def test_two_sites_can_compare_what_they_have_by_telephone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    said = {}
    for k, (name, label) in enumerate({"recife": "normal", "natal": "normal", "odd": "columnar_normal"}.items()):
        data = write_classes(tmp_path / f"pictures of {name}", ("abnormal", label), 4, seed=k)
        agreed = [("views", 1), ("weights", "random"), ("slide", "")]
        made = create_site(
            tmp_path / name, name, f"localhost:{server.port}", server.ca, str(data), ["cytology"], sets=agreed
        )
        made.policy_file.write_text(permit_training(made.policy_file.read_text()))
        said[name] = of(made, "agree").text
    facts = {name: text.split("; ") for name, text in said.items()}
    assert said["recife"] == said["natal"]
    assert facts["odd"][0] != facts["recife"][0]  # one digest of all
    other = [a.split()[0] for a, b in zip(facts["recife"], facts["odd"], strict=True) if a != b]
    assert other == ["cytology", "classes", "8"]
    assert facts["odd"][-1] == "8 pictures: abnormal 4, columnar_normal 4"
    change(made.policy_file, '  "agree",', "")
    assert of(made, "agree").state == "warn"
    assert "'agree'" in of(made, "agree").remedy


def test_the_server_is_sound_too(server: Server) -> None:
    findings = examine(server.folder)
    assert is_healthy(findings), findings
    assert {f.check for f in findings if f.state == "ok"} >= {"certificate", "signature", "names", "port", "authority"}


def test_a_fault_ends_in_exit_code_1_and_a_remedy_on_the_screen(node: Node) -> None:
    node.key.chmod(0o644)
    done = CliRunner().invoke(main, ["site", "doctor", str(node.folder)])
    assert done.exit_code == 1
    assert f"-> chmod 600 {node.key}" in done.output


def test_python_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert next(doctor.check_packages()).state == "fail"
    monkeypatch.setattr(doctor, "versions", lambda: versions() | {"torch": ""})
    assert "torch not installed" in worst(list(doctor.check_packages())[1:]).text
    monkeypatch.setattr(doctor, "versions", lambda: versions() | {"flwr": "1.30.0"})
    assert "flwr 1.30.0 is not a version" in worst(list(doctor.check_packages())[1:]).text


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert worst(examine(tmp_path)).check == "folder"


def test_keys(server: Server, node: Node, tmp_path: Path) -> None:
    node.key.chmod(0o640)
    assert "mode 640" in of(node, "private key").text
    node.key.chmod(0o600)
    other = create_site(tmp_path / "other", "recife", node.superlink)
    node.public_key.write_bytes(other.public_key.read_bytes())
    assert of(node, "key pair").state == "fail"
    node.key.unlink()
    assert "is missing" in of(node, "private key").text
    server.ca_key.unlink()  # may be kept elsewhere
    assert of(server, "private key").state == "ok"


def test_the_authority(node: Node, tmp_path: Path) -> None:
    node.ca.unlink()
    assert "is missing" in of(node, "authority").text
    node.ca.write_text("garbage")
    assert "holds no certificate" in of(node, "authority").text
    for days, state in ((0, "fail"), (10, "warn"), (100, "ok")):
        node.ca.unlink()
        create_authority(node.ca, tmp_path / f"{days}.key", "x", days)
        assert of(node, "authority").state == state


def test_the_servers_certificate(server: Server, tmp_path: Path) -> None:
    renew(server.folder, days=20)
    assert (of(server, "certificate").state, of(server, "signature").state) == ("warn", "ok")
    renew(server.folder, days=0)
    assert "ended" in of(server, "certificate").text
    renew(server.folder)
    change(server.folder / "site.toml", '"fed.example.org"', '"other.example.org"')
    assert of(server, "names").text == "the certificate is not for other.example.org"
    renew(server.folder, ["localhost"])
    assert of(server, "names").state == "warn"
    other = create_server(tmp_path / "other", ["localhost"])
    server.certificate.write_bytes(other.certificate.read_bytes())
    assert "not signed by ca.crt" in of(server, "signature").text
    server.certificate.unlink()
    create_server_certificate(server.certificate, tmp_path / "new.key", server.ca, server.ca_key, ["localhost"])
    assert "belongs to another key" in of(server, "signature").text
    server.certificate.write_text("garbage")
    assert of(server, "certificate").state == "fail"


def test_a_port_that_is_taken(server: Server, answer: type[Answer]) -> None:
    assert "Address already in use" in of(server, "port").text


def test_policy_and_data(node: Node, tmp_path: Path) -> None:
    change(node.policy_file, str(tmp_path / "data"), str(tmp_path / "gone"))
    assert "is not there" in of(node, "data").text
    (tmp_path / "gone").mkdir()
    assert "is empty" in of(node, "data").text
    change(node.policy_file, 'arrays = ["*"]', "arrays = []")
    assert of(node, "policy").state == "warn"
    change(node.policy_file, "sha256:", "sha256:0")
    assert "other content than allowed: quickstart" in of(node, "policy").text
    node.policy_file.write_text("recipes = 1")
    assert of(node, "policy").state == "fail"
    node.policy_file.write_text(policy_template())
    assert of(node, "data").state == "skip"


def test_a_server_that_cannot_be_reached(node: Node) -> None:
    assert "no server listens" in of(node, "server").text
    change(node.folder / "site.toml", "localhost:", "nowhere.invalid:")
    assert "not known to the name service" in of(node, "server").text


def test_a_server_that_is_not_who_it_should_be(
    server: Server, node: Node, answer: type[Answer], tmp_path: Path
) -> None:
    answer.status = 404
    assert "answers 404" in of(node, "server").text
    answer.status = 200
    renew(server.folder, days=0)
    assert of(node, "server").text == "the server's certificate has ended"
    renew(server.folder)
    change(node.folder / "site.toml", "localhost:", "127.0.0.2:")
    assert of(node, "server").text == "the server's certificate is not for 127.0.0.2"
    change(node.folder / "site.toml", "127.0.0.2:", "localhost:")
    node.ca.unlink()
    create_authority(node.ca, tmp_path / "other.key", "another")
    assert of(node, "server").text == "the server's certificate is signed by another authority"


def test_a_server_without_tls(node: Node, server: Server) -> None:
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", server.port), Answer)
    thread = threading.Thread(target=plain.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        assert "does not speak TLS" in of(node, "server").text
    finally:
        plain.shutdown()
        thread.join(60)
        plain.server_close()


def test_what_the_server_tells(node: Node, answer: type[Answer]) -> None:
    answer.facts = {"versions": versions() | {"torch": "1.0"}, "admitted": False}
    assert (of(node, "versions").state, of(node, "admitted").state) == ("warn", "fail")
    answer.facts = {"versions": versions() | {"mutirao": "9.9"}, "behind": 30}
    assert of(node, "versions").text == f"mutirao {versions()['mutirao']} here, 9.9 there"
    assert of(node, "versions").remedy == "pip install mutirao==9.9"
    assert (of(node, "versions").state, of(node, "clock").state) == ("fail", "fail")


@pytest.mark.parametrize(
    ("ahead", "state"), [(0.1, "ok"), (3, "warn"), (6, "fail"), (-20, "ok"), (-100, "warn"), (-301, "fail")]
)
def test_clocks(ahead: float, state: str) -> None:
    assert doctor.check_clock(ahead).state == state


def test_disk_memory_and_graphics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [doctor.check_disk(tmp_path, lambda _, n=n: n * GIGABYTE).state for n in (0, 3, 9)] == [
        "fail",
        "warn",
        "ok",
    ]  # type: ignore[misc]
    assert [doctor.check_memory(n * GIGABYTE).state for n in (0.1, 1, 8)] == ["fail", "warn", "ok"]
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    assert doctor.check_gpu().state == "warn"
