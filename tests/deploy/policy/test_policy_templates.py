"""The policy that is written for a recipe: under it the recipe runs, and without any of its lines it does not."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopgrid import LoopGrid, identity
from mutirao.cli import main
from mutirao.config import resolve, write_value
from mutirao.core.fleet import Request, Site
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.policy_templates import policy_for
from mutirao.deploy.policy.rules import Policy, load_policy
from mutirao.deploy.provisioning import create_site
from mutirao.errors import MutiraoError, Refused
from mutirao.experiments.task import NAMES, find
from mutirao.report import execute

__all__ = ["identity"]  # a fixture that holds for all tests here, too

FEW: dict[str, Any] = {"rounds": 2, "clients": 3, "per_round": 3, "evaluate_every": 1}
SMALL: dict[str, dict[str, Any]] = {
    "quickstart": {"hidden": 4, "epochs": 1},
    "ranking": {"hidden": 4},
    "online": {"queries": 50, "interactions": 10},
    "selection": {"epochs": 1},
    "groups": {"clients": 10, "per_round": 10, "epochs": 1},
    "recsys": {"clients": 8, "per_round": 8},
    "cytology": {"data": "cells", "weights": "random", "views": 1, "slide": r"^(\w+)_", "validation": 0.4},
    "tabular": {"data": "patients.csv", "target": "ill", "task": "classification", "sites": True, "epochs": 1},
    "images": {"data": "cells", "side": 8, "views": 1, "clients_every": 1, "validation": 0.4},
    "cifar10": {"samples": 40, "epochs": 1},
}


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiles of two kinds from nine slides, and a table."""
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for kind, tone in (("abnormal", 60), ("normal", 160)):
        (tmp_path / "cells" / kind).mkdir(parents=True)
        for i in range(63):
            tile = Image.fromarray(draw.integers(tone, tone + 60, (8, 8, 3), np.uint8))
            tile.save(tmp_path / "cells" / kind / f"s{i % 9}_{i}.png")
    rows = [f"{x:.3f},{y:.3f},{'yes' if x > 0 else 'no'}" for x, y in draw.normal(size=(120, 2))]
    (tmp_path / "patients.csv").write_text("\n".join(["age,dose,ill", *rows]) + "\n")
    return tmp_path


def settings_for(name: str, held: Path) -> dict[str, Any]:
    sets = FEW | SMALL[name]
    return sets | ({"data": str(held / sets["data"])} if "data" in sets else {})


def written(held: Path, name: str, sets: dict[str, Any]) -> Policy:
    """The policy of a site that was made for this recipe."""
    agreed = [(key, value) for key, value in sets.items() if key != "data"]
    node = create_site(held / "site", "recife", "localhost:9092", None, sets.get("data", ""), [name], sets=agreed)
    return load_policy(node.policy_file)


def run_under(name: str, sets: dict[str, Any], policy: Policy, out: Path) -> list[dict[str, Any]]:
    """A run of a recipe over Flower's messages, each client with this policy; what their trail says of it."""
    at_server = {key: value for key, value in sets.items() if key != "data" or "sites" not in sets}
    config = resolve(find(name).config, at_server)
    words = shlex.join(f"{k}={v if isinstance(v, str) else write_value(v)}" for k, v in at_server.items())
    grid = LoopGrid(client_app(), recipe=name, set=words)
    for client in find(name).prepare(config).population:
        grid.join(name=client, policy=str(policy.audit.parent / "policy.toml"))
    execute(name, config, out, fleet=FlowerFleet(grid, timeout=120, greet=60), pictures=False)
    return [json.loads(line) for line in policy.audit.read_text().splitlines()]


METHODS: list[dict[str, Any]] = [
    *({"aggregate": name} for name in ("fedprox", "scaffold", "feddyn", "fednova", "qfedavg")),
    *({"personal": name} for name in ("fedper", "ditto")),
    {"compress": "int8"},
    {"personal": "fedper", "compress": "topk"},
]


def words_of(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [*((name, {}) for name in NAMES), *(("quickstart", more) for more in METHODS)], ids=words_of
)
def test_a_recipe_runs_under_its_own_policy_which_has_no_line_too_many(
    name: str, more: dict[str, Any], held: Path
) -> None:
    sets = settings_for(name, held) | more
    policy = written(held, name, sets)
    trail = run_under(name, sets, policy, held / "run")
    assert [e for e in trail if e["event"] in ("refused", "raised")] == []
    sent = [e for e in trail if e["event"] == "sent"]
    assert {e["do"] for e in sent} == set(policy.asked.requests) - {"take"}  # that one is for who comes late
    for kind in ("extras", "metrics"):
        assert {k for e in sent for k in e[kind]} == set(getattr(policy.reply, kind))
    came = {k for e in trail if e["event"] == "asked" for k in e.get("extras", [])}
    assert came == set(policy.asked.extras)
    told = {k for e in trail if e["event"] == "asked" for k in e.get("told", [])}
    assert told == set(policy.asked.told)


@pytest.mark.parametrize(
    ("made_for", "asked", "rule"),
    [
        ({}, {"aggregate": "fedprox"}, "asked.told"),
        ({"aggregate": "fedprox"}, {"aggregate": "fedprox", "aggregate.mu": 10.0}, "asked.told"),
        ({}, {"aggregate": "feddyn"}, "asked.told"),
        ({}, {"aggregate": "scaffold"}, "asked.told"),
        ({"aggregate": "scaffold"}, {"aggregate": "scaffold", "aggregate.option": 1}, "asked.told"),
        ({}, {"aggregate": "fednova"}, "reply.metrics"),
        ({}, {"aggregate": "qfedavg"}, "reply.metrics"),
        ({}, {"personal": "fedper"}, "pinned.architecture"),  # of which a part does not travel
        ({"personal": "fedper"}, {}, "pinned.architecture"),  # the whole model, with what was to stay at the site
        ({"clients_every": -1}, {"personal": "ditto"}, "asked.requests"),
        ({"personal": "ditto"}, {}, ""),  # it asks for less
        ({}, {"compress": "int8"}, ""),  # what leaves was judged before it was compressed
    ],
    ids=words_of,
)
def test_under_a_policy_for_another_method_a_site_refuses_by_name(
    made_for: dict[str, Any], asked: dict[str, Any], rule: str, held: Path
) -> None:
    sets = settings_for("quickstart", held) | {"rounds": 1}
    policy = written(held, "quickstart", sets | made_for)
    try:
        trail = run_under("quickstart", sets | asked, policy, held / "run")
    except MutiraoError:  # nobody is left to make a round with
        trail = [json.loads(line) for line in policy.audit.read_text().splitlines()]
    assert {e["rule"] for e in trail if e["event"] == "refused"} == ({rule} if rule else set())
    assert any(e["event"] == "sent" and e["do"] == "train" for e in trail) == (rule in ("", "asked.requests"))


def test_without_any_of_its_lines_a_site_refuses(held: Path) -> None:
    sets = settings_for("cytology", held)
    policy = written(held, "cytology", sets)
    task = find("cytology").prepare(resolve(find("cytology").config, sets))
    site = Site("client_1", task.population["client_1"])

    def answer(policy: Policy, do: str) -> None:
        request = Request(do, task.initial(), {"seed": 0, "round": 1})
        PolicyHandler(task.handler, policy, Requester(recipe="cytology"))(request, site)

    for do in ("train", "evaluate"):
        answer(policy, do)
        fewer = replace(policy.asked, requests=tuple(d for d in policy.asked.requests if d != do))
        with pytest.raises(Refused, match=r"asked\.requests"):
            answer(replace(policy, asked=fewer), do)
    for metric in policy.reply.metrics:
        reply = replace(policy.reply, metrics=tuple(m for m in policy.reply.metrics if m != metric))
        with pytest.raises(Refused, match=r"reply\.metrics"):
            answer(replace(policy, reply=reply), "train")
    with pytest.raises(Refused, match=r"reply\.arrays"):
        answer(replace(policy, reply=replace(policy.reply, arrays=())), "train")


def test_what_parts_need_is_allowed_with_them_and_only_with_them() -> None:
    plain = policy_for(["quickstart"])
    assert '"probe"' not in plain
    assert '"squared_errors"' not in plain
    sets = [("select", "powerofchoice"), ("aggregate", "fedrisk")]
    text = policy_for(["quickstart"], sets)
    assert '  "probe",  # the same on a few samples, before it is chosen for a round' in text
    assert '  "squared_errors",  # the error of EACH SINGLE sample' in text
    private = policy_for(["quickstart"], [("privacy", "local")])
    assert ('"epsilon"' in private, '"loss"' in private) == (True, False)


def test_what_cannot_be_found_out_lets_nothing_leave_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text := policy_for(["cytology"], [("data", "/nowhere")]))
    policy = load_policy(tmp_path / "policy.toml")
    assert (policy.asked.requests, policy.reply.arrays) == ((), ())
    assert "# what cytology needs is not known yet: ConfigError: there is no folder /nowhere" in text


def test_the_command_says_whether_anything_may_leave(tmp_path: Path) -> None:
    for words, said in ((["--recipe", "quickstart"], "it lets leave what quickstart needs"), ([], "nothing leaves")):
        out = tmp_path / f"{len(words)}.toml"
        done = CliRunner().invoke(main, ["site", "policy", *words, "--out", str(out)])
        assert (done.exit_code, said in done.output) == (0, True)
        assert bool(load_policy(out).asked.requests) == bool(words)
