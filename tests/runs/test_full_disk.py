"""A disk that is full or fails ends in one line at every single write, and the run goes on once there is room."""

import errno
import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from iris import iris
from mutirao.cli import main
from mutirao.config import resolve
from mutirao.experiments import task as recipes
from mutirao.report import execute
from mutirao.runs.verify import verify

CONFIG = resolve(iris.config, {"rounds": 2})


class Torn(io.FileIO):
    """A file of which the first half of what is written fits."""

    def __init__(self, path: Path, mode: str, code: int) -> None:
        super().__init__(path, mode.replace("b", ""))
        self.code, self.left = code, 1

    def write(self, content: Any) -> int:
        if self.left:
            self.left = 0
            return super().write(bytes(content)[: len(content) // 2]) if len(content) > 1 else len(content)
        raise OSError(self.code, os.strerror(self.code))


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[str]]:
    """Let the k-th opening of a file for writing be of a disk that fails; tells what was opened."""
    real = Path.open
    opened: list[str] = []
    at = [0, errno.ENOSPC]

    def open_(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "b" in mode and {"w", "a"} & set(mode):
            opened.append(self.name)
            if len(opened) == at[0]:
                torn = Torn(self, mode, at[1])
                return torn if more.get("buffering") == 0 else io.BufferedWriter(torn, 16)
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", open_)

    def begin(k: int, code: int) -> list[str]:
        at[:] = [k, code]
        opened.clear()
        return opened

    return begin


def test_every_write_of_a_run_may_fail_and_the_run_goes_on_to_the_same_end(
    tmp_path: Path, fail_at: Callable[[int, int], list[str]]
) -> None:
    opened = fail_at(0, errno.ENOSPC)
    whole = execute("iris:iris", CONFIG, tmp_path / "whole", pictures=False)
    writes = len(opened)
    assert writes > 15
    for k in range(1, writes + 1):
        out = tmp_path / str(k)
        fail_at(k, (errno.ENOSPC, errno.EIO, errno.EROFS)[k % 3])
        with pytest.raises(OSError) as caught:  # noqa: PT011 - any of three
            execute("iris:iris", CONFIG, out, pictures=False)
        assert str(caught.value.filename).startswith(str(out)), "the file is named"
        fail_at(0, errno.ENOSPC)
        assert execute("iris:iris", CONFIG, out, resume=True, pictures=False)["digest"] == whole["digest"]
        assert verify(out)[1] == []
        assert not list(out.rglob("*.part")), "nothing half written is left"


@pytest.mark.parametrize("name", [".config.toml.part", "audit.jsonl", ".curves.png.part", ".report.html.part"])
def test_the_command_says_it_in_one_line(
    tmp_path: Path, fail_at: Callable[[int, int], list[str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})
    words = ["run", "iris", "--set", "rounds=1", "--out"]
    opened = fail_at(0, 0)
    assert CliRunner().invoke(main, [*words, str(tmp_path / "whole")]).exit_code == 0
    fail_at(opened.index(name) + 1, errno.ENOSPC)
    done = CliRunner().invoke(main, [*words, str(tmp_path / "run")])
    assert done.exit_code == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: {tmp_path / 'run'}")
    assert "No space left on device; finished work is kept" in line
    assert done.stderr.count("error") == 1
    fail_at(0, 0)
    assert CliRunner().invoke(main, [*words, str(tmp_path / "run"), "--resume"]).exit_code == 0


@pytest.mark.slow
def test_a_limit_of_the_system_in_a_real_process_leaves_no_traceback(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mutirao.cli", "run", "quickstart", "--set", "rounds=1", "--out", "run"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: run/checkpoints/round_000.safetensors: File too large")
    assert "Traceback" not in done.stderr
