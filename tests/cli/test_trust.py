"""A file or folder from elsewhere runs no code: every attack in a real process, where somebody else put files."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from living import mutirao as start
from mutirao.cli import main
from mutirao.errors import ConfigError
from mutirao.experiments import task as recipes
from mutirao.runs.trust import is_mark, mark
from mutirao.studies.study import plan_of, read_study, run_cell

COMMAND = str(Path(sys.executable).parent / "mutirao")
QUICK = ["--set", "rounds=1", "--set", "clients=4", "--set", "per_round=2", "--set", "samples=20"]
TELL = "from pathlib import Path\nPath({marker!r}).touch()\n"
PART = """
from dataclasses import dataclass

@dataclass(frozen=True)
class First:
    count: int = 2
    def __call__(self, roster, round, rng):
        return sorted(roster.ids)[: self.count]

def by_name(roster, round):
    import numpy as np
    return np.arange(len(roster.ids), dtype=float)
"""
POPEN = '[select]\nname = "subprocess:Popen"\nargs = "touch ran"\nshell = true\n'
# What is imported from the standard library, by our own packages, and by none unless it is installed.
PLANTED = ["safetensors", "numpy", "click", "torch", "matplotlib", "tomllib", "csv", "fastapi", "uvicorn", "flwr"]
PLANTED += ["multiprocessing", "opacus", "mlflow", "openslide", "not_installed", "sitecustomize_", "scipy", "rich"]


def mutirao(*words: str, cwd: Path, module: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """The command as a person starts it; nobody is at a terminal."""
    command = [sys.executable, "-m", "mutirao.cli"] if module else [COMMAND]
    return subprocess.run(
        [*command, *words], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | more
    )


def plant(folder: Path) -> Path:
    """Files that tell when they are imported; returns what they would leave."""
    marker = folder / "ran"
    for name in PLANTED:
        (folder / f"{name}.py").write_text(TELL.format(marker=str(marker)))
    return marker


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a refusal is."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of quickstart, as somebody might be sent it."""
    place = tmp_path_factory.mktemp("made")
    done = mutirao("run", "quickstart", *QUICK, "--out", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "run"


@pytest.fixture
def sent(tmp_path: Path, finished: Path) -> Path:
    """A copy of it with code planted in it."""
    shutil.copytree(finished, tmp_path / "sent")
    plant(tmp_path / "sent")
    return tmp_path / "sent"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["verify", "."],
        ["report", "."],
        ["export", ".", "--out", "table.csv"],
        ["plot", ".", "curves"],
        ["replay", ".", "--set", "select=aoi"],
        ["run", "config.toml", "--out", "../again"],
        ["list"],
        ["data", "check", "digits"],
        ["site", "hash", "quickstart"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_imports_code_from_the_folder_it_is_used_in(sent: Path, words: list[str]) -> None:
    done = mutirao(*words, cwd=sent)
    assert not (sent / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nor_does_it_as_a_module_of_python(sent: Path) -> None:
    for words in (["verify", "."], ["run", "config.toml", "--out", "again"]):
        done = mutirao(*words, cwd=sent, module=True)
        assert done.returncode == 0, done.stderr
        assert not (sent / "ran").exists()


@pytest.mark.slow
def test_nor_do_the_processes_of_a_study(sent: Path) -> None:
    sets = "\n".join(word.replace("=", " = ") for word in QUICK[1::2])
    (sent / "s.toml").write_text(f'recipe = "quickstart"\n[settings]\n{sets}\n[methods.a]\nlr = 0.1\n')
    done = mutirao("study", "s.toml", "--out", "study", "--workers", "1", cwd=sent)
    assert done.returncode == 0, done.stderr
    assert not (sent / "ran").exists()


@pytest.mark.parametrize(
    "table",
    [
        POPEN,
        POPEN.replace("select", "aggregate"),
        '[track]\nname = "mine:First"\n',
        '[partition]\nname = "mine:First"\n',
        'select = "mine:First"\n',
        '"select.name" = "mine:First"\n',
        '[select]\nname = "mix"\nscores = "0.5 age + 0.1 mine:by_name"\n',
    ],
)
@pytest.mark.parametrize("recipe", ["quickstart", "mine:recipe"])
def test_code_that_a_config_names_is_not_run_without_trust(tmp_path: Path, table: str, recipe: str) -> None:
    (tmp_path / "mine.py").write_text(TELL.format(marker="ran") + PART)
    (tmp_path / "config.toml").write_text(f'recipe = "{recipe}"\n{table}')
    said = one_line(mutirao("run", "config.toml", cwd=tmp_path))
    assert "config.toml names code to run: " in said
    assert "add --trust" in said
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.toml", "mine.py"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's own part, in which this process works: a start of Python for each command takes long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})
    for name in ("mine", "evil"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "mine.py").write_text(PART)
    (tmp_path / "evil.py").write_text(TELL.format(marker=str(tmp_path / "ran")) + PART)
    return tmp_path


def command(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


def refusal(*words: str) -> str:
    """The one line with which a command is refused."""
    done = command(*words)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_with_trust_a_part_is_run_and_what_is_none_is_still_refused(here: Path) -> None:
    for name in ("subprocess:Popen", "mine:by_name"):
        (here / "c.toml").write_text(f'recipe = "iris"\n[select]\nname = "{name}"\nargs = "touch ran"\n')
        assert f"{name!r} is not a selector" in refusal("run", "c.toml", "--trust")
    assert not (here / "ran").exists()
    (here / "c.toml").write_text('recipe = "iris"\nrounds = 1\nselect = "mine:First"\n')
    assert command("run", "c.toml", "--trust", "--out", "a").exit_code == 0


@pytest.mark.slow
def test_what_is_typed_is_the_users_own_word_and_what_they_ran_goes_on_without_a_question(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("run", "iris", "--set", "rounds=1", "--set", "select=mine:First", "--out", "a").exit_code == 0
    assert command("run", "iris", "--out", "a", "--resume", "--set", "rounds=2").exit_code == 0
    assert command("run", "a/config.toml", "--out", "b").exit_code == 0
    assert command("replay", "a").exit_code == 0
    assert command("forget", "a", "--client", "c5", "--out", "c").exit_code == 0
    key = Path(os.environ["XDG_CONFIG_HOME"]) / "mutirao" / "key"
    assert key.stat().st_mode & 0o077 == 0

    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "another-user"))
    for words in (
        ["run", "iris", "--out", "a", "--resume"],
        ["run", "a/config.toml", "--out", "d"],
        ["replay", "a"],
        ["forget", "a", "--client", "c5", "--out", "e"],
    ):
        assert "names code to run: mine:First; read it first, then add --trust" in refusal(*words)
    assert command("replay", "a", "--trust").exit_code == 0


def test_a_mark_is_of_one_configuration_and_of_a_trail_that_holds(here: Path) -> None:
    assert command("run", "iris", "--set", "rounds=1", "--set", "select=mine:First", "--out", "a").exit_code == 0
    config, trail = here / "a" / "config.toml", here / "a" / "audit.jsonl"
    config.write_text(config.read_text().replace("mine:First", "evil:First"))
    assert "evil:First" in refusal("run", "iris", "--out", "a", "--resume")
    config.write_text(config.read_text().replace("evil:First", "mine:First"))
    shutil.copytree(here / "a", here / "sent")  # with the mark: given away, and come back with other code beside it
    assert "mine:First" in refusal("run", "sent/config.toml", "--out", "b")
    events = [json.loads(line) for line in trail.read_text().splitlines()]
    trail.write_text("\n".join(json.dumps(e | {"seq": 7}) for e in events) + "\n")
    assert "mine:First" in refusal("run", "iris", "--out", "a", "--resume")
    assert not (here / "ran").exists()


@pytest.mark.parametrize("forged", ["\ud800", "é", "", 7, None])
def test_a_forged_mark_is_no_mark_and_no_error(forged: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own = mark(["mine:Part"], tmp_path, "text")["mark"]
    assert is_mark(own, tmp_path, "text")
    assert not is_mark(forged, tmp_path, "text")
    assert not is_mark(own, tmp_path, "text\ud800")


def test_a_study_file_and_a_cell_put_into_its_folder_run_nothing_either(here: Path) -> None:
    text = 'recipe = "iris"\n[methods.a]\nselect = "mine:First"\n[methods.b]\nlr = 0.1\n'
    (here / "s.toml").write_text(text)
    assert "s.toml names code to run: mine:First; read it first" in refusal("study", "s.toml", "--out", "out")
    with pytest.raises(ConfigError, match="names code to run: mine:First"):
        read_study(here / "s.toml")

    study = read_study(here / "s.toml", trust=lambda where, names: True)
    cell = here / "out" / "cells" / "b" / "seed0"
    cell.mkdir(parents=True)
    (cell / "config.toml").write_text('recipe = "iris"\nselect = "evil:First"\n')
    assert "was made with other settings" in run_cell("iris", (study.cells[1], cell))
    assert not (here / "ran").exists()

    marked = plan_of(study) | mark(study.names, here / "out", study.text, *study.sets)
    (here / "out" / "study.json").write_text(json.dumps(marked))
    read_study(here / "s.toml", out=here / "out")  # the same file into the same folder: asked for once
    (here / "s.toml").write_text(text.replace("mine:First", "evil:First"))
    with pytest.raises(ConfigError, match="names code to run: evil:First"):
        read_study(here / "s.toml", out=here / "out")
    assert not (here / "ran").exists()


def answer(words: list[str], reply: str, cwd: Path) -> tuple[int, str]:
    """The command at a terminal, at which somebody types a line."""
    person, terminal = pty.openpty()
    process = subprocess.Popen([COMMAND, *words], cwd=cwd, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.write(person, reply.encode())
    said = b""
    while True:
        try:
            piece = os.read(person, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(person)
    return process.wait(60), said.decode(errors="replace")


def test_on_a_terminal_one_question_names_the_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PART)
    (tmp_path / "c.toml").write_text('recipe = "quickstart"\n[select]\nname = "mine:First"\ncuont = 3\n')
    question = "c.toml names code to run: mine:First. Run it? [y/N]"
    for reply, goes_on in (("n\n", False), ("y\n", True)):
        code, said = answer(["run", "c.toml", "--out", "a"], reply, tmp_path)
        assert code == 2
        assert said.count(question) == 1
        assert ("has no setting 'cuont'" in said) == goes_on
        assert ("then add --trust" in said) != goes_on


@pytest.fixture(scope="module")
def ask_dash(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Iterator[Callable[[str], httpx.Response]]:
    """A live page over folders of ours and folders dropped in; asks it to resume one."""
    place = tmp_path_factory.mktemp("dash")
    runs = place / "runs"
    shutil.copytree(finished, runs / "popen")
    (runs / "popen" / "config.toml").write_text(f'recipe = "quickstart"\n{POPEN}')
    shutil.copytree(finished, runs / "recipe")
    (runs / "recipe" / "config.toml").write_text('recipe = "evil:recipe"\n')
    (place / "evil.py").write_text(TELL.format(marker=str(place / "ran")))
    (place / "s.toml").write_text('recipe = "quickstart"\n[methods.a]\nlr = 0.1\n')
    (runs / "study" / "cells").mkdir(parents=True)
    plan = {"schema": 1, "recipe": "quickstart", "baseline": "a", "metrics": [], "cells": ["a/seed0"], "methods": ["a"]}
    plan |= {"threshold": {}, "file": str(place / "s.toml"), "sets": ["select=evil:First"], "mark": "0" * 64}
    (runs / "study" / "study.json").write_text(json.dumps(plan))
    plant(place)
    page = start("dash", "runs", "--no-open", cwd=place, stdout=subprocess.PIPE)
    assert page.stdout is not None
    base, _, token = page.stdout.readline().split(" at ")[1].strip().partition("/?token=")
    headers = {"X-Mutirao-Token": token}

    def ask(name: str) -> httpx.Response:
        httpx.get(f"{base}/api/runs", headers=headers, timeout=30)
        return httpx.post(f"{base}/api/resume", json={"id": name}, headers=headers, timeout=30)

    yield ask
    assert not (place / "ran").exists()
    page.terminate()
    page.wait(60)


@pytest.mark.parametrize("name", ["popen", "recipe", "study"])
def test_the_live_page_runs_no_code_that_a_folder_dropped_in_names(
    ask_dash: Callable[[str], httpx.Response], name: str
) -> None:
    told = ask_dash(name)
    assert told.status_code == 409
    assert "and was not run by you on this machine" in told.text
