"""A policy on a real SuperNode: its connection is tapped, and the server sends an app that tries to run code there."""

import csv
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_flower_deployment import EXAMPLE, Deployment, free_port

from mutirao.deploy.clientapp import own_command
from mutirao.deploy.content import sources
from mutirao.deploy.policy import policy_template
from mutirao.runs.verify import verify_all

AGREED = [("hidden", 16), ("epochs", 1)]


class Tap:
    """A relay on loopback that keeps what a node sends."""

    def __init__(self, port: int) -> None:
        self.target, self.heard = port, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                node = self.listener.accept()[0]
                link = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # closed, here or there
                return
            threading.Thread(target=self.pass_on, args=(node, link, True), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(link, node, False), daemon=True).start()

    def pass_on(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while block := source.recv(65536):
                if keep:
                    self.heard += block
                sink.sendall(block)
        except OSError:
            pass
        for end in (source, sink):
            end.close()


@pytest.fixture
def tapped(tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, Tap]]]:
    made, taps = Deployment(tmp_path), {}
    sources.cache_clear()  # the nodes hash what is installed now
    own = own_command(tmp_path / "bin")
    made.env["PATH"] = f"{own.parent}{os.pathsep}{made.env['PATH']}"
    try:
        made.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(made.port))
        made.until(made.healthy, 40, "a healthy SuperLink")
        for name, metrics in (("c0", '["loss", "accuracy"]'), ("c1", '["loss"]')):
            taps[name], folder = Tap(made.port), tmp_path / name
            folder.mkdir()
            asked = 'requests = ["train", "probe", "agree"]'
            text = policy_template(["quickstart"], AGREED).replace("requests = []", asked)
            text = text.replace("arrays = []", 'arrays = ["*"]').replace("metrics = []", f"metrics = {metrics}")
            (folder / "policy.toml").write_text(text)
            made.start(
                name,
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{taps[name].port}"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--node-config", f'name="{name}" policy="{folder / "policy.toml"}"'),
            )
        yield made, taps
    finally:
        made.end()
        for tap in taps.values():
            tap.listener.close()


@pytest.mark.slow
def test_what_is_forbidden_is_not_in_the_connection_and_foreign_code_does_not_run(
    tapped: tuple[Deployment, dict[str, Tap]],
) -> None:
    deployment, taps = tapped
    app, ran, out = deployment.folder / "app", deployment.folder / "foreign-code-ran", deployment.folder / "run"
    shutil.copytree(EXAMPLE, app)
    client = app / "flower_quickstart" / "client_app.py"
    client.write_text(client.read_text() + f'\nopen({str(ran)!r}, "w").write("it did")\n')
    config = f'out="{out}" rounds=1 clients=2 per_round=2 timeout=120.0 set="hidden=16 epochs=1 min_replies=1"'
    deployment.submit(app, config)
    deployment.until((out / "summary.json").exists, 200, "the end of the run")
    with (out / "clients.csv").open(newline="") as lines:
        rows = {row["client"]: row for row in csv.DictReader(lines)}
    assert rows["c0"]["replied"] == "1"
    assert rows["c1"]["failure"] == "refused: reply.metrics: one of the metrics of the reply may not leave"
    assert not ran.exists()
    assert b"2.weight" in taps["c0"].heard  # the tap does hear: the arrays of the one that may
    assert b"accuracy" in taps["c0"].heard
    assert b"reply.metrics" in taps["c1"].heard
    assert b"accuracy" not in taps["c1"].heard
    assert b"2.weight" not in taps["c1"].heard
    good, problems = verify_all(out, [deployment.folder / "c0" / "audit.jsonl"])
    assert problems == []
    assert any("by the site, agree" in line for line in good)
    trail = [json.loads(line) for line in (deployment.folder / "c1" / "audit.jsonl").read_text().splitlines()]
    assert [e["event"] for e in trail] == ["asked", "sent", "asked", "refused"]
    for name, settings, rule in (
        ("known noise", "privacy=local privacy.repeatable=true", "settings.privacy.repeatable"),
        ("one sample", "select=powerofchoice select.samples=1", "asked.probe_samples"),
    ):
        heard, agreed = len(taps["c0"].heard), "hidden=16 epochs=1 min_replies=1 wait=10.0"
        place = f'out="{deployment.folder / name}" rounds=1 clients=2 per_round=1 timeout=60.0'
        deployment.submit(app, f'{place} set="{agreed} {settings}"')

        def refused(rule: str = rule, heard: int = heard) -> bool:
            return rule in rules_in(deployment.folder / "c0") and rule.encode() in taps["c0"].heard[heard:]

        deployment.until(refused, 120, rule)
        assert name == "one sample" or b"2.weight" not in taps["c0"].heard[heard:]  # who is not probed may yet train


def rules_in(site: Path) -> list[str]:
    """The rules by which a site has refused something, as its trail says."""
    events = [json.loads(line) for line in (site / "audit.jsonl").read_text().splitlines()]
    return [e["rule"] for e in events if e["event"] == "refused"]
