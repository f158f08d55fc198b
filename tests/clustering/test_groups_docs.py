"""What the page on groups shows is run here."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.experiments.task import find
from mutirao.report import execute

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_forming_and_admitting(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[0], "groups.md", "exec"), {})  # the page's own code
    said = capsys.readouterr().out.splitlines()
    shown = re.findall(r"# (.*)", BLOCKS[0])
    assert len(said) == len(shown) == 4
    assert all(real.startswith(text.removesuffix("...")) for real, text in zip(said, shown, strict=True))


def test_combining(tmp_path: Path) -> None:
    recipe = find("groups")
    config = resolve(recipe.config, {"rounds": 3, "warm_epochs": 8})
    execute("groups", config, tmp_path / "runs" / "groups", pictures=False)
    space: dict[str, object] = {}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(compile(BLOCKS[1], "groups.md", "exec"), space)  # the page's own code
    finally:
        os.chdir(before)
    guess, asker = space["guess"], space["asker"]
    assert np.mean(guess == asker.test.y.numpy()) > 0.8  # type: ignore[attr-defined]


@pytest.mark.slow
def test_groups_of_a_model_and_data_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "groups-any-task.md").read_text()
    code, table = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(table, "groups-any-task.md", "exec"), {})
    assert len((tmp_path / "patients.csv").read_text().splitlines()) == 1 + 15 * 120
    exec(compile(code, "groups-any-task.md", "exec"), {})  # the page's own code
    (shown,) = re.findall(r"print.*# (.*)", code)
    assert capsys.readouterr().out.splitlines()[-1] == shown
