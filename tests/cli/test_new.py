"""`mutirao new`: what it writes runs as it is, in a folder that was empty, by the very commands its README shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main


def call(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=os.environ | {"PYTHONSAFEPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_three_commands_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    here = [sys.executable, "-m", "mutirao.cli"]
    told = call(*here, "new", "my_task", cwd=tmp_path)
    assert "next: cd my_task && mutirao run my_task:recipe" in told
    folder = tmp_path / "my_task"
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "my_task.py", "study.toml", "test_my_task.py"]
    assert "NAME" not in "".join(p.read_text() for p in folder.iterdir())
    run, study, test = re.findall(r"^\$ (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert "my_task:recipe, 20 rounds" in call(*here, *run.split()[1:], cwd=folder)
    assert "fedyogi" in call(*here, *study.split()[1:], cwd=folder)
    assert "2 passed" in call(sys.executable, *test.split()[1:], cwd=folder)
    written = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    again = CliRunner().invoke(main, ["new", str(folder)])
    assert again.exit_code == 2
    assert all(p.read_bytes() == content for p, content in written.items())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-task", "cannot be the name"),
        ("../escape", "cannot be the name"),
        ("", "cannot be the name"),
        ("class", "cannot be the name"),
        ("test_it", "cannot be the name"),
        ("_hidden", "cannot be the name"),
        ("tâche", "cannot be the name"),
        ("json", "part of Python itself"),
        ("mutirao", "installed package"),
        ("numpy", "installed package"),
        ("there", "already exists"),
    ],
)
def test_a_name_that_will_not_do_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    done = CliRunner().invoke(main, ["new", name])
    assert done.exit_code == 2
    assert says in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"
