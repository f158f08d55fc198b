"""Policies on real SuperNodes: their connections are tapped, one is killed between two rounds of personal models, and
the server sends an app that tries to run code there.
"""

import csv
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_flower_deployment import EXAMPLE, Deployment, assert_same_run, free_port

from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.deploy.policy.pins import sources
from mutirao.deploy.policy.policy_templates import policy_for
from mutirao.deploy.policy.rules import policy_template
from mutirao.deploy.rehearsal import local_fleet, permit_training
from mutirao.deploy.server.supervisor import finished_summary, writing_process
from mutirao.deploy.site.clientapp import write_clientapp
from mutirao.experiments.task import find
from mutirao.io import load_arrays
from mutirao.report import execute
from mutirao.runs.verify import verify_all

AGREED = [("hidden", 16), ("epochs", 1)]
PERSONAL = {"rounds": 3, "clients": 2, "per_round": 2, "hidden": 16, "epochs": 1, "min_replies": 2, "evaluate_every": 2}
PERSONAL |= {"personal": "fedper", "compress": "topk"}


class Tap:
    """A relay on loopback that keeps what a node sends, and what it is sent."""

    def __init__(self, port: int) -> None:
        self.target, self.heard, self.told = port, bytearray(), bytearray()
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
            threading.Thread(target=self.pass_on, args=(node, link, self.heard), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(link, node, self.told), daemon=True).start()

    def pass_on(self, source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        try:
            while block := source.recv(65536):
                kept += block
                sink.sendall(block)
        except OSError:
            pass
        for end in (source, sink):
            end.close()


def start_site(deployment: Deployment, name: str, tap: Tap) -> None:
    """Start a SuperNode behind its tap, with the policy in the site's folder."""
    deployment.start(
        name,
        *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{tap.port}"),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", f'name="{name}" policy="{deployment.folder / name / "policy.toml"}"'),
        SITE=name,
    )


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, dict[str, Tap]]]:
    tmp_path = tmp_path_factory.mktemp("tapped")
    made, taps = Deployment(tmp_path), dict[str, Tap]()
    sources.cache_clear()  # the nodes hash what is installed now
    own = write_clientapp(tmp_path / "bin")
    made.env["PATH"] = f"{own.parent}{os.pathsep}{made.env['PATH']}"
    try:
        made.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(made.port))
        made.until(made.healthy, 40, "a healthy SuperLink")
        for name in ("c0", "c1"):
            taps[name] = Tap(made.port)
            (tmp_path / name).mkdir()
            start_site(made, name, taps[name])
        yield made, taps
    finally:
        made.end()
        for tap in taps.values():
            tap.listener.close()


@pytest.mark.slow
def test_what_is_personal_is_on_a_sites_disk_alone_and_outlives_its_processes(
    tapped: tuple[Deployment, dict[str, Tap]],
) -> None:
    deployment, taps = tapped
    out, local, sets = deployment.folder / "personal", deployment.folder / "local", list(PERSONAL.items())
    for name in taps:
        policy = permit_training(policy_for(["quickstart"], sets))
        (deployment.folder / name / "policy.toml").write_text(policy)

    def submit(rounds: int, resume: str) -> None:
        words = " ".join(f"{k}={v}" for k, v in {**PERSONAL, "rounds": rounds}.items())
        deployment.submit(EXAMPLE, f'out="{out}" resume={resume} timeout=120.0 set="{words}"')

    def made(rounds: int) -> bool:
        return finished_summary(out, rounds) is not None and not writing_process(out)

    submit(2, "false")
    fleet = local_fleet("quickstart", sets)
    execute("quickstart", resolve(find("quickstart").config, {}, sets), local, fleet=fleet, pictures=False)
    deployment.until(lambda: made(2), 200, "the end of two rounds")
    (node,) = re.findall(r"SuperNode ID: (\d+)", (deployment.folder / "c1.log").read_text())
    deployment.kill(SITE="c1")
    deployment.flwr("supernode", "unregister", node)  # or the SuperLink takes it for alive for some 45 s
    start_site(deployment, "c1", taps["c1"])
    submit(3, "true")
    deployment.until(lambda: made(3), 200, "the third round")
    assert_same_run(local, out)  # bytes that left, too, round by round
    for name, tap in taps.items():
        (last,) = (deployment.folder / name / "states").glob("*/state_000003.safetensors")
        kept = load_arrays(last)[0]
        assert {"personal.2.weight", "personal.2.bias", "compress.0.weight"} <= kept.keys()
        assert digest(kept) == digest(fleet.states[name])
        assert b"topk@" in tap.heard  # the tap does hear: what leaves,
        assert b"0.weight" in tap.told  # and what comes
        assert b"2.weight" not in tap.heard + tap.told
    written = [load_arrays(file)[0] for file in out.rglob("*.safetensors")]
    assert written
    assert not any("2.weight" in array for arrays in written for array in arrays)


@pytest.mark.slow
def test_what_is_forbidden_is_not_in_the_connection_and_foreign_code_does_not_run(
    tapped: tuple[Deployment, dict[str, Tap]],
) -> None:
    deployment, taps = tapped
    for name, metrics in (("c0", '["loss", "accuracy"]'), ("c1", '["loss"]')):
        asked = 'requests = ["train", "probe", "agree"]'
        text = policy_template(["quickstart"], AGREED).replace("requests = []", asked)
        text = text.replace("arrays = []", 'arrays = ["*"]').replace("metrics = []", f"metrics = {metrics}")
        (deployment.folder / name / "policy.toml").write_text(text)
    before = {name: len(tap.heard) for name, tap in taps.items()}
    app, ran, out = deployment.folder / "app", deployment.folder / "foreign-code-ran", deployment.folder / "run"
    shutil.copytree(EXAMPLE, app)
    client = app / "flower_quickstart" / "client_app.py"
    client.write_text(client.read_text() + f'\nopen({str(ran)!r}, "w").write("it did")\n')
    sets = "hidden=16 epochs=1 min_replies=1 clients_every=-1"
    config = f'out="{out}" rounds=1 clients=2 per_round=2 timeout=120.0 set="{sets}"'
    deployment.submit(app, config)
    deployment.until((out / "summary.json").exists, 200, "the end of the run")
    with (out / "clients.csv").open(newline="") as lines:
        rows = {row["client"]: row for row in csv.DictReader(lines)}
    assert rows["c0"]["replied"] == "1"
    assert rows["c1"]["failure"] == "refused: reply.metrics: one of the metrics of the reply may not leave"
    assert not ran.exists()
    sent = {name: tap.heard[before[name] :] for name, tap in taps.items()}
    assert b"2.weight" in sent["c0"]  # the tap does hear: the arrays of the one that may
    assert b"accuracy" in sent["c0"]
    assert b"reply.metrics" in sent["c1"]
    assert b"accuracy" not in sent["c1"]
    assert b"2.weight" not in sent["c1"]
    good, problems = verify_all(out, [deployment.folder / "c0" / "audit.jsonl"])
    assert problems == []
    assert any("by the site, agree" in line for line in good)
    trail = [json.loads(line) for line in (deployment.folder / "c1" / "audit.jsonl").read_text().splitlines()]
    assert [e["event"] for e in trail][-4:] == ["asked", "sent", "asked", "refused"]
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
