"""A small federation to break: a server and three sites on this machine, with processes, keys and policies.

It is killed, cut off and lied to while it trains. A run must end with the digest it should have, that of a run nobody
disturbed, and leave no process and no port behind.
"""

import ctypes
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mutirao.config import resolve
from mutirao.core.fleet import Scalar
from mutirao.deploy.layout import Node, Server, free_port
from mutirao.deploy.policy.rules import load_policy
from mutirao.deploy.processes import (
    Process,
    is_connected,
    processes_of,
    running,
    start_superlink,
    start_supernode,
    stop,
    wait_until,
)
from mutirao.deploy.provisioning import create_server, store_key
from mutirao.deploy.rehearsal import create_sites, is_listening
from mutirao.deploy.server.control_calls import admit
from mutirao.deploy.server.submission import writing_process
from mutirao.deploy.server.supervisor import command_line, supervise
from mutirao.errors import MutiraoError
from mutirao.experiments.task import find
from mutirao.runs.execute import execute
from mutirao.runs.verify import verify_all

NAMES = ("c0", "c1", "c2")
TRIVIAL: dict[str, Scalar] = {
    "clients": 3,
    "per_round": 1.0,
    "min_replies": 3,  # a round with fewer is repeated: then the digest does not depend on who was away
    "hidden": 16,
    "epochs": 1,
    "wait": 240.0,
}
CLONE_NEWNET = 0x40000000
LATE = 30.0  # seconds until a client that has not answered is asked again
LONG = 900.0  # seconds after which a trial is given up


class Federation:
    """A server and three sites in one folder, each with processes, keys and a policy of its own."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ("127.0.0.1",), host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.server: Server = create_server(folder / "server", list(hosts), port=free_port(), host=host)
        made = create_sites(folder, self.server, NAMES, "quickstart", list(TRIVIAL.items()), hosts[-1])
        self.nodes: dict[str, Node] = {node.name: node for node in made}
        self.away: set[str] = set()  # sites that are not to be started again
        self.extra: dict[str, dict[str, str]] = {}  # what a site's environment has besides
        self.spaces: dict[str, str] = {}  # the network namespace a site is in

    def start(self) -> "Federation":
        """Start all, and wait until all three sites are let in."""
        self.start_link()
        for node in self.nodes.values():
            admit(self.server.folder, store_key(self.server.folder, node.public_key))
            self.start_node(node.name)
        for name in self.nodes:
            self.until_connected(name)
        return self

    def start_link(self) -> Process:
        """Start the SuperLink."""
        return start_superlink(self.server.folder)

    def start_node(self, name: str, env: dict[str, str] | None = None) -> Process:
        """Start a site's SuperNode."""
        more = self.extra.get(name, {}) | (env or {})
        return start_inside(self.spaces.get(name, ""), lambda: start_supernode(self.nodes[name].folder, more))

    def until_connected(self, name: str, seconds: float = 60.0) -> None:
        """Wait for a site to be let in."""
        process = running(self.nodes[name].folder)
        if process is None or not wait_until(lambda: is_connected(process), seconds):
            raise MutiraoError(f"{name} was not let in: {process.last_words() if process else 'it ended'}")

    def run(self, out: Path, rounds: int, meanwhile: Callable[[Path], None], **sets: Scalar) -> dict[str, Any]:
        """A run of trivial training, seen through to its end."""
        settings = TRIVIAL | {"rounds": rounds} | sets
        return supervise(self.server.folder, "quickstart", settings.items(), out, LATE, LONG, meanwhile)

    def pid(self, kind: str, out: Path, draw: random.Random) -> tuple[int, str]:
        """A process of that kind that lives now, and whose it is; 0 if there is none."""
        if kind == "server":
            return writing_process(out), "server"
        if kind == "superlink":
            return pid_of(self.server.folder), "server"
        name = draw.choice(NAMES)
        folder = self.nodes[name].folder
        if kind == "supernode":
            return pid_of(folder), name
        workers = (pid for pid, _ in processes_of(folder) if "mutirao.deploy.site.worker" in command_line(pid))
        return next(workers, 0), name

    def mend(self) -> None:
        """Start again what is not there, as a service manager does."""
        if running(self.server.folder) is None:
            self.start_link()
        for name, node in self.nodes.items():
            if name not in self.away and running(node.folder) is None:
                self.start_node(name)

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self.folders:
            stop(folder)

    @property
    def folders(self) -> list[Path]:
        """Of all parties."""
        return [*(node.folder for node in self.nodes.values()), self.server.folder]

    def judge(self, summary: dict[str, Any], digest: str, out: Path, liar: str = "") -> None:
        """The run ended as it should; ends all processes. Of a liar's trail nothing is expected."""
        assert summary["digest"] == digest
        trails = [load_policy(node.policy_file).audit for node in self.nodes.values() if node.name != liar]
        assert verify_all(out, [trail for trail in trails if trail.exists()])[1] == []
        assert self.left_over() == []

    def left_over(self) -> list[str]:
        """End everything; the processes and ports that are still there afterwards."""
        for folder in self.folders:
            stop(folder)
        left = [
            f"process {pid}: {command_line(pid)[:80]}" for folder in self.folders for pid, _ in processes_of(folder)
        ]
        return [*left, f"port {self.server.port}"] if is_listening(self.server) else left


def pid_of(folder: Path) -> int:
    """The process of a folder; 0 if none runs."""
    process = running(folder)
    return process.pid if process else 0


def expected_digest(rounds: int, **sets: Scalar) -> str:
    """The digest of the same run in one process that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        return run_locally(Path(folder) / "run", rounds, **sets)


def run_locally(out: Path, rounds: int, **sets: Scalar) -> str:
    """A run of trivial training on the local fleet, or what is left of it; its digest."""
    return str(execute("quickstart", trivial_config(rounds, **sets), out, resume=True)["digest"])


def trivial_config(rounds: int, **sets: Scalar) -> Any:
    """The configuration of trivial training."""
    settings = TRIVIAL | {"rounds": rounds, "wait": 0.0} | sets
    return resolve(find("quickstart").config, {}, list(settings.items()))


def start_inside(space: str, action: Callable[[], Process]) -> Process:
    """Start a process in a network namespace: from a thread that went there, since children go with it."""
    if not space:
        return action()

    def work() -> Process:
        with Path(f"/run/netns/{space}").open("rb") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
                pytest.skip(f"setns: {os.strerror(ctypes.get_errno())}")
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def rounds_made(out: Path) -> int:
    """How many rounds of a run are on disk."""
    states = [f.stem.removeprefix("state_") for f in (out / "checkpoints").glob("state_*.safetensors")]
    return max((int(n) for n in states if n.isdecimal()), default=0)
