"""The hash of a recipe is given only for one that is installed, and nothing is imported to find out."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy.policy.pins import check_recipe

SOURCE = "raise RuntimeError('must not be imported')\nif True:\n    recipe = 3\nfrom x import other\ndef made(): ...\n"


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pack" / "deep").mkdir(parents=True)
    for place in ("__init__.py", "task.py", "deep/__init__.py"):
        (tmp_path / "own_pack" / place).write_text(SOURCE)
    (tmp_path / "own_alone.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("quikstart", "no recipe is called 'quikstart'; did you mean 'quickstart'?"),
        ("", "no recipe is called ''"),
        ("no_such_module:recipe", "the sources of 'no_such_module' cannot be found"),
        ("own_alone:recip", "own_alone has no 'recip'; did you mean 'recipe'?"),
        ("own_pack.tusk:recipe", "there is no module 'own_pack.tusk' in "),
        ("own_pack.task:nothing", "own_pack.task has no 'nothing'"),
        ("own_broken:recipe", "own_broken.py is not Python that can be read"),
        ("../own_alone:recipe", "is not of the form package.module:name"),
    ],
)
def test_hash_and_policy_refuse_a_recipe_that_does_not_exist(recipe: str, said: str, tmp_path: Path) -> None:
    for words in (["hash", recipe], ["policy", "--recipe", recipe, "--out", str(tmp_path / "p.toml")]):
        done = CliRunner().invoke(main, ["site", *words])
        assert done.exit_code == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "p.toml").exists()


@pytest.mark.parametrize(
    "recipe", ["quickstart", "own_alone:recipe", "own_alone:other", "own_pack.task:made", "own_pack.deep:recipe"]
)
def test_one_that_does_is_hashed_without_being_imported(recipe: str) -> None:
    check_recipe(recipe)
    done = CliRunner().invoke(main, ["site", "hash", recipe])
    assert done.output.startswith("sha256:")
    assert not {"own_alone", "own_pack"} & sys.modules.keys()
