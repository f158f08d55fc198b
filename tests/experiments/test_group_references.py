"""What groups are compared with, how clients choose what they get, and that what they choose by is never trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from group_runs import SMALL, go, start
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError, Refused
from mutirao.experiments.group_client import TAKEN, split_held_out
from mutirao.experiments.group_evaluation import choose_served, stored_comparison, warnings_of
from mutirao.experiments.task import Task, find
from mutirao.report import execute
from mutirao.training.samples import ClientData, Samples

RECIPE = find("groups")
SHARDS = {"partition": {"name": "shards", "per_client": 3}, "references": -1, "founders": 0}


def test_groups_stay_unless_another_way_is_surely_better() -> None:
    even = [0.9, 0.8, 1.0, 0.9]
    assert choose_served({"groups": even, "alone": even})[0] == "groups"
    assert choose_served({"groups": even, "alone": [0.95, 0.7, 1.0, 1.0]})[0] == "groups"  # within a standard error
    held = {"groups": [0.5, 0.6, 0.5, 0.4], "finetuned": [0.7, 0.8, 0.8, 0.6], "alone": [0.9, 0.9, 0.8, 0.8]}
    way, why = choose_served(held)
    assert way == "alone"
    gain = np.subtract(held["alone"], held["groups"])
    assert f"{100 * gain.mean():.1f} points above" in why
    assert f"(standard error {100 * gain.std(ddof=1) / 2:.1f})" in why
    assert choose_served({"groups": [0.1], "alone": [1.0]})[0] == "groups"  # one client is no evidence
    assert choose_served({"groups": [], "alone": []})[1] == "too few clients have held-out samples to choose by"


def test_where_groups_are_worse_that_is_said() -> None:
    means = {"groups": 0.6, "groups_finetuned": 0.8, "finetuned": 0.5, "alone": 0.9}
    assert warnings_of(means, "alone") == [
        "groups serve clients 30.0 points worse than training alone does (accuracy 60.0% against 90.0%); "
        "they get training alone instead"
    ]
    assert warnings_of({**means, "alone": 0.6}, "groups") == []
    assert warnings_of(means, "groups", "rmse", higher_is_better=False) == [
        "groups serve clients 0.1 worse than one FedAvg model, fine-tuned does (rmse 0.6 against 0.5)"
    ]


def test_what_is_kept_back_is_a_share_by_lot_and_nothing_is_lost() -> None:
    given = Samples(np.zeros((40, 2), np.float32), np.arange(40) % 4, np.arange(5, 35))
    kept, held = split_held_out(given, 0.1, 0, "ana")
    assert len(held) == 3
    assert sorted([*kept.index, *held.index]) == list(range(5, 35))
    assert np.array_equal(split_held_out(given, 0.1, 0, "ana")[1].index, held.index)
    assert not np.array_equal(split_held_out(given, 0.1, 0, "bia")[1].index, held.index)
    assert split_held_out(given, 0.0, 0, "ana")[0] is given
    assert len(split_held_out(given.first(1), 0.5, 0, "ana")[1]) == 0  # somebody must be left to train on


def test_held_samples_are_not_trained_on_by_anybody() -> None:
    _, task, run, _ = start(**SHARDS)
    member, data = task.knows.member, task.population["c3"]
    assert member.held_out_share == 0.1
    _, held = member.split(Request("train", {}, {"seed": 0}), Site("c3", data))
    labels = data.train.y.clone()
    labels[torch.from_numpy(held.index)] = (labels[torch.from_numpy(held.index)] + 1) % 10
    other = replace(data, train=Samples(data.train.x, labels, data.train.index))
    for do, same in (("train", True), ("warm", False)):  # who is alike is decided by all samples
        request = Request(do, run.arrays, {"seed": 0, "round": 1})
        one, two = (member(request, Site("c3", d)) for d in (data, other))
        assert (digest(one.arrays | one.extras) == digest(two.arrays | two.extras)) == same


def test_one_label_mix_a_client_is_served_better_than_by_groups_and_nothing_leaves_for_it() -> None:
    rounds, run, fleet, _ = go(rounds=4, clients=20, **SHARDS)
    row, told = rounds[-1].row, stored_comparison(run)
    assert "accuracy_alone" not in rounds[0].row
    assert told["served"] != "groups"
    assert row["accuracy_served"] == told["means"][told["served"]] > row["accuracy"] + 0.05
    assert row["gain_alone"] == pytest.approx(row["accuracy_served"] - row["accuracy_alone"])
    assert row["gain_finetuned"] == pytest.approx(row["accuracy_served"] - row["accuracy_finetuned"])
    assert told["means"]["groups"] == pytest.approx(row["accuracy"])
    assert any("points worse than training alone" in line for line in told["warnings"])
    asked = {c: r for batch in fleet.asked for c, r in batch.items() if r.do == "fit"}
    assert len(asked) == 20
    for c in ("c03", "c17"):
        reply = fleet.fleet.handler(asked[c], Site(c, fleet.fleet.population[c]))
        assert not reply.arrays
        assert not reply.extras
        assert any(key.startswith(TAKEN) for key in fleet.fleet.states[c])


def test_alone_is_what_a_client_gets_by_itself_with_the_epochs_it_spent() -> None:
    _, run, _, task = go(rounds=2, cluster={"name": "kmeans", "groups": 2}, head="full", founders=0, references=-1)
    told, trainer = stored_comparison(run), task.knows.member.trainers(10)
    assert told["alone_epochs"] == 2.0
    assert told["served"] == "groups"
    assert told["held"] == {}
    scores = []
    for c, data in task.population.items():
        about = {"seed": 0, "round": 3, "epochs": 2}
        arrays = trainer(Request("train", trainer.initial(0), about), Site(c, data)).arrays
        x, y = data.test.batch(slice(0, len(data.test)))
        with torch.no_grad():
            scores.append(float((trainer.fill(arrays).eval()(x).argmax(1) == y).float().mean()))
    assert told["means"]["alone"] == pytest.approx(np.mean(scores), abs=0.01)


def test_the_fedavg_it_is_compared_with_is_the_one_of_cluster_one() -> None:
    settings: dict[str, Any] = {"rounds": 3, "head": "full", "founders": 0, "references": -1}
    groups, one = (stored_comparison(go(cluster=c, **settings)[1]) for c in ({"name": "kmeans", "groups": 3}, "one"))
    assert groups["fedavg_rounds"] == one["fedavg_rounds"] == 3
    assert groups["means"]["finetuned"] == pytest.approx(one["means"]["groups_finetuned"], abs=1e-6)
    assert one["means"]["finetuned"] == one["means"]["groups_finetuned"]


def test_clients_keep_the_model_they_are_served_with() -> None:
    _, run, fleet, _ = go(rounds=1, serve="alone", cluster="one", founders=0, references=1)
    assert stored_comparison(run)["why"] == "serve=alone"
    models = [fleet.fleet.states[c][TAKEN + "2.bias"] for c in ("c0", "c1")]
    assert not np.array_equal(*models)
    assert run.sites  # and a run that goes on has them still


@pytest.mark.slow
def test_references_are_the_same_after_a_kill(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(run: Run, done: Round, task: Task) -> None:
        if run.round == 1:
            raise Killed

    config = resolve(RECIPE.config, {**SMALL, "rounds": 2, "founders": 0, "references": 1})
    with pytest.raises(Killed):
        execute("groups", config, tmp_path / "a", watch=kill, pictures=False)
    resumed = execute("groups", config, tmp_path / "a", resume=True, pictures=False)
    straight = execute("groups", config, tmp_path / "b")
    assert resumed["references"] == straight["references"]
    assert resumed["digest"] == straight["digest"]
    text = (tmp_path / "b" / "report.html").read_text()
    assert "the models that clients are given:" in text


def test_what_must_not_be_told_is_not_compared() -> None:
    def exchange(**more: Any) -> Any:
        config = resolve(RECIPE.config, {**SMALL, **more})
        return RECIPE.disclosure(config, RECIPE.prepare(config))

    assert "fit" not in exchange().requests
    told = exchange(references=3)
    assert "fit" in told.requests
    assert "accuracy_held" in told.metrics
    assert "accuracy_held" not in exchange(references=3, cluster="one").metrics
    private = {
        "privacy": {"name": "local", "noise": 1.0},
        "head": "full",
        "signature": {"name": "bias", "epsilon": 9.0},
    }
    assert "fit" not in exchange(references=3, **private).requests
    with pytest.raises(ConfigError, match="serve"):
        resolve(RECIPE.config, {"serve": "magic"})


def test_a_client_without_samples_to_spare_is_asked_all_the_same() -> None:
    _, task, _, _ = start(references=-1)
    data = task.population["c0"]
    single = ClientData(data.train.first(1), data.test)
    reply = task.handler(Request("fit", task.initial(), {"seed": 0, "round": 1, "fit_epochs": 1}), Site("c0", single))
    assert "accuracy_held" not in reply.metrics


@pytest.mark.parametrize("recipe", ["quickstart", "tabular"])
def test_groups_of_any_task_whose_clients_judge_are_compared_if_that_is_asked_for(recipe: str) -> None:
    from test_groups_of_any import TWO, rounds_of

    task, run, rows = rounds_of(recipe, **TWO, warm_epochs=1, references=-1)
    row, told = rows[-1], stored_comparison(run)
    assert told["judge"] == task.judge
    assert told["clients"] == len(task.population)
    assert told["held"] == {}
    sign = 1 if task.higher_is_better else -1
    for way in ("alone", "finetuned"):
        assert row[f"gain_{way}"] == pytest.approx(sign * (told["means"]["groups"] - told["means"][way]))
    assert told["means"]["groups"] == pytest.approx(row[task.judge])
    single = rounds_of(recipe, cluster="alone", per_round=1.0, references=0)[2][-1]
    spent = rounds_of(recipe, **TWO, warm_epochs=1, per_round=1.0, references=1)[2][-1]
    assert spent[f"{task.judge}_alone"] == pytest.approx(single[task.judge], abs=0.02)  # what `cluster=alone` gives


@pytest.mark.parametrize("times", [-1, 10**9, "many", 1.5])
def test_how_often_a_client_is_to_train_is_held_to_bounds(times: Any) -> None:
    config = resolve((found := find("quickstart")).config, {"cluster": "one", "clients": 4})
    task = found.prepare(config)
    request = Request("fit", task.initial(), {"seed": 0, "round": 1, "times": times})
    with pytest.raises(Refused, match=r"told\.times"):
        task.handler(request, Site("c0", task.population["c0"]))
