"""The example app on a real SuperLink with three SuperNodes, also a slow one; a recipe in Flower's simulation."""

import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mutirao.config import resolve
from mutirao.experiments.task import find
from mutirao.report import execute

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-quickstart"
COMMANDS = Path(sys.executable).parent
SETTINGS = {"rounds": 2, "clients": 3, "per_round": 3, "hidden": 16, "epochs": 1}
SLOW = '''
"""The quickstart with one client that is not done with its first work before two rounds are made."""
import time
from dataclasses import replace
from pathlib import Path

from mutirao.systems import quickstart
from mutirao.experiments.task import Recipe


class Slow:
    def __init__(self, handler):
        self.handler = handler

    def __getattr__(self, name):
        if name == "handler":
            raise AttributeError(name)  # while it is made
        return getattr(self.handler, name)

    def __call__(self, request, site):
        if site.id == "c2" and request.do == "train":
            end = time.monotonic() + 400
            while not Path("STATE").exists() and time.monotonic() < end:
                time.sleep(0.1)
        return self.handler(request, site)


def task(config):
    made = quickstart.task(config)
    return replace(made, handler=Slow(made.handler))


recipe = Recipe(quickstart.Config, task)
'''


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Deployment:
    """A SuperLink and SuperNodes on loopback, with a Flower home of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.port = folder, folder / "flwr-home", free_port()
        self.home.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.env = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}",
        }
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def start(self, log: str, *command: str, **env: str) -> None:
        with (self.folder / f"{log}.log").open("wb") as out:
            self.started.append(
                subprocess.Popen(
                    [str(COMMANDS / command[0]), *command[1:]],
                    env=self.env | env,
                    cwd=self.folder,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def healthy(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
        return False

    def until(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something; if it does not happen, on a busy machine either, fail with what all processes said."""
        seconds *= 3
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                logs = [f"=== {log.stem}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log"))]
                pytest.fail("\n".join([f"{what} did not come within {seconds:g} s", *logs]))
            time.sleep(0.2)

    def submit(self, app: Path, config: str) -> None:
        """Hand an app over with `flwr run`."""
        self.flwr("run", str(app), "--run-config", config)

    def flwr(self, *words: str) -> None:
        """A command of Flower's that must succeed."""
        command = [COMMANDS / "flwr", *words]
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self, **env: str) -> list[int]:
        """All processes that live in this deployment's Flower home, whoever started them, and have this environment."""
        marks, found = {f"{k}={v}".encode() for k, v in {"FLWR_HOME": str(self.home), **env}.items()}, []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it may end while we look
                if folder.name.isdecimal() and marks <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self.kill()
        for process in self.started:
            process.wait(10)

    def kill(self, **env: str) -> None:
        """SIGKILL to all processes, or to those with this environment."""
        for pid in self.processes(**env):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        made.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(made.port))
        made.until(made.healthy, 40, "a healthy SuperLink")
        for name in ("c0", "c1", "c2"):
            made.start(
                name,
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{made.port}"),
                *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f'name="{name}"'),
            )
        yield made
    finally:
        made.end()


def local_run(out: Path) -> dict[str, Any]:
    return execute("quickstart", resolve(find("quickstart").config, SETTINGS), out)


def without_seconds(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as lines:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(lines)]


def assert_same_run(here: Path, there: Path) -> None:
    for table in ("history.csv", "clients.csv"):
        assert without_seconds(here / table) == without_seconds(there / table)
    digests = [json.loads((folder / "summary.json").read_text())["digest"] for folder in (here, there)]
    assert digests[0] == digests[1]
    assert (here / "config.toml").read_text() == (there / "config.toml").read_text()


@pytest.mark.slow
def test_rounds_go_on_without_a_slow_site_whose_answer_counts_later(deployment: Deployment) -> None:
    app, out = deployment.folder / "app", deployment.folder / "slow"
    shutil.copytree(EXAMPLE, app)
    second = out / "checkpoints" / "state_002.safetensors"  # there when the second round is made
    (app / "flower_quickstart" / "slow.py").write_text(SLOW.replace("STATE", str(second)))
    sets = "hidden=16 epochs=1 aggregate=fedbuff aggregate.buffer=2"
    recipe = "flower_quickstart.slow:recipe"
    deployment.submit(app, f'recipe="{recipe}" out="{out}" rounds=4 per_round=3 timeout=480.0 set="{sets}"')
    deployment.until((out / "summary.json").exists, 500, "the end of the run")
    with (out / "clients.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert not any(row["failure"] or row["rejected"] for row in rows)
    by_round = {n: [r["client"] for r in rows if r["round"] == str(n)] for n in range(1, 5)}
    assert all(len(names) == 2 for names in by_round.values())  # two fill the buffer
    assert by_round[1] == by_round[2] == ["c0", "c1"]
    late = [row for row in rows if row["client"] == "c2"]
    assert late  # it was given the first model of all, and came when there were two more
    assert float(late[0]["staleness"]) == int(late[0]["round"]) - 1 >= 2
    assert all(float(row["weight"]) == pytest.approx((1 + float(row["staleness"])) ** -0.5 / 2) for row in rows)
    assert json.loads((out / "summary.json").read_text())["rounds"] == 4


@pytest.mark.slow
def test_a_deployed_run_equals_the_local_one(deployment: Deployment) -> None:
    out = deployment.folder / "run"
    config = f'out="{out}" rounds=2 clients=3 per_round=3 timeout=120.0 set="hidden=16 epochs=1"'
    deployment.submit(EXAMPLE, config)
    assert local_run(deployment.folder / "local")["rounds"] == 2
    deployment.until((out / "summary.json").exists, 200, "the end of the run")
    assert_same_run(deployment.folder / "local", out)
    deployment.end()
    deployment.until(lambda: not deployment.processes(), 5, "the end of all processes")


@pytest.mark.slow
def test_a_simulated_run_equals_the_local_one_and_is_quiet(tmp_path: Path) -> None:
    sets = [text for key, value in SETTINGS.items() for text in ("--set", f"{key}={value}")]
    command = [COMMANDS / "mutirao", "run", "quickstart", *sets, "--fleet", "flower", "--out", "run", "--json"]
    for name in ("flwr", "numpy", "torch", "ray"):  # code in the working folder, which no worker may import
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert not (tmp_path / "ran").exists()
    assert json.loads(ended.stdout)["digest"] == local_run(tmp_path / "local")["digest"]
    assert_same_run(tmp_path / "local", tmp_path / "run")
