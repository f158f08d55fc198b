"""What works on Windows and macOS, and what says that it needs Linux; see `elsewise`, which plays the other system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutirao.deploy.layout import need_linux
from mutirao.errors import ConfigError

PLAYER = Path(__file__).with_name("elsewise.py")
STUDY = """
recipe = "quickstart"
baseline = "fedavg"
metrics = ["accuracy"]
seeds = 2
[settings]
rounds = 1
clients = 4
[methods.fedavg]
aggregate = "fedavg"
"""
WORKS = [
    ["run", "quickstart", "--set", "rounds=2"],
    ["run", "quickstart", "--set", "rounds=3", "--resume"],
    ["report", "runs/quickstart"],
    ["plot", "runs/quickstart", "labels", "--out", "labels.png"],
    ["verify", "runs/quickstart"],
    ["look", "runs"],
    ["site", "policy", "--recipe", "quickstart", "--out", "policy.toml"],
]
REFUSED = [["site", "up", "here"], ["site", "rehearse", "there"]]


def play(system: str, folder: Path, *commands: list[str]) -> tuple[list[tuple[int, str]], str]:
    """Of each command its exit code and what it said on stderr, and all that was printed, by a console of Windows."""
    read, write = os.pipe()
    code = f"import os; os.dup2({write}, 3); import runpy, sys; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-X", "warn_default_encoding", "-c", code, str(PLAYER), system, json.dumps(commands)]
    env = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with os.fdopen(read) as told:
        done = subprocess.run(words, cwd=folder, env=env, pass_fds=[write], capture_output=True, check=False)
        os.close(write)
        answers = told.read()
    assert answers, done.stderr.decode(errors="replace")
    return [(code, said) for code, said in json.loads(answers)], done.stdout.decode("cp1252")


def check_refused(answers: list[tuple[int, str]], name: str) -> None:
    assert len(answers) == len(REFUSED)
    for words, (code, said) in zip(REFUSED, answers, strict=True):
        assert (code, said.count("\n")) == (2, 1), (words, said)
        assert f"needs Linux, and this is {name}" in said


@pytest.mark.slow
def test_on_windows_runs_reports_and_figures_work_and_deployment_says_that_it_needs_linux(tmp_path: Path) -> None:
    answers, printed = play("win32", tmp_path, *WORKS, *REFUSED)
    assert [(words[0], *answer) for words, answer in zip(WORKS, answers, strict=False) if answer[0]] == []
    assert (tmp_path / "runs/quickstart/report.html").exists()
    assert (tmp_path / "labels.png").exists()
    assert "as it was written" in printed
    assert '"finished"' in answers[WORKS.index(["look", "runs"])][1]
    check_refused(answers[len(WORKS) :], "Windows")


@pytest.mark.slow
def test_on_macos_a_study_starts_its_workers_and_deployment_says_that_it_needs_linux(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    answers, _ = play("darwin", tmp_path, ["study", "study.toml", "--workers", "1"], *REFUSED)
    assert answers[0][0] == 0, answers[0]
    assert len(list(tmp_path.glob("runs/study-study/**/summary.json"))) == 2
    assert (tmp_path / "runs/study-study/report.html").exists()
    check_refused(answers[1:], "macOS")


LOCKED = """
import sys; sys.path.insert(0, {tests!r})
from elsewise import become
become("win32", "numpy click safetensors.numpy")
from pathlib import Path
from mutirao.errors import ConfigError
from mutirao.report.run_state import holder
from mutirao.runs.run_folder import locked_folder
from mutirao.io import sync
place = Path("run")
with locked_folder(place):
    print(*holder(place))
    try:
        with locked_folder(place):
            print("twice")
    except ConfigError as error:
        print(error)
    sync(place)
    sync(place / ".lock")
print(*holder(place))
"""


def test_a_run_folder_is_held_by_one_process_on_windows_too(tmp_path: Path) -> None:
    code = LOCKED.format(tests=str(PLAYER.parent))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 True", "run is in use by another process", "0 False"]


def test_here_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    need_linux("a server")
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with pytest.raises(ConfigError, match="a server needs Linux, and this is freebsd14"):
        need_linux("a server")
