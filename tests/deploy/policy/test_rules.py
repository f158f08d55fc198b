"""A policy allows what it names, and nothing else; a file that is wrong is refused in one line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy.policy import pins as content
from mutirao.deploy.policy.enforcement import Requester, approve
from mutirao.deploy.policy.pins import VARYING, content_hash, settings_of, settings_with_constants
from mutirao.deploy.policy.policy_templates import describe_policy, weaknesses
from mutirao.deploy.policy.rules import (
    Policy,
    PrivacyRules,
    ReplyRules,
    RequestRules,
    assignments,
    load_policy,
    policy_template,
)
from mutirao.errors import ConfigError, Refused
from mutirao.experiments.task import NAMES
from mutirao.privacy import Local


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
    assert load_policy(written(tmp_path, "")) == Policy(audit=policy.audit, ledger=policy.ledger, paused=policy.paused)


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
        ("[privacy]\nbudget = 1.0\nclip = 1.0\nnoise = 1.0\n[reply]\nextras = ['*']\n", "they are not noised"),
        ("[pinned]\nquickstart = 3\n", "write [pinned.RECIPE]"),
        ("[pinned.quickstart]\narchitecture = 'sha256:12'\n", "is not a digest"),
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


PREDICTABLE: list[dict[str, Any]] = [
    {"privacy": "local", "privacy.repeatable": True},
    {"privacy": "dpsgd", "privacy.repeatable": 1},
    {"privacy": "local", "privacy.repeatable": "true"},
    {"privacy": "local", "privacy.repeatable": "True"},
    {"privacy": "local", "privacy.repeatable": "false"},  # text, which a part may take for true
    {"set": "privacy=local privacy.repeatable=true"},
    {"set": "privacy=local 'privacy.repeatable = true'"},
    {"set": "signature.epsilon=1 signature.repeatable=true"},
    {"set": "privacy=local privacy.Repeatable=1"},
]


@pytest.mark.parametrize("run_config", PREDICTABLE)
@pytest.mark.parametrize("cover", [PrivacyRules(), PrivacyRules(budget=5.0), PrivacyRules(clip=1.0, noise=1.0)])
def test_noise_from_the_seed_is_refused_however_it_is_said(run_config: dict[str, Any], cover: PrivacyRules) -> None:
    with pytest.raises(Refused, match="can be subtracted") as caught:
        allowing("groups", privacy=cover).approve("groups", run_config)
    assert caught.value.rule.lower().startswith("settings.")
    assert "repeatable" in caught.value.rule.lower()
    allowing("groups", privacy=cover).approve("groups", {"privacy": "local", "privacy.repeatable": False})


class Forgetful(Local):
    """A part of a site's own, whose noise comes from the seed unless one says otherwise."""

    def __init__(self, noise: float = 1.0, repeatable: bool = True) -> None:
        super().__init__(noise=noise, repeatable=repeatable)


def test_noise_from_the_seed_is_refused_where_a_default_hides_it(tmp_path: Path) -> None:
    part = f"{__name__}:Forgetful"
    policy = allowing("quickstart", asked=RequestRules(names=(part,)), audit=tmp_path / "audit.jsonl")

    def settled(sets: dict[str, Any]) -> Requester:
        settle = partial(settings_of, "quickstart", [*sets.items(), *policy.settings.items()])
        return approve(policy, Requester("1", "quickstart"), sets, settle)

    with pytest.raises(Refused) as caught:
        settled({"privacy": part})
    assert caught.value.rule == "settings.privacy.repeatable"
    assert json.loads(policy.audit.read_text().splitlines()[-1])["rule"] == "settings.privacy.repeatable"
    assert not settled({"privacy": part, "privacy.repeatable": False}).repeatable
    policy = replace(policy, settings={"privacy.repeatable": True})  # the site itself says so
    assert settled({"privacy": "local"}).repeatable  # and its ledger counts it as no noise at all
    with pytest.raises(Refused):  # its settings replace nothing where code of its own reads what the server says
        approve(policy, Requester("1", "quickstart"), {"privacy.repeatable": True})


def pinned(tmp_path: Path, *sets: tuple[str, Any]) -> Policy:
    return load_policy(written(tmp_path, policy_template(["quickstart"], sets)))


@pytest.mark.parametrize(
    ("run_config", "rule"),
    [
        ({"batch_size": 100000}, "pinned.batch_size"),
        ({"set": "hidden=4000 batch_size=100000 epochs=1"}, "pinned."),
        ({"samples": 61}, "pinned.samples"),
        ({"epochs": 1}, "pinned.epochs"),
        ({"lr": 0.30001}, "pinned.lr"),
        ({"optimizer": "adam"}, "pinned.optimizer"),
        ({"set": "partition.alpha=0.31"}, "pinned.partition.alpha"),
        ({"partition": "iid"}, "pinned.partition."),
        ({"seed": 1}, "pinned.seed"),
        ({"rounds": 9, "clients": 3, "per_round": 3, "aggregate": "fedadam", "select": "roundrobin"}, ""),
        ({"privacy": "local", "set": "privacy.noise=2.0 epochs=5 batch_size=16"}, ""),
    ],
)
def test_the_template_pins_what_shapes_an_update(tmp_path: Path, run_config: dict[str, Any], rule: str) -> None:
    policy = pinned(tmp_path)
    policy.approve("quickstart", run_config)
    settings = settings_of("quickstart", assignments(run_config))
    if not rule:
        policy.hold("quickstart", settings)
        return
    with pytest.raises(Refused, match="is agreed on here") as caught:
        policy.hold("quickstart", settings)
    assert caught.value.rule.startswith(rule)


def test_the_template_pins_the_model_and_what_was_agreed_on(tmp_path: Path) -> None:
    wide = pinned(tmp_path, ("hidden", 128), ("epochs", 2))
    assert wide.pinned["quickstart"]["epochs"] == 2
    told = CliRunner().invoke(main, ["site", "hash", "quickstart", "--architecture", "--set", "hidden=128"])
    assert told.output.strip() == wide.pinned["quickstart"]["architecture"]
    assert wide.pinned["quickstart"]["architecture"] != pinned(tmp_path).pinned["quickstart"]["architecture"]
    wide.hold("quickstart", settings_of("quickstart", [("hidden", 128), ("epochs", 2)]))
    insists = replace(wide, settings={"epochs": 1})  # the site's own word goes before its pins
    insists.hold("quickstart", settings_of("quickstart", [("hidden", 128), ("epochs", 9), ("epochs", 1)]))
    assert CliRunner().invoke(main, ["site", "hash", "recsys", "--architecture"]).exit_code == 2


def test_a_pin_of_what_is_a_constant_now_holds_at_its_value_only(tmp_path: Path) -> None:
    settings = settings_with_constants("recsys", [("start", "consent")])
    lines = policy_template(["recsys"], [("start", "consent")]).replace(
        "start.share = ", "start.whiten = false\nstart.share = "
    )
    load_policy(written(tmp_path, lines)).hold("recsys", settings)
    other = load_policy(written(tmp_path, lines.replace("start.whiten = false", "start.whiten = true")))
    with pytest.raises(Refused, match=r"start.whiten is 'False' in this run, and True is agreed on here"):
        other.hold("recsys", settings)


@pytest.mark.parametrize("recipe", sorted(NAMES))
def test_every_recipe_is_pinned_to_itself(tmp_path: Path, recipe: str) -> None:
    policy = load_policy(written(tmp_path, policy_template([recipe])))
    policy.hold(recipe, settings_of(recipe))
    assert {"epochs", "batch_size", "lr", "samples", "seed"} <= policy.pinned[recipe].keys()
    unknown = {*VARYING, "tabular", "ranking"}  # their models are made when clients have agreed on columns, or a scale
    assert ("architecture" in policy.pinned[recipe]) == (recipe not in unknown)


def test_a_text_that_the_site_itself_has_pinned_may_come_back_from_the_server(tmp_path: Path) -> None:
    agreed = [("slide", r"^(\w+)_"), ("data", "/nowhere")]
    policy = load_policy(written(tmp_path, policy_template(["cytology"], agreed)))
    policy.approve("cytology", {"slide": r"^(\w+)_"})
    with pytest.raises(Refused, match=r"asked\.names"):
        policy.approve("cytology", {"slide": r"^(\w)_"})


def own_task(context: Any) -> None:
    """A site's own function from Flower's context to a task."""


def test_a_sites_own_function_is_allowed_and_what_it_reads_can_be_pinned(tmp_path: Path) -> None:
    name = f"{__name__}:own_task"
    policy = load_policy(written(tmp_path, policy_template([name])))
    assert policy.pinned == {}
    strict = replace(policy, pinned={name: {"batch_size": 16}}, settings={"batch_size": 16})
    approve(strict, Requester("1", name), {"lr": 0.5, "batch_size": 16})
    with pytest.raises(Refused, match=r"pinned\.batch_size"):
        approve(strict, Requester("1", name), {"set": "batch_size=100000"})
    with pytest.raises(ConfigError, match="no recipe is called 'quickstrat'"):
        policy_template(["quickstrat"])


def test_a_policy_says_where_an_update_of_few_samples_may_leave(tmp_path: Path) -> None:
    open_minded = replace(
        pinned(tmp_path), asked=RequestRules(requests=("train",), min_samples=50), reply=ReplyRules(arrays=("*",))
    )
    assert [w.partition(":")[0] for w in weaknesses(open_minded)] == ["privacy.noise"]
    lax = replace(open_minded, pinned={}, asked=RequestRules(requests=("train",), min_samples=5))
    said = weaknesses(lax)
    assert any("an update of 5 samples may leave" in w for w in said)
    assert any("architecture, batch_size, epochs, lr, samples may be chosen" in w for w in said)
    quick = replace(open_minded, pinned={"quickstart": {"batch_size": 50, "epochs": 1}})
    assert any("an update of 1 steps may leave" in w for w in weaknesses(quick))
    assert weaknesses(replace(lax, privacy=PrivacyRules(clip=1.0, noise=1.0))) == []
    assert "warning 1" in describe_policy(lax)


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
    assert "mutirao/systems/quickstart.py" in names
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
    code = "import sys, mutirao.cli, mutirao.deploy.policy.rules; print({'torch', 'opacus', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "set()"


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "policy.md", "exec"), {})  # the page's own code
    assert capsys.readouterr().out.strip() in code
