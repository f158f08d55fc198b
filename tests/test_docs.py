"""What the documentation shows is run here."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutirao import partitioning
from mutirao.aggregation import FedAvg
from mutirao.core.arrays import digest
from mutirao.core.parts import as_handler, as_selector, check_needs
from mutirao.core.rounds import Run, train
from mutirao.selection import PowerOfChoice
from mutirao.simulation import drift
from mutirao.simulation.local_fleet import LocalFleet

DOCS = Path(__file__).parent.parent / "docs"
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[str]:
    return PYTHON.findall((DOCS / page).read_text())


def mutirao(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mutirao.cli", *words], cwd=cwd, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_own_task_is_short_and_runs_with_the_command_shown(tmp_path: Path) -> None:
    recipe, settings, selector, *_ = blocks("your-own-task.md")
    assert len(recipe.splitlines()) < 40
    (tmp_path / "wine.py").write_text(recipe + settings + selector)
    commands = re.findall(r"\$ mutirao (run wine.*)", (DOCS / "your-own-task.md").read_text())
    assert len(commands) == 3
    for command in commands:
        out = mutirao(*command.split(), "--set", "rounds=3", cwd=tmp_path)
        assert "wine:recipe, 3 rounds" in out


def test_the_task_without_torch_runs_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, kept = blocks("your-own-task.md")[-2:]
    space: dict[str, Any] = {}
    exec(compile(code + kept, "your-own-task.md", "exec"), space)  # the page's own code
    assert capsys.readouterr().out.strip() in code
    assert space["run"].arrays["mean"] == 3.0


def test_the_page_on_data_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    for code in blocks("data.md"):
        exec(compile(code, "data.md", "exec"), space)
        said = [line.partition("  # ")[2] for line in code.splitlines() if line.startswith("print(")]
        printed = capsys.readouterr().out.splitlines()
        if "except" in code:
            printed = [line for line in printed if f"```text\n{line}\n```" not in (DOCS / "data.md").read_text()]
        assert printed == said
    assert {"table", "both", "numbers", "pictures", "trainer", "augmented"} <= space.keys()


def test_every_line_of_the_page_on_security_is_shown_by_a_test_that_exists() -> None:
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 50
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), f"{file}::{test}"
    attacks = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 4]
    heads = ("| attack |", "|---")
    assert not [line for line in attacks if "::test_" not in line and not line.startswith(heads)]


@pytest.mark.slow
def test_the_page_on_training_says_what_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile("".join(blocks("training.md")), "training.md", "exec"), {})  # the page's own code
    page = (DOCS / "training.md").read_text()
    printed = capsys.readouterr().out
    assert printed.startswith("1 2\n2 2\n3 2\n['1.bias', '1.weight']\n['frozen']\n")
    assert printed.endswith(re.findall(r"```text\n(whole .*?)```", page, re.DOTALL)[0])
    commands = re.findall(r"\$ mutirao (run quickstart.*)", page)
    assert len(commands) == 3
    for command in commands:
        assert "quickstart, 2 rounds" in mutirao(*command.split(), "--set", "rounds=2", cwd=tmp_path)


@pytest.mark.slow
def test_the_loop_of_ones_own_is_short_learns_and_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    loop, run = blocks("your-own-loop.md")
    assert len(loop[loop.index("def scaffold") : loop.index("scaffold.capabilities")].splitlines()) <= 32
    space: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(loop + run, "your-own-loop.md", "exec"), space)  # the page's own code
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    first, fleet = dict(space["first"]), LocalFleet(space["scaffold"], space["data"])
    zeros = {f"all.{name}": np.zeros_like(value) for name, value in first.items()}
    again = Run(first | zeros)
    list(train(again, fleet, rounds=20, select=space["everyone"], aggregate=FedAvg()))
    assert digest(again.arrays) == digest(space["run"].arrays)
    x, y = (torch.cat(parts) for parts in zip(*space["data"].values(), strict=True))
    space["net"].load_state_dict({k: torch.from_numpy(again.arrays[k]) for k in first})
    assert float((space["net"](x).argmax(1) == y).float().mean()) > 0.8
    check_needs(as_handler(space["scaffold"]).capabilities, as_selector(PowerOfChoice(5)))
    few = train(Run(first | zeros), fleet, rounds=1, select=PowerOfChoice(2), aggregate=FedAvg())
    assert next(few).row["replied"] == 2


@pytest.mark.slow
def test_the_page_on_python_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(compile("\n".join(blocks("python.md")), "python.md", "exec"), space)  # the page's own code
    assert "FedYogi" in capsys.readouterr().out
    result, mu = space["result"], space["mu"]
    assert set(result.best) >= {"accuracy", "balanced_accuracy", "f1", "auc", "log_loss", "loss"}
    ways = {mu.load(f"runs/{name}").digest for name in "abc"}
    assert len(ways) == 1
    assert mu.load("runs/long").summary["rounds"] == 6


@pytest.mark.slow
def test_the_model_with_a_local_part_on_the_page_on_personal_models_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, space = blocks("personal.md")[0], dict[str, Any]()
    exec(compile(code.replace(": 30", ": 8"), "personal.md", "exec"), space)  # the page's own code, for fewer rounds
    one, rebuilt = space["one"].final, space["rebuilt"].final
    assert max(rebuilt["rmse"], rebuilt["new_rmse"]) < 0.8 * one["rmse"]


def test_the_page_on_partitions_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("partitions.md")
    exec(compile(code, "partitions.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


@pytest.mark.slow
def test_the_page_on_partitions_names_all_of_them_and_its_commands_run(tmp_path: Path) -> None:
    page = (DOCS / "partitions.md").read_text(encoding="utf-8")
    for name in (*partitioning.NAMES, *drift.NAMES):
        assert name == "none" or f"| `{name}` |" in page
    shown = re.findall(r"\$ mutirao (.*data=synthetic.*)", page)
    assert len(shown) == 2
    assert '"clients": 30' in mutirao(*shown[0].split(), cwd=tmp_path)
    assert "quickstart, 2 rounds" in mutirao(*shown[1].split(), "--set", "rounds=2", cwd=tmp_path)


@pytest.mark.parametrize("page", ["cnn-and-fedavg.md", "cnn-and-fedavg.pt.md"])
def test_the_page_for_students_computes_what_torch_does_and_prints_what_it_says(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = blocks(page)
    space: dict[str, Any] = {}
    exec(compile(first, page, "exec"), space)
    x, k = (torch.tensor(space[name], dtype=torch.float64)[None, None] for name in "xk")
    with_torch = torch.nn.functional.max_pool2d(torch.relu(torch.nn.functional.conv2d(x, k)), 2)
    np.testing.assert_allclose(space["features"], with_torch[0, 0])
    exec(compile(second, page, "exec"), space)
    said = re.findall(r"^print\(.*\)  # (.*)$", first + second, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
