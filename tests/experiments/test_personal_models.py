"""Personal models in the recipes: what is judged, who is new, what is refused, and that nothing personal travels."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from torch import nn

import mutirao as mu
from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.client_evaluation import summarise
from mutirao.core.rounds import Run
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.flower.client import STATE
from mutirao.errors import ConfigError
from mutirao.experiments.personal_models import ClientRoles
from mutirao.experiments.task import Recipe, Task, find
from mutirao.flower.messages import unpack
from mutirao.personalization import NAMES, FedPer
from mutirao.personalization.handler import PREFIX
from mutirao.runs.execute import execute
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too

SMALL = {"clients": 8, "per_round": 4, "epochs": 1, "rounds": 2}
HEAD = {"2.weight", "2.bias"}  # of the quickstart's network
KINDS = [name for name in NAMES if name not in ("none", "fedbn")]  # the quickstart has no batch normalisation


def settings(kind: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "personal": kind, **{k.replace("__", "."): v for k, v in more.items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_judged_by_their_own_models_and_new_ones_apart(kind: str, tmp_path: Path) -> None:
    summary = execute("quickstart", settings(kind, personal__new=0.25), tmp_path / "run")
    final = summary["final"]
    assert (final["accuracy_clients"], final["new_accuracy_clients"]) == (6, 2)
    for prefix in ("", "new_"):
        worst, decile, mean = (final[f"{prefix}accuracy{which}"] for which in ("_worst", "_worst_decile", ""))
        assert 0 <= worst <= decile <= mean <= 1
        assert final[f"{prefix}loss_worst"] >= final[f"{prefix}loss"]
    assert summary["judge"] == "accuracy"
    assert summary["directions"]["new_accuracy_worst_decile"] == "higher"
    assert ("global_accuracy" in final) == (kind in ("ditto", "finetune"))
    with (tmp_path / "run" / "clients.csv").open(newline="") as lines:
        asked = {row["client"] for row in csv.DictReader(lines)}
    config = resolve(find("quickstart").config, settings(kind, personal__new=0.25))
    assert asked.isdisjoint(ClientRoles.of(config, [f"c{i}" for i in range(8)]).new)  # type: ignore[arg-type]


def test_the_mean_is_that_of_each_client_asked_by_itself() -> None:
    config = resolve(find("quickstart").config, settings("fedper", per_round=8))  # so that each has a head
    task = find("quickstart").prepare(config)
    fleet, run = LocalFleet(task.handler, task.population), Run(task.initial(), seed=0)
    *_, last = find("quickstart").flow(fleet, config, task, run)
    trainer: Any = task.handler
    own = []
    for name, data in task.population.items():
        kept = {k.removeprefix(PREFIX): v for k, v in fleet.states[name].items()}
        own.append(trainer.trainer.evaluate({**run.arrays, **kept}, data)["accuracy"])
    assert last.row["accuracy"] == pytest.approx(np.mean(own))
    assert last.row["accuracy_worst"] == pytest.approx(min(own))


@pytest.mark.parametrize("higher", [True, False])
def test_the_worst_decile_is_the_mean_of_the_tenth_that_fares_worst(higher: bool) -> None:
    values = np.random.default_rng(0).permutation(np.arange(25) / 25)
    ordered = np.sort(values) if higher else np.sort(values)[::-1]
    assert summarise("m", values.tolist(), higher)["m_worst_decile"] == pytest.approx(ordered[:3].mean())


@pytest.mark.parametrize("kind", ["fedper", "fedrep", "fedrecon"])
def test_the_head_is_neither_in_the_model_nor_in_the_traffic(kind: str, tmp_path: Path) -> None:
    whole = execute("quickstart", settings("none"), tmp_path / "whole")
    own = execute("quickstart", settings(kind), tmp_path / "own")
    head = 4 * (64 * 10 + 10)
    assert whole["bytes_down"] - own["bytes_down"] == head * 4 * 2
    assert whole["bytes_up"] - own["bytes_up"] == head * 4 * 2
    task = find("quickstart").prepare(resolve(find("quickstart").config, settings(kind)))
    assert HEAD.isdisjoint(task.initial())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_cut_in_the_middle_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = execute("quickstart", settings(kind, rounds=4), tmp_path / "straight")
    execute("quickstart", settings(kind, rounds=2), tmp_path / "cut")
    resumed = execute("quickstart", settings(kind, rounds=4), tmp_path / "cut", resume=True)
    assert resumed["digest"] == straight["digest"]
    assert resumed["final"] == straight["final"]


@pytest.mark.parametrize("kind", KINDS)
def test_over_flower_all_is_as_in_process_and_nothing_personal_crosses_the_wire(kind: str) -> None:
    recipe = find("quickstart")
    config = resolve(recipe.config, settings(kind, rounds=3, personal__new=0.2))
    task = recipe.prepare(config)
    seen: list[set[str]] = []

    def listen(message: Message, reply: Message) -> list[Message]:
        for content in (message.content, reply.content):
            for record in content.values():
                if isinstance(record, ArrayRecord):
                    seen.append(set(unpack(record)))
        return [reply]

    grid = LoopGrid(client_app(lambda _: task))
    for name in task.population:
        grid.meddlers[grid.join(name=name)] = listen
    there, here = Run(task.initial()), Run(task.initial())
    list(recipe.flow(FlowerFleet(grid, timeout=5, greet=5), config, task, there))
    alone = LocalFleet(lambda request, site: task.handler(request, site), task.population)  # one by one, as there
    list(recipe.flow(alone, config, task, here))
    assert digest(there.arrays) == digest(here.arrays)
    for mine, theirs in zip(here.history, there.history, strict=True):
        assert {k: v for k, v in mine.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
    if kind in ("fedper", "fedrep", "fedrecon"):
        assert seen
        assert all(HEAD.isdisjoint(names) for names in seen)
    kept = {n: s for n, s in grid.nodes.items() if isinstance(s.state.get(STATE), ArrayRecord)}
    states = {str(s.node_config["name"]): unpack(s.state[STATE]) for s in kept.values()}  # type: ignore[arg-type]
    assert {c: digest(s) for c, s in states.items()} == {c: digest(s) for c, s in alone.states.items()}
    assert bool(states) == (kind not in ("finetune", "fedrecon"))


@pytest.mark.parametrize(
    ("recipe", "more", "words"),
    [
        ("quickstart", {"personal": "fedbn"}, "personal=fedbn: the model has no trainable batch normalisation"),
        ("quickstart", {"personal": "fedper", "centralised": True}, "centralised=true has one client"),
        ("quickstart", {"personal": "fedper", "secure": "secagg+"}, "secure=secagg.* reveals only sums"),
        ("quickstart", {"personal": "ditto", "privacy": "local"}, "with privacy=local clients report no metrics"),
        ("quickstart", {"personal": "fedper", "personal.layers": "9"}, "personal.layers: '9' matches none"),
        (
            "quickstart",
            {"personal": "fedper", "personal.new": 0.99, "clients": 3},
            "none of 3 clients is left to train",
        ),
        ("quickstart", {"personal": "fedper", "personal.new": 1.5}, "personal=fedper: new is 1.5"),
        ("quickstart", {"personal": "ditto", "personal.lam": -1.0}, "personal=ditto: lam is -1.0"),
        ("quickstart", {"personal": "fedprox"}, "no part is called 'fedprox'"),
        ("quickstart", {"personal": "fedper", "aggregate": "scaffold"}, "needs the request's array 'control'"),
        ("groups", {"personal": "fedper"}, "personal=fedper: the flow of this recipe has its own models"),
        ("recsys", {"personal": "ditto"}, "personal=ditto: the flow of this recipe has its own models"),
        ("tabular", {"personal": "fedper", "test": 0.0}, "have no test data of their own"),
        ("tabular", {"personal": "fedper", "model": "linear"}, "all trained arrays would be personal"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_the_first_round(
    recipe: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        execute(recipe, {"rounds": 1, **more}, tmp_path / "run")
    assert not (tmp_path / "run" / "history.csv").exists()


def test_a_task_whose_clients_are_no_trainer_is_refused_by_name() -> None:
    def task(config: Any) -> Task:
        made = find("quickstart").task(resolve(find("quickstart").config, SMALL))
        return Task(lambda request, site: None, made.population, dict)  # type: ignore[arg-type, return-value]

    recipe = Recipe(find("quickstart").config, task)
    with pytest.raises(ConfigError, match="personal=fedper is for tasks whose clients are a Trainer"):
        recipe.prepare(resolve(recipe.config, settings("fedper")))


def test_who_is_new_is_decided_by_the_seed_alone() -> None:
    names = [f"c{i}" for i in range(20)]
    kind = FedPer(new=0.1)
    assert kind.new_clients(names, 0) == kind.new_clients(names[::-1], 0)
    assert len(kind.new_clients(names, 0)) == 2
    assert len({kind.new_clients(names, seed) for seed in range(5)}) > 1
    assert FedPer(new=0.01).new_clients(names, 0)  # at least one
    assert not FedPer().new_clients(names, 0)


OTHERS = {
    "ranking": {"clients": 6, "per_round": 3, "queries": 50, "aggregate": "fedavg"},
    "selection": {"clients": 6, "per_round": 4, "epochs": 1},
    "cifar10": {"clients": 4, "per_round": 3, "epochs": 1, "samples": 10, "model": "small"},
    "images": {"clients": 4, "per_round": 3, "samples": 10},
    "tabular": {"clients": 6, "per_round": 4, "epochs": 1, "partition": "iid"},
    "cytology": {
        "clients": 3,
        "side": 1024,
        "slides": 2,
        "views": 1,
        "weights": "random",
        "trainable": "last_block",
        "cache": False,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedper", "fedrep", "finetune", "ditto"])
@pytest.mark.parametrize("recipe", list(OTHERS))
def test_two_rounds_of_other_recipes(recipe: str, kind: str, tmp_path: Path) -> None:
    summary = execute(recipe, {**OTHERS[recipe], "rounds": 2, "personal": kind, "personal.new": 0.2}, tmp_path / "run")
    final, judge = summary["final"], summary["judge"]
    assert 0 <= final[f"{judge}_worst"] <= final[judge] <= 1
    assert final["new_accuracy_clients"] == 1
    assert final["loss_clients"] == OTHERS[recipe]["clients"] - 1


def test_fedbn_keeps_the_normalisation_of_a_pretrained_body(tmp_path: Path) -> None:
    whole = execute("cytology", {**OTHERS["cytology"], "rounds": 1}, tmp_path / "whole")
    own = execute("cytology", {**OTHERS["cytology"], "rounds": 1, "personal": "fedbn"}, tmp_path / "own")
    assert own["bytes_down"] < whole["bytes_down"]
    assert own["judge"] == "balanced_accuracy"


@pytest.mark.parametrize("select", ["aoiu", "powerofchoice"])
@pytest.mark.parametrize("aggregate", ["fedavgm", "fedrisk", "fedprox", "krum", "fednova", "qfedavg"])
def test_any_selector_and_aggregator_goes_with_it(select: str, aggregate: str, tmp_path: Path) -> None:
    more = {"select": select, "aggregate": aggregate}
    summary = execute("quickstart", {**settings("fedrep"), **more}, tmp_path / "run")
    assert 0 <= summary["final"]["accuracy"] <= 1


def test_a_site_may_be_asked_what_it_takes() -> None:
    recipe = find("quickstart")
    for kind in ("none", "fedper"):
        config = resolve(recipe.config, settings(kind) | {"clients_every": -1})
        asked = recipe.disclosure(config, recipe.prepare(config)).requests
        assert ("evaluate" in asked) == (kind == "fedper")


@pytest.mark.slow
def test_from_python_a_model_of_which_a_part_stayed_with_clients_is_not_handed_out(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = draw.normal(size=(120, 4)).astype(np.float32), draw.integers(0, 2, 120)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    kept = mu.run(model, data, clients=4, rounds=1, personal="fedbn", out=tmp_path / "kept", progress="quiet")
    assert "1.weight" not in kept.arrays()
    with pytest.raises(ConfigError, match="of personal=fedbn a part stayed with each client"):
        kept.model()
    whole = mu.run(model, data, clients=4, rounds=1, personal="ditto", out=tmp_path / "whole", progress="quiet")
    assert isinstance(whole.model(), nn.Module)
