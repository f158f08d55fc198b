"""A policy allows what it names, and nothing else; a file that is wrong is refused in one line."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy import content
from mutirao.deploy.content import content_hash
from mutirao.deploy.policy import Policy, load_policy, policy_template
from mutirao.errors import ConfigError, Refused


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_the_template_is_a_policy_that_allows_one_recipe_and_lets_nothing_leave(tmp_path: Path) -> None:
    policy = load_policy(written(tmp_path, policy_template(["quickstart"])))
    policy.approve("quickstart", {"rounds": 3})
    assert policy.asked.requests == policy.reply.arrays == policy.reply.metrics == policy.reply.extras == ()
    assert policy.audit == tmp_path / "audit.jsonl"
    nothing = load_policy(written(tmp_path, policy_template()))
    assert nothing.recipes == {}
    assert load_policy(written(tmp_path, "")) == Policy(audit=policy.audit, ledger=policy.ledger)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[replys]\n", "unknown key 'replys'; did you mean 'reply'?"),
        ("[reply]\nmetric = ['loss']\n", "reply.metric is unknown; did you mean 'metrics'?"),
        ("[reply]\nmetrics = 'loss'\n", "is not a list of texts"),
        ("[reply]\ndecimals = -1\n", "too small"),
        ("[asked]\nmin_samples = 2.5\n", "is not a whole number"),
        ("[privacy]\nnoise = 1.0\n", "privacy.noise needs privacy.clip"),
        ("[privacy]\ndelta = 0.0\n", "delta must be above 0"),
        ("[privacy]\naccountant = 'me'\n", "not one of rdp, prv"),
        ("[privacy]\nbudget = 1.0\n[reply]\nmetrics = ['loss']\n", "they are not noised"),
        ("recipes = 3\n", "'recipes' is a table"),
        ("[recipes\n", "is not valid TOML"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def allowing(recipe: str, **more: Any) -> Policy:
    return Policy(recipes={recipe: content_hash(recipe)}, **more)


@pytest.mark.parametrize(
    ("recipe", "run_config", "rule"),
    [
        ("cifar10", {}, "recipes"),
        ("os:system", {}, "recipes"),
        ("quickstart", {"data": "/etc"}, "asked.names"),
        ("quickstart", {"aggregate": "os:system"}, "asked.names"),
        ("quickstart", {"set": "lr=0.1 partition=shutil:rmtree"}, "asked.names"),
        ("quickstart", {"set": "data=~/secrets"}, "asked.names"),
    ],
)
def test_what_the_server_may_not_choose_is_refused(recipe: str, run_config: dict[str, Any], rule: str) -> None:
    with pytest.raises(Refused) as caught:
        allowing("quickstart").approve(recipe, run_config)
    assert caught.value.rule == rule


def test_what_it_may_choose_is_not() -> None:
    policy = allowing("quickstart", settings={"data": "digits"})
    policy.approve(
        "quickstart", {"data": "/replaced/anyway", "lr": 0.1, "set": "aggregate=fedadam epochs=2", "out": "/x"}
    )


def test_a_recipe_with_other_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "site_own_task.py"
    module.write_text("raise RuntimeError('hashing must not import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    policy = allowing("site_own_task:recipe")
    policy.approve("site_own_task:recipe", {})
    module.write_text("recipe = 'another'\n")
    content.sources.cache_clear()
    with pytest.raises(Refused, match="other content than allowed"):
        policy.approve("site_own_task:recipe", {})
    assert "site_own_task" not in sys.modules
    gone = Policy(recipes={"no_such_module:recipe": "sha256:00"})
    with pytest.raises(Refused, match="cannot be found"):
        gone.approve("no_such_module:recipe", {})


def test_the_hash_is_of_the_package_and_the_name() -> None:
    assert content_hash("quickstart") == content_hash("quickstart")
    assert content_hash("quickstart") != content_hash("cifar10")
    names = [name for name, _ in content.sources("mutirao")]
    assert "mutirao/recipes/quickstart.py" in names
    assert not any("__pycache__" in name or name.endswith(".so") for name in names)


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = str(tmp_path / "policy.toml")
    assert run(main, ["site", "policy", "--recipe", "quickstart", "--out", path]).exit_code == 0
    assert run(main, ["site", "policy", "--out", path]).exit_code == 2  # a policy is not written over
    said = run(main, ["site", "check", path])
    assert said.exit_code == 0
    assert "recipe quickstart  allowed" in said.output
    assert run(main, ["site", "hash", "quickstart"]).output.strip() in Path(path).read_text()
    assert run(main, ["site", "check", str(tmp_path / "none.toml")]).exit_code == 2


def test_the_command_line_stays_quick() -> None:
    """Neither torch nor Opacus is imported to show help or a policy."""
    code = "import sys, mutirao.cli, mutirao.deploy.policy; print({'torch', 'opacus', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "set()"


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "policy.md", "exec"), {})  # the page's own code
    assert capsys.readouterr().out.strip() in code
