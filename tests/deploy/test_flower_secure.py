"""Secure aggregation over a real SuperLink: processes are killed between any two stages, and all bytes are searched."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_flower_deployed_policy import Tap
from test_flower_deployment import EXAMPLE, Deployment, free_port

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Reply, Request, Wrapper
from mutirao.deploy.flower.ray_simulation import Simulation
from mutirao.deploy.policy.pins import content_hash, sources
from mutirao.deploy.site.clientapp import write_clientapp
from mutirao.experiments.task import find
from mutirao.privacy.secure_aggregation.settings import MASKED, SHARES, UNMASK
from mutirao.runs.execute import execute
from mutirao.runs.verify import verify_all
from mutirao.simulation.local_fleet import LocalFleet

SITES = ("c0", "c1", "c2", "c3")
LOST = "c3"  # whose SuperNode is killed in round 3, after it has shared its secrets
SETTINGS: dict[str, Any] = {"rounds": 3, "clients": 4, "per_round": 4, "hidden": 16, "epochs": 1, "min_replies": 3}
# The server waits before a stage as long as there is a file of its name.
GATES = """
import time
from pathlib import Path

from mutirao.deploy.flower import FlowerFleet, server_app

ask = FlowerFleet.ask


def ask_at_gate(self, requests):
    one = next(iter(requests.values()))
    gate = Path({gates!r}) / f"{{one.config['round']}} {{one.do}}"
    if gate.exists():
        gate.with_name(gate.name + " reached").touch()
        while gate.exists():
            time.sleep(0.05)
    self.timeout = 15.0 if gate.name == "3 secagg.masked" else 90.0  # then somebody is gone for good
    return ask(self, requests)


FlowerFleet.ask = ask_at_gate
app = server_app()
"""
POLICY = """
[recipes]
quickstart = "{hash}"
[settings]
secure = "secagg+"
[asked]
requests = ["train", "agree"]
min_samples = 1
[reply]
arrays = ["*"]
metrics = ["*"]
"""


class Federation(Deployment):
    """A SuperLink with its database on disk, and four sites with policies behind taps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gates, self.database, self.out = folder / "gates", folder / "superlink.db", folder / "run"
        self.gates.mkdir()
        self.taps: dict[str, Tap] = {}
        self.pids: dict[str, int] = {}
        self.heap = bytearray()  # what the SuperLink had on its disk whenever somebody waited at a gate
        sources.cache_clear()  # the nodes hash what is installed now
        own = write_clientapp(folder / "bin")
        self.env["PATH"] = f"{own.parent}{os.pathsep}{self.env['PATH']}"
        self.app = folder / "app"
        shutil.copytree(EXAMPLE, self.app)
        (self.app / "flower_quickstart" / "server_app.py").write_text(GATES.format(gates=str(self.gates)))

    def gather(self) -> None:
        link = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        self.start("superlink", *link, "--database", str(self.database))
        self.until(self.healthy, 40, "a healthy SuperLink")
        for name in SITES:
            self.taps[name], folder = Tap(self.port), self.folder / name
            folder.mkdir()
            (folder / "policy.toml").write_text(POLICY.format(hash=content_hash("quickstart")))
            self.start(
                name,
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.taps[name].port}"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--node-config", f'name="{name}" policy="{folder / "policy.toml"}"'),
            )
            self.pids[name] = self.started[-1].pid

    def begin(self, resume: bool) -> None:
        words = " ".join(f"{k}={v}" for k, v in SETTINGS.items() if k not in ("rounds", "clients", "per_round"))
        config = f'out="{self.out}" rounds=3 clients=4 per_round=4 timeout=90.0 resume={str(resume).lower()}'
        self.submit(self.app, f'{config} set="{words} secure=secagg+"')

    def wait_at(self, number: int, stage: str) -> Path:
        """Until the server stands before a stage; its gate, which lets it go on when it is removed."""
        gate = self.gates / f"{number} {stage}"
        self.until(gate.with_name(gate.name + " reached").exists, 150, f"{stage} of round {number}")
        gate.with_name(gate.name + " reached").unlink()
        for file in self.folder.glob("superlink.db*"):
            self.heap += file.read_bytes()
        return gate

    def kill(self, *words: str) -> int:
        """SIGKILL of every process of this deployment with these words in its command; how many they were."""
        found = self.find(*words)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def kill_clients_of(self, site: str) -> int:
        """SIGKILL of what works for a site besides its SuperNode: its herald and its worker."""
        (executor,) = self.find("flower-superexec", str(self.pids[site]))
        return self.kill("mutirao.deploy", str(executor))

    def find(self, *words: str) -> list[int]:
        """The processes of this deployment with these words in their command."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if all(any(word in part for part in command) for word in words):
                    found.append(pid)
        return found


class Reference(Wrapper):
    """The same run in this process: the lost site goes silent in round 3, when it is asked for its masked update."""

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        silent = {c for c, r in requests.items() if c == LOST and (r.config["round"], r.do) == (3, MASKED)}
        answers = self.fleet.ask({c: r for c, r in requests.items() if c not in silent})
        return Answers(answers.replies, answers.failures | dict.fromkeys(silent, Failure("late", "no answer in time")))


def reference(out: Path) -> tuple[dict[str, Any], list[tuple[Arrays, Reply]]]:
    """The summary of the reference, and every plain update that was made in it with the model it is of."""
    config = resolve(find("quickstart").config, SETTINGS | {"secure": "secagg+"})
    task, own = find("quickstart").prepare(config), list[tuple[Arrays, Reply]]()

    def noted(request: Request, site: Any) -> Reply:
        reply: Reply = task.handler(request, site)
        own.append((request.arrays, reply))
        return reply

    fleet = Reference(LocalFleet(task.secure.at_client(noted), task.population))
    return execute("quickstart", config, out, fleet=fleet), own


def piece_of(array: Any, begin: int) -> bytes:
    """Four numbers of an array, from one on, as they would travel."""
    return bytes(np.ravel(array)[begin : begin + 4].tobytes())


@pytest.mark.slow
def test_in_flowers_simulation_a_client_lost_after_it_shared_its_secrets_costs_only_itself(tmp_path: Path) -> None:
    config = resolve(find("quickstart").config, SETTINGS | {"secure": "secagg+"})
    with contextlib.closing(Simulation("quickstart", config)) as fleet:
        there = execute("quickstart", config, tmp_path / "there", fleet=Reference(fleet))
    here, _ = reference(tmp_path / "here")
    assert there["digest"] == here["digest"]
    assert (tmp_path / "there" / "clients.csv").read_text() == (tmp_path / "here" / "clients.csv").read_text()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    try:
        made.gather()
        yield made
    finally:
        made.end()
        for tap in made.taps.values():
            tap.listener.close()


@pytest.mark.slow
def test_kills_between_any_two_stages_leave_the_sum_of_the_survivors_and_nothing_of_one_site(
    federation: Federation,
) -> None:
    stops = [(1, SHARES), (1, MASKED), (1, UNMASK), (2, UNMASK), (3, MASKED)]
    for number, stage in stops:
        (federation.gates / f"{number} {stage}").touch()
    federation.begin(resume=False)
    for number, stage in stops[:3]:  # all client processes of a site: its secrets are on its disk
        gate = federation.wait_at(number, stage)
        assert federation.kill_clients_of("c1") > 0
        gate.unlink()
    gate = federation.wait_at(*stops[3])
    assert federation.kill("flwr-serverapp") > 0  # the server, with all masked updates in its hands
    gate.unlink()
    federation.begin(resume=True)
    gate = federation.wait_at(*stops[4])
    os.killpg(federation.pids[LOST], signal.SIGKILL)  # a whole site, for good
    gate.unlink()
    federation.until((federation.out / "summary.json").exists, 120, "the end of the run")

    here, own = reference(federation.folder / "reference")
    there = json.loads((federation.out / "summary.json").read_text())
    assert (there["digest"], there["rounds"]) == (here["digest"], 3)
    trails = [federation.folder / name / "audit.jsonl" for name in SITES if name != LOST]
    assert verify_all(federation.out, trails)[1] == []
    assert {p.parents[2].name for p in federation.folder.rglob("now.safetensors")} <= {LOST}

    heap = bytes(federation.heap) + b"".join(bytes(tap.heard) for tap in federation.taps.values())
    heap += b"".join(file.read_bytes() for file in federation.out.rglob("*") if file.is_file())
    assert len(own) == 11
    assert piece_of(own[0][0]["2.weight"], 0) in bytes(federation.heap)  # a search finds the model that was sent down
    for current, reply in own:
        for name, theirs in reply.arrays.items():
            update = theirs - current[name]
            begin = int(np.flatnonzero([np.all(update.flat[i : i + 4]) for i in range(update.size - 3)])[0])
            for form in (theirs, update, theirs.astype(np.float64) - current[name]):
                assert piece_of(form, begin) not in heap, name
        assert repr(reply.metrics["loss"]).encode() not in heap
