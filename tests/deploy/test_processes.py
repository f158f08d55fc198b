"""A real SuperLink and real SuperNodes over loopback: who gets in, who does not, and what is left when they end."""

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy import processes
from mutirao.deploy.doctor import examine
from mutirao.deploy.keys import create_authority, read_secret
from mutirao.deploy.layout import Node, Server, free_port, load_place
from mutirao.deploy.processes import (
    Process,
    is_connected,
    processes_of,
    running,
    start_superlink,
    start_supernode,
    wait_until,
    why_not_admitted,
)
from mutirao.deploy.provisioning import create_server, create_site, renew, store_key
from mutirao.deploy.server.access_control import AccessControl
from mutirao.deploy.server.control_calls import admit, is_admitted, is_entitled, node_id_of, server_info
from mutirao.deploy.server.flwr_command import send_secret
from mutirao.errors import ConfigError, MutiraoError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = create_server(
        tmp_path_factory.mktemp("a federation") / "server", ["localhost"], free_port(), host="127.0.0.1"
    )
    process = start_superlink(made.folder)
    try:
        yield made
    finally:
        process.stop()
        assert processes_of(made.folder) == []
        assert not listens(made.port)


@pytest.fixture
def recife(server: Server, tmp_path: Path) -> Iterator[Node]:
    made = create_site(tmp_path / "recife 1", "recife", f"localhost:{server.port}", server.ca)
    yield made
    processes.stop(made.folder)
    assert processes_of(made.folder) == []
    for kept in server.sites.iterdir():
        kept.unlink()


def listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(2)
        return s.connect_ex(("127.0.0.1", port)) == 0


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=str(server.ca))
    line = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
    with contextlib.closing(line):
        line.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        reply = line.getresponse()
        return reply.status, reply.read()


def mutirao(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.output


@pytest.mark.slow
def test_an_unknown_key_a_wrong_authority_and_plain_http_are_refused(server: Server, tmp_path: Path) -> None:
    address = f"localhost:{server.port}"
    nodes = {name: create_site(tmp_path / name, name, address, server.ca) for name in ("unknown", "wrong", "plain")}
    nodes["wrong"].ca.unlink()
    create_authority(nodes["wrong"].ca, tmp_path / "wrong.key", "another")
    store_key(server.folder, nodes["wrong"].public_key)  # these two are known: it is not their key that stops them
    store_key(server.folder, nodes["plain"].public_key)
    for name in ("wrong", "plain"):
        admit(server.folder, server.sites / f"{name}.pub")
    plain = processes.supernode_command(nodes["plain"])
    for option in ("--root-certificates", "--auth-supernode-private-key"):  # a key without TLS it refuses by itself
        at = plain.index(option)
        plain = [*plain[:at], *plain[at + 2 :]]
    plain.append("--insecure")
    started = [start_supernode(nodes[name].folder) for name in ("unknown", "wrong")]
    started.append(processes.launch(nodes["plain"], plain, processes.environment(nodes["plain"])))
    unknown, wrong, insecure = started
    try:
        assert wait_until(lambda: bool(why_not_admitted(unknown)), 60), unknown.text()
        assert wait_until(lambda: bool(why_not_admitted(wrong)), 60), wrong.text()
        assert "CERTIFICATE_VERIFY_FAILED" in wrong.text()
        assert wrong.alive()  # it goes on trying: the server may mend it
        assert wait_until(lambda: not insecure.alive() or "retrying" in insecure.text(), 60)
        assert "insecure channel" in insecure.text()
        assert not any(is_connected(process) for process in started)
        log = (server.logs / "superlink.log").read_text()
        assert log.count("Activated node_id") == 0
    finally:
        processes.stop_all(started)
    assert [processes_of(node.folder) for node in nodes.values()] == [[], [], []]
    for name in ("wrong", "plain"):
        (server.sites / f"{name}.pub").unlink()


def test_a_raw_request_that_is_not_encrypted_gets_no_answer(server: Server) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as line:
        line.request("GET", "/health")
        with pytest.raises((OSError, http.client.HTTPException)):
            line.getresponse()


def test_who_does_not_have_the_secret_reaches_nothing_but_the_sites_part(server: Server) -> None:
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert ask(server, path, "POST")[0] == 403
        assert ask(server, f"/v1/fleet/..{path}", "POST")[0] == 403
        assert ask(server, f"/v1/fleet/%2e%2e{path}", "POST")[0] == 403
        assert ask(server, f"/{path}", "POST")[0] == 403
        assert ask(server, path, "POST", x_mutirao_secret="0" * 64)[0] == 403
    assert ask(server, "/docs", x_mutirao_secret=read_secret(server.secret))[0] == 200
    assert ask(server, "/health")[0] == 200
    assert ask(server, "/v1/fleet/pull-messages", "POST")[0] in (400, 401, 415, 422)
    for path in ("register-node", "unregister-node", "register-node/", "push-messages%3f", "anything"):
        assert ask(server, f"/v1/fleet/{path}", "POST")[0] in (401, 403, 415)
    status, body = ask(server, "/mutirao", x_mutirao_key="?")
    assert (status, json.loads(body)["admitted"], "node" in json.loads(body)) == (200, False, False)


@pytest.mark.slow
def test_flower_commands_of_the_folder_have_the_secret_and_those_of_the_system_do_not(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "flwr.py").write_text("raise SystemExit('a module of the working folder was imported')")
    for command, env, works in (
        (server.commands / "flwr", {}, True),
        (processes.PYTHON_BIN / "flwr", {"FLWR_HOME": str(server.flower_home)}, False),
    ):
        env |= {"PATH": os.defpath, "HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
        words = [command, "list", "here", "--format", "json"]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
        assert (done.returncode == 0 and json.loads(done.stdout)["success"]) is works, done.stdout + done.stderr


def test_the_secret_is_sent_to_its_own_server_over_tls_and_to_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.protobuf.client import ProtobufClient

    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)  # to be put back
    send_secret(server, "s" * 64)
    for address, sent in ((f"https://{server.here}", True), (f"http://{server.here}", False), ("https://a.org", False)):
        with ProtobufClient(address) as client:
            assert (client._client.headers.get("x-mutirao-secret") == "s" * 64) is sent


def test_a_secret_that_changed_under_a_running_server_is_said(server: Server, recife: Node) -> None:
    kept, secret = store_key(server.folder, recife.public_key), server.secret.read_text()
    server.secret.write_text("0" * 64)
    try:
        code, text = mutirao("site", "admit", server.folder, kept)
        assert (code, "was started with a secret other than" in text, "Traceback" in text) == (1, True, False)
        server.secret.unlink()
        code, text = mutirao("site", "admit", server.folder, kept)
        assert (code, "'mutirao site up' makes it" in text, "Traceback" in text) == (2, True, False)
    finally:
        server.secret.touch(mode=0o600)
        server.secret.write_text(secret)


def test_the_door_refuses_websockets_without_the_secret() -> None:
    sent: list[str] = []

    async def send(message: object) -> None:
        sent.append(message["type"])  # type: ignore[index]

    async def nothing(*_: object) -> None:
        sent.append("passed on")

    scope = {"type": "websocket", "path": "/v1/fleet/x", "headers": [(b"x-mutirao-secret", b"1")]}
    with contextlib.suppress(StopIteration):
        AccessControl(nothing, "0" * 64, lambda key: None)(scope, nothing, send).send(None)  # type: ignore[arg-type]
    assert sent == ["websocket.close"]


def test_a_site_is_admitted_connects_and_leaves_nothing_behind(server: Server, recife: Node) -> None:
    assert mutirao("site", "status", recife.folder)[0] == 1
    code, text = mutirao("site", "admit", server.folder, recife.public_key)
    assert (code, text.split(";")[0]) == (0, "admitted: recife, who is recife in recipes")
    assert server_info(server.here, server.ca, direct=True).get("admitted") is None
    code, text = mutirao("site", "up", recife.folder)
    assert code == 0, text
    first = running(recife.folder)
    assert first is not None
    assert wait_until(lambda: is_connected(first), 60), first.text()
    code, text = mutirao("site", "up", recife.folder)
    assert (code, "runs already" in text) == (2, True)
    code, text = mutirao("site", "status", recife.folder, "--json")
    told = json.loads(text)
    assert (code, told["works"], told["name"]) == (0, True, "recife")
    assert first.pid == told["pid"]
    there = json.loads(mutirao("site", "status", server.folder, "--json")[1])["sites"]
    assert [(site["name"], site["connected"], site["since"][:2]) for site in there] == [("recife", True, "20")]
    environment = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
    for wanted in ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", f"FLWR_HOME={recife.flower_home}"):
        assert wanted.encode() in environment
    assert next(e for e in environment if e.startswith(b"PATH=")).startswith(f"PATH={recife.folder}/bin:".encode())
    first.kill()
    assert running(recife.folder) is None
    second = start_supernode(recife.folder)  # what the killed one left is swept away first
    # The server takes the killed one for alive for a while; meanwhile the second one waits.
    assert wait_until(lambda: is_connected(second) or bool(why_not_admitted(second)), 60), second.text()
    assert wait_until(lambda: len(processes_of(recife.folder)) > 1, 60)  # its own helper process carries the mark, too
    family = processes_of(recife.folder)
    assert second.pid in [pid for pid, _ in family]
    assert sorted(path.name for path in recife.logs.iterdir()) == ["supernode.1.log", "supernode.log"]
    assert mutirao("site", "down", recife.folder) == (0, "the supernode has ended\n")
    assert [processes.start_id(pid) for pid, _ in family] == [""] * len(family)
    assert mutirao("site", "down", recife.folder) == (0, "the supernode did not run\n")


def test_the_doctor_of_a_server_sees_its_sites_and_a_site_can_be_shut_out(server: Server, recife: Node) -> None:
    kept = store_key(server.folder, recife.public_key, "newcomer")
    sites = next(f for f in examine(server.folder) if f.check == "sites")
    assert (sites.state, sites.text) == ("fail", "not admitted: newcomer")
    admit(server.folder, kept)
    findings = {f.check: f.state for f in [*examine(server.folder), *examine(recife.folder)]}
    assert (findings["sites"], findings["port"], findings["admitted"], findings["clock"]) == ("ok",) * 4
    node = node_id_of(server, recife.public_key)
    assert node is not None
    assert is_entitled(server.folder, "recife", node)  # as its key says, and nothing else
    assert not is_entitled(server.folder, "natal", node)
    assert not is_entitled(server.folder, "recife", node + 1)
    assert mutirao("site", "dismiss", server.folder, "newcomer")[0] == 0
    assert not is_entitled(server.folder, "recife", node)
    assert not is_admitted(server, recife.public_key)
    assert not kept.exists()
    assert mutirao("site", "dismiss", server.folder, "newcomer")[0] == 2


def test_a_process_that_has_our_number_but_is_not_ours_is_left_alone(recife: Node) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        processes.write_process_record(recife, other.pid, recife.logs / "supernode.log")
        assert running(recife.folder) is not None
        record = recife.folder / processes.RECORD
        record.write_text(record.read_text().replace(processes.start_id(other.pid), "another time"))
        assert running(recife.folder) is None
        assert processes.stop(recife.folder) is False
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(60)


@pytest.mark.slow
def test_one_that_does_not_listen_to_reason_is_made_to_end(recife: Node) -> None:
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(60)"
    process = processes.launch(recife, [sys.executable, "-c", stubborn], processes.environment(recife))
    assert wait_until(lambda: len(processes_of(recife.folder)) == 2, 20)
    process.stop(seconds=0.2)
    assert not process.alive()
    assert processes_of(recife.folder) == []


def test_only_the_last_logs_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for number in range(6):
        processes.rotate_logs(log, keep=3)
        log.write_text(str(number))
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"x.log": "5", "x.1.log": "4", "x.2.log": "3", "x.3.log": "2"}


def test_an_older_folder_gets_a_secret_and_one_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    made = create_server(tmp_path / "server", ["localhost"], free_port(), host="127.0.0.1")
    made.secret.unlink()
    assert next(f.state for f in examine(made.folder) if f.check == "secret") == "warn"
    processes.write_commands(made)
    first = read_secret(made.secret)
    processes.write_commands(made)
    assert (read_secret(made.secret), made.secret.stat().st_mode & 0o777) == (first, 0o600)
    assert next(f.state for f in examine(made.folder) if f.check == "secret") == "ok"
    made.secret.chmod(0o644)
    code, text = mutirao("site", "up", made.folder)
    assert (code, "can be read by others (mode 644)" in text, "Traceback" in text) == (2, True, False)
    found = next(f for f in examine(made.folder) if f.check == "secret")
    assert (found.state, "rm " in found.remedy) == ("fail", True)


def test_a_site_whose_server_is_gone_is_not_connected(tmp_path: Path) -> None:
    made = create_server(tmp_path / "server", ["localhost"], free_port(), host="127.0.0.1")
    node = create_site(tmp_path / "recife", "recife", f"localhost:{made.port}", made.ca)
    idle = [sys.executable, "-c", "import time; print('SuperNode ID: 7', flush=True); time.sleep(60)"]
    process = processes.launch(node, idle, processes.environment(node))
    try:
        assert wait_until(lambda: is_connected(process), 20)
        code, text = mutirao("site", "status", node.folder)
        assert (code, f"is not connected: no server listens at localhost:{made.port}" in text) == (1, True)
        with process.log.open("a") as log:  # what Flower says then, and when it has the server back
            log.write("WARNING : Connection attempt failed, retrying in 1.00 seconds\n")
            log.flush()
            assert not is_connected(process)
            log.write("INFO : Connection successful after 3.1 seconds and 3 tries.\n")
        assert is_connected(process)
    finally:
        process.stop()


def test_a_server_whose_certificate_has_expired_is_not_started(tmp_path: Path) -> None:
    made = create_server(tmp_path / "server", ["localhost"], free_port(), host="127.0.0.1")
    renew(made.folder, days=0)
    for words in (["up", made.folder], ["up", made.folder, "--foreground"]):
        code, text = mutirao("site", *words)
        assert (code, text.count("\n"), "Traceback" in text) == (1, 1, False)
        assert text.endswith(f"UTC; renew it with: mutirao site renew {made.folder}\n")
    assert running(made.folder) is None


def test_a_superlink_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        made = create_server(tmp_path / "server", ["localhost"], taken.getsockname()[1], host="127.0.0.1")
        code, text = mutirao("site", "up", made.folder)
    assert code == 1
    assert "Address already in use" in text
    assert processes_of(made.folder) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('role = "boss"', 'role is "server" or "site"'),
        ('role = "server"\nname = "a"\nprot = 9092', "unknown key 'prot'; did you mean 'port'"),
        ('role = "server"\nname = "a"\nport = 99999', "too large"),
        ('role = "server"\nname = "a"\nhosts = "fed"', "not a list of texts"),
        ('role = "site"\nname = "a"\nsuperlink = "fed"', "is no address"),
        ('role = "site"\nsuperlink = "fed:1"', "name is missing"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "site.toml").write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        load_place(tmp_path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signals_go_to_the_process_that_was_meant(recife: Node) -> None:
    process = processes.launch(
        recife, [sys.executable, "-c", "import time; time.sleep(60)"], processes.environment(recife)
    )
    someone = Process(process.what, process.folder, os.getpid(), "another time", process.log)
    someone.signal(signal.SIGTERM)  # would end this very test run
    assert not someone.alive()
    process.kill()
    assert not process.alive()


def test_commands_of_an_earlier_version_are_named_and_up_rewrites_them(tmp_path: Path) -> None:
    server = create_server(tmp_path / "server", ["localhost"])
    node = create_site(tmp_path / "site", "recife", "localhost:9092", server.ca)
    for place, name, old in (
        (server, "flwr", "-m mutirao.deploy.insider"),
        (node, "flwr-clientapp", "/old/mutirao/deploy/caller.py"),
    ):
        command = place.folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec python {old} "$@"\n')
        assert not processes.has_current_commands(place)
    with pytest.raises(MutiraoError, match=r"bin is of another version of mutirao; start it again: mutirao site down"):
        processes.run_flwr(server, "list")
    processes.write_commands(server)  # as `site up` does
    processes.environment(node)
    assert processes.has_current_commands(server)
    assert processes.has_current_commands(node)
