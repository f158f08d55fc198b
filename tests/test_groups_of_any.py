"""Groups go with every recipe: two rounds each with `cluster=auto`, and what cannot be right is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import mutirao
from mutirao.clustering.group_state import Grouping
from mutirao.config import resolve
from mutirao.core.arrays import is_finite, part_of
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.party_agreement import run_recipe
from mutirao.experiments.task import NAMES, Recipe, Task, find
from mutirao.report import execute
from mutirao.runs.execute import execute as make_rounds
from mutirao.simulation.local_fleet import LocalFleet
from test_every_pair import SMALL

# Two groups are asked for, so that there are two models whatever the data look like.
TWO = {"cluster": "kmeans", "cluster.groups": 2}


def rounds_of(recipe: str, **settings: Any) -> tuple[Task, Run, list[dict[str, Any]]]:
    found = find(recipe)
    config = resolve(found.config, {**SMALL[recipe], "rounds": 2, **settings})
    task = found.prepare(config)
    run = Run(task.initial(), seed=1)
    fleet = LocalFleet(task.worker, task.population)
    rows = [done.row for done in run_recipe(found, fleet, config, task, run)]
    return task, run, rows


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [{"cluster": "auto"}, TWO], ids=["auto", "two"])
@pytest.mark.parametrize("recipe", [name for name in NAMES if name != "online"])  # which says so, below
def test_two_rounds_of_every_recipe(recipe: str, cluster: dict[str, Any]) -> None:
    warm = {} if recipe == "recsys" else {"warm_epochs": 1}
    task, run, rows = rounds_of(recipe, **cluster, **warm)
    assert [row["round"] for row in rows] == [1, 2]
    assert all(row["failed"] == 0 for row in rows)
    state = Grouping.from_memory(run.memory)
    assert state is not None
    assert state.groups.count == rows[-1]["groups"] >= (2 if cluster is TWO else 1)
    assert sorted(c for who in state.groups.members().values() for c in who) == sorted(task.population)
    assert is_finite(run.arrays)
    models = [part_of(run.arrays, group) for group in state.groups.names]
    assert all(models)
    assert sum(map(len, models)) == len(run.arrays)
    assert np.isfinite(rows[-1][task.judge])
    assert set(state.scores) <= set(state.groups.names)
    found = task.exhibits.findings(run) if task.exhibits.findings else {}
    assert found["groups"] == state.groups.members()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("online", {"cluster": "auto"}, "cluster=auto: the flow of this recipe has one model for all; use none"),
    ("quickstart", {"regroup": 5}, "regroup only applies when clients are clustered; set cluster=auto"),
    ("quickstart", {"signature": "bias"}, "signature only applies when clients are clustered"),
    ("quickstart", {"cluster": "auto", "centralised": True}, "cluster=one trains a single model"),
    (
        "quickstart",
        {"cluster": "auto", "secure": "secagg+", "regroup": 1},
        "regroup would request signatures repeatedly",
    ),
    ("quickstart", {"cluster": "auto", "privacy": "central", "privacy.noise": 1.0}, "set signature.epsilon"),
    ("quickstart", {"cluster": "auto", "personal": "finetune", "personal.new": 0.2}, "personal.new"),
    ("quickstart", {"cluster": "auto", "aggregate": "scaffold", "regroup": 1}, "use regroup=0"),
    ("quickstart", {"cluster": "auto", "aggregate": "fedbuff", "devices": "tifl"}, "groups do; use fedavg"),
    ("quickstart", {"cluster": "auto", "per_group": "given", "per_group.table": "g0: lr"}, "lr=VALUE"),
    ("quickstart", {**TWO, "per_group": "chosen", "per_group.lr": "0.1,0.3"}, "set judge_by=vali"),
    ("recsys", {"cluster": "auto", "warm_epochs": 3}, "the warm-up of this task is one round of training"),
    ("recsys", {**TWO, "per_group": "given", "per_group.table": "g0: lr=0.1"}, "do not support lr in requests"),
    ("groups", {"cluster": "none"}, "use cluster=one for a single group"),
]


@pytest.mark.parametrize(("recipe", "settings", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_cannot_be_right_is_refused_before_the_first_round(
    recipe: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rounds_of(recipe, **settings)


def test_a_recipe_with_a_flow_of_its_own_says_so() -> None:
    found = find("quickstart")
    own = Recipe(found.config, found.task, flow=lambda fleet, config, task, run: iter(()))
    with pytest.raises(ConfigError, match="cluster=auto: the flow of this recipe has one model for all; use none"):
        own.prepare(resolve(found.config, {"cluster": "auto"}))


def test_what_leaves_in_the_warm_up_is_listed() -> None:
    found = find("tabular")
    plain, grouped = (resolve(found.config, SMALL["tabular"] | more) for more in ({}, {"cluster": "auto"}))
    without, with_groups = (found.disclosure(c, found.prepare(c)) for c in (plain, grouped))
    assert set(with_groups.requests) - set(without.requests) == {"warm"}
    assert set(with_groups.extras) - set(without.extras) == {"signature"}


@pytest.mark.parametrize("kind", ["finetune", "fedper", "ditto"])
def test_personal_models_within_groups(kind: str) -> None:
    _task, _run, rows = rounds_of("quickstart", **TWO, personal=kind, warm_epochs=1)
    assert all(row["failed"] == 0 for row in rows)
    assert rows[-1]["groups"] == 2
    assert 0 <= rows[-1]["accuracy"] <= 1


def test_updates_and_judgements_of_groups_are_summed() -> None:
    _task, _run, rows = rounds_of("quickstart", **TWO, secure="secagg+", per_round=8, warm_epochs=1)
    assert rows[-1]["groups"] == 2
    assert 0 <= rows[-1]["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tabular", "quickstart"])
def test_groups_are_the_same_again_and_go_on_after_a_stop(recipe: str, tmp_path: Path) -> None:
    settings = {**SMALL[recipe], **TWO, "rounds": 3, "warm_epochs": 2, "regroup": 2}
    whole = make_rounds(recipe, settings, tmp_path / "whole")
    assert make_rounds(recipe, settings | {"rounds": 1}, tmp_path / "part")["rounds"] == 1
    again = make_rounds(recipe, settings, tmp_path / "part", resume=True)
    assert again["digest"] == whole["digest"]
    assert again["groups"] == whole["groups"]


@pytest.mark.slow
def test_the_report_shows_the_groups_of_any_task(tmp_path: Path) -> None:
    summary = execute("tabular", {**SMALL["tabular"], **TWO, "rounds": 1, "warm_epochs": 1}, tmp_path / "whole")
    assert len(summary["groups"]) == 2
    assert (tmp_path / "whole" / "groups.png").is_file()
    assert "Groups" in (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")


def test_each_group_trains_by_settings_of_its_own() -> None:
    _, plain, _ = rounds_of("quickstart", **TWO, warm_epochs=1)
    told = {"per_group": "given", "per_group.table": "g0: lr=0.01; g1: epochs=2"}
    _, other, _ = rounds_of("quickstart", **TWO, **told, warm_epochs=1)
    start, one, two = (run.arrays for run in (Run(task_start()), plain, other))
    for group, further in (("g0", False), ("g1", True)):
        a, b = (sum(float(np.linalg.norm(v - start[k])) for k, v in part_of(x, group).items()) for x in (one, two))
        assert (b > a) == further


def task_start() -> Any:
    return find("quickstart").prepare(resolve(find("quickstart").config, SMALL["quickstart"])).initial()


@pytest.mark.parametrize("recipe", ["quickstart", "groups"])
def test_a_group_goes_on_with_the_candidate_its_clients_judge_best(recipe: str) -> None:
    chosen = {"per_group": "chosen", "per_group.lr": "1e-6,0.3", "per_group.rounds": 1, "judge_by": "vali"}
    told = {"warm_epochs": 1, "epochs": 5, "rounds": 4} | ({"references": 0} if recipe == "groups" else {})
    task, run, rows = rounds_of(recipe, **TWO, **chosen, **told)
    state = Grouping.from_memory(run.memory)
    assert state is not None
    assert rows[1]["accuracy"] > rows[0]["accuracy"] + 0.1  # the rate that moves nothing is tried first
    assert rows[3]["accuracy"] > rows[0]["accuracy"] + 0.1  # and not chosen
    assert task.exhibits.findings is not None
    assert task.exhibits.findings(run)["per_group"] == "g0: lr=0.3; g1: lr=0.3"


@pytest.mark.slow
def test_a_model_and_data_from_python_in_groups(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = {f"h{i}": draw.normal(size=(60, 4)).astype(np.float32) for i in range(8)}
    data = {c: (v, (v[:, int(c[1:]) % 2] > 0).astype(np.int64)) for c, v in x.items()}  # two concepts, by hospital
    told: dict[str, Any] = {"rounds": 3, "per_round": 1.0, "epochs": 10, "lr": 0.5, "out": tmp_path / "run"}
    result = mutirao.run(lambda: nn.Linear(4, 2), data, cluster="auto", warm_epochs=5, **told)
    assert result.summary["groups"] == {"g0": ["h0", "h2", "h4", "h6"], "g1": ["h1", "h3", "h5", "h7"]}
    assert result.summary["groups_judged_by"] == "clients"
    assert result.final["accuracy"] > 0.85
    even = result.model(group="g0").weight.detach().numpy()
    assert np.abs(even[1] - even[0]).argmax() == 0  # it looks at the first number, as these hospitals do
    with pytest.raises(ConfigError, match="a model for each group; give group='g0'; there are g0, g1"):
        result.model()
