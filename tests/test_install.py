"""Where `make` takes torch from: real pip and uv, and small wheels that call themselves torch."""

import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.sh"
WANTED = next(x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if x.startswith("torch=="))
VERSION = WANTED.partition("==")[2]
CUDA = "13.0"


def make_wheel(folder: Path, version: str, cuda: str | None) -> None:
    """A package that is named torch and knows which CUDA it was built for."""
    about = f"torch-{version}.dist-info"
    files = {
        "torch/__init__.py": "from torch import version\n",
        "torch/version.py": f"cuda = {cuda!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}")
    files[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@dataclass
class World:
    """A folder with an environment, and a web server with torch's index, `cpu`, and a package index, `simple`."""

    folder: Path
    pages: Path
    address: str
    asked: list[str] = field(default_factory=list)

    def install(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the script; nothing of this machine's own settings reaches it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_")) and k not in ("UV", "TORCH")}
        own = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.address}/simple",
            "UV_NO_CONFIG": "1",
            "UV": "",
            "TORCH_INDEX": f"{self.address}/cpu",
            "NO_PROXY": "127.0.0.1",
            "PYTHON": sys.executable,
        }
        command = ["bash", str(SCRIPT), *(words or ("torch",))]
        return subprocess.run(
            command, cwd=self.folder, env=kept | own | settings, capture_output=True, text=True, check=False
        )

    def torch(self) -> str:
        """The version that the environment has."""
        found = [path.name for path in self.folder.glob(".venv/lib/python*/site-packages/torch-*.dist-info")]
        assert len(found) <= 1
        return found[0].removeprefix("torch-").removesuffix(".dist-info") if found else ""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder, pages = tmp_path / "clone", tmp_path / "pages"
    folder.mkdir()
    shutil.copy(ROOT / "constraints.txt", folder)
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    packages = next(folder.glob(".venv/lib/python*/site-packages"))
    pip = importlib.metadata.distribution("pip")
    for name in {file.parts[0] for file in pip.files or () if file.parts[0].startswith("pip")}:
        (packages / name).symlink_to(Path(str(pip.locate_file(name))))
    for place in ("cpu/torch", "simple/torch"):
        (pages / place).mkdir(parents=True)
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(pages)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield World(folder, pages, f"http://127.0.0.1:{server.server_port}", asked)
    server.shutdown()
    server.server_close()


def uv() -> str:
    """The uv that tests bring."""
    return str(Path(sys.executable).parent / "uv")


@pytest.mark.parametrize("by", ["pip", "uv"])
def test_a_cpu_torch_comes_from_its_own_index_though_the_package_index_has_another(world: World, by: str) -> None:
    make_wheel(world.pages / "cpu/torch", f"{VERSION}+cpu", None)
    make_wheel(world.pages / "simple/torch", VERSION, CUDA)
    done = world.install(UV=uv() if by == "uv" else "")
    assert done.returncode == 0, done.stderr
    assert world.torch() == f"{VERSION}+cpu"
    assert f"from {world.address}/cpu" in done.stdout
    assert not any(path.startswith("/simple") for path in world.asked)
    kept = (world.folder / ".venv/constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"torch=={VERSION}+cpu" in kept
    assert WANTED not in kept


@pytest.mark.parametrize("by", ["pip", "uv"])
def test_where_that_index_is_away_pip_takes_what_lies_at_hand_and_it_is_said(world: World, by: str) -> None:
    make_wheel(world.folder / "wheels", f"{VERSION}+cpu", None)
    away = {"TORCH_INDEX": "http://127.0.0.1:9", "PIP_FIND_LINKS": str(world.folder / "wheels")}
    done = world.install(**away, UV=uv() if by == "uv" else "")
    assert done.returncode == 0, done.stderr
    assert world.torch() == f"{VERSION}+cpu"
    assert "http://127.0.0.1:9 cannot be reached" in done.stdout


def test_an_index_that_answers_but_lacks_this_torch_is_no_dead_end(world: World) -> None:
    make_wheel(world.pages / "simple/torch", VERSION, None)
    done = world.install()
    assert done.returncode == 0, done.stderr
    assert world.torch() == VERSION
    assert "pip tries its own index" in done.stdout


def test_a_torch_that_is_there_is_left_and_nobody_is_asked(world: World) -> None:
    make_wheel(world.folder / "own", "2.9.1+rocm6.4", None)
    make_wheel(world.pages / "cpu/torch", f"{VERSION}+cpu", None)
    pip = [str(world.folder / ".venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, *map(str, (world.folder / "own").iterdir())], check=True)
    done = world.install()
    assert done.returncode == 0, done.stderr
    assert world.torch() == "2.9.1+rocm6.4"
    assert "torch 2.9.1+rocm6.4 is in .venv and is left" in done.stdout
    assert world.asked == []
    assert "torch==2.9.1+rocm6.4" in (world.folder / ".venv/constraints.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_cuda_is_the_package_index_s_build_and_replaces_a_cpu_one(world: World) -> None:
    make_wheel(world.pages / "cpu/torch", f"{VERSION}+cpu", None)
    make_wheel(world.pages / "simple/torch", VERSION, CUDA)
    assert world.install().returncode == 0
    done = world.install(TORCH="cuda")
    assert done.returncode == 0, done.stderr
    assert world.torch() == VERSION
    assert f"torch {VERSION}+cpu is not a CUDA build: it is replaced" in done.stdout
    again = world.install(TORCH="cuda")
    assert f"torch {VERSION} is in .venv and is left" in again.stdout


def test_who_asks_for_cuda_and_gets_none_is_told(world: World) -> None:
    make_wheel(world.pages / "simple/torch", f"{VERSION}+cpu", None)
    done = world.install(TORCH="cuda")
    assert done.returncode == 1
    assert f"pip found torch {VERSION}+cpu, which is not a CUDA build" in done.stderr


def test_another_word_than_cpu_or_cuda_is_refused(world: World) -> None:
    done = world.install(TORCH="gpu")
    assert (done.returncode, done.stderr) == (1, "install: TORCH=gpu: it is cpu or cuda\n")


def test_what_make_installs_hangs_on_the_kind_of_torch() -> None:
    def steps(*words: str) -> str:
        make = ["make", "--dry-run", "--always-make", "run", *words]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "touch .venv/torch-cpu" in steps()
    assert "touch .venv/torch-cuda" in steps("TORCH=cuda")
    order = [steps().index(step) for step in ("install.sh torch", "install.sh core", "mutirao run quickstart")]
    assert order == sorted(order)
