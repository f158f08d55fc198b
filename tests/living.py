"""A folder of real runs, a live page over it in a process of its own, and a real browser."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 180  # seconds that a loaded machine may take for anything here

SLOW = '''
"""Iris over six clients that take their time, so that there is something to watch."""
import os
import time
from dataclasses import dataclass

import numpy as np

from mutirao.config import Common, setting
from mutirao.core.fleet import Reply, Request, Site
from mutirao.experiments.task import Recipe, Task


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    clients: int = setting(6, "how many clients", low=1)
    per_round: int | float = setting(4, "clients a round", low=1e-9)
    pause: float = setting(0.0, "seconds a client takes", low=0)
    name: str = setting("c", "how clients are called")
    fails: int = setting(-1, "the client that always fails")


def task(config: Config) -> Task:
    def step(request: Request, site: Site) -> Reply:
        time.sleep(config.pause)
        if site.data == config.fails:
            raise ValueError("the disk of <b>this</b> client is full")
        w = request.arrays["w"] + 0.1 * (1 - request.arrays["w"])
        return Reply({"w": w}, metrics={"loss": float(np.mean((1 - w) ** 2))}, n=10 + site.data)

    return Task(
        handler=step,
        population={f"{config.name}{i}": i for i in range(config.clients)},
        initial=lambda: {"w": np.zeros(3)},
        evaluate=lambda arrays: {"accuracy": float(arrays["w"].mean()), "loss": float(((1 - arrays["w"]) ** 2).mean())},
    )


recipe = Recipe(Config, task)
'''


def mutirao(*words: str, cwd: Path, **more: Any) -> "subprocess.Popen[str]":
    """The command as a person starts it."""
    command = [sys.executable, "-m", "mutirao.cli", *words]
    return subprocess.Popen(command, cwd=cwd, text=True, **more)


@dataclass
class Live:
    """A live page and the folder it shows."""

    folder: Path
    address: str  # with the token
    process: "subprocess.Popen[str]"

    @property
    def base(self) -> str:
        return self.address.partition("/?token=")[0]

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def run(self, out: str, *sets: str) -> "subprocess.Popen[str]":
        words = [w for s in sets for w in ("--set", s)]
        place = self.folder.parent
        return mutirao(
            "run", "slow:recipe", "--out", f"runs/{out}", "--json", *words, cwd=place, stdout=subprocess.DEVNULL
        )


def make_run(place: Path, out: str, **settings: Any) -> None:
    """A finished run with its report, made here: a process of its own would only cost time."""
    from mutirao.config import resolve
    from mutirao.report import execute, write_report

    spec = importlib.util.spec_from_file_location("slow", place / "slow.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["slow"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    execute("slow:recipe", resolve(module.Config, settings), place / "runs" / out, pictures=False)
    write_report(place / "runs" / out)


def wait_until_shown(live: Live, *names: str) -> None:
    """The page looks at its folder a few times a second: wait until it knows these runs, or notes."""
    wait_for_list(live, lambda listed: all(f'"{name}"' in listed for name in names))


def wait_for_list(live: Live, true: Callable[[str], bool]) -> None:
    """Wait until the server's list is as it should be."""
    import httpx

    end = time.monotonic() + PATIENCE
    while True:
        listed = httpx.get(f"{live.base}/api/runs", headers={"X-Mutirao-Token": live.token}, timeout=PATIENCE).text
        if true(listed):
            return
        assert time.monotonic() < end, listed
        time.sleep(0.1)


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place = tmp_path_factory.mktemp("live")
    (place / "slow.py").write_text(SLOW)
    folder = place / "runs"
    folder.mkdir()
    page = mutirao("dash", "runs", "--no-open", cwd=place, stdout=subprocess.PIPE)
    assert page.stdout is not None
    said = page.stdout.readline()
    assert " is shown at http://127.0.0.1:" in said, said
    threading.Thread(target=page.stdout.read, daemon=True).start()
    found = Live(folder, said.split(" at ")[1].strip(), page)
    make_run(place, "alpha", rounds=12)
    make_run(place, "beta", rounds=8, fails=2, name="<img src=x onerror=alert(1)>")
    wait_until_shown(found, "alpha", "beta")
    yield found
    page.terminate()
    page.wait(PATIENCE)


def find_chromium() -> str:
    """Where Chromium is installed; "" if it is not."""
    names = (os.environ.get("MUTIRAO_BROWSER", ""), "chromium", "chromium-browser", "google-chrome")
    return next((p for n in names if n and (p := shutil.which(n))), "")


@pytest.fixture(scope="module")  # while it is open it holds this thread's event loop
def browser() -> Iterator[Any]:
    """Chromium, driven as a person would; where it must not be missing, MUTIRAO_BROWSER says so."""
    from playwright.sync_api import sync_playwright

    wanted, path = os.environ.get("MUTIRAO_BROWSER", ""), find_chromium()
    if not path and not wanted:
        pytest.skip("no Chromium is installed, and MUTIRAO_BROWSER does not ask for one")
    assert path, f"MUTIRAO_BROWSER={wanted}, but there is no such browser"
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
