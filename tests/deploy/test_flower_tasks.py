"""A Flower run's configuration becomes a recipe's task, and a node one of its clients."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from loopgrid import NAMES, LoopGrid, connected, identity, softmax_task
from mutirao.core.fleet import Request
from mutirao.deploy.flower import FlowerFleet, client_app, run_tasks
from mutirao.deploy.flower.run_tasks import recipe_from, recipe_task, settings_in, task_from
from mutirao.errors import ConfigError

__all__ = ["identity"]  # a fixture that holds for all tests here, too


def test_a_run_configuration_holds_settings_and_assignments() -> None:
    text = settings_in(
        {
            "recipe": "quickstart",
            "rounds": 3,
            "lr": 0.2,
            "partition.alpha": 0.7,
            "partition": "dirichlet",
            "set": 'clients=4 aggregate=fedavgm aggregate.momentum=0.8 data="digits"',
            "out": "somewhere",
            "resume": False,
            "timeout": 30,
        }
    )
    name, config = recipe_from(text)
    assert name == "quickstart"
    assert (config.rounds, config.lr, config.clients, config.data) == (3, 0.2, 4, "digits")
    assert config.partition.settings["alpha"] == 0.7
    assert (config.aggregate.name, config.aggregate.settings["momentum"]) == ("fedavgm", 0.8)


@pytest.mark.parametrize(
    ("run_config", "text"),
    [
        ({"recipe": "quickstar"}, "did you mean 'quickstart'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": "many"}, "rounds: 'many' is not a whole number"),
        ({"set": "lr"}, "not of the form key=value"),
        ({"set": "data='x"}, "No closing quotation"),
    ],
)
def test_a_wrong_run_configuration_is_refused_in_one_line(run_config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_in(run_config)


def test_a_process_builds_its_task_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task_from.cache_clear()
    recipe, built = run_tasks.find("quickstart"), []
    counted = dataclasses.replace(recipe, task=lambda config: built.append(config.lr) or recipe.task(config))
    monkeypatch.setattr(run_tasks, "find", lambda name: counted)
    grid = LoopGrid(client_app(), recipe="quickstart", clients=2, set="lr=0.2")
    for i in range(2):
        grid.join(**{"partition-id": i})
    fleet = FlowerFleet(grid, timeout=20, greet=20)
    assert fleet.clients() == ["c0", "c1"]
    start = recipe_task(Context(7, 1, {}, RecordDict(), grid.run_config)).initial()
    for number in (1, 2):
        assert (
            len(fleet.ask({c: Request("train", start, {"seed": 0, "round": number}) for c in fleet.clients()}).replies)
            == 2
        )
    assert built == [0.2]


def test_a_node_without_a_name_is_told_how_to_have_one(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana"])
    grid.join()
    assert fleet.clients() == ["ana"]
    assert "--node-config" in caplog.text


def test_a_name_the_task_does_not_have_is_a_clear_failure() -> None:
    task = softmax_task()
    _, fleet = connected(task, ["ana", "anna"])
    fleet.clients()
    answers = fleet.ask({n: Request("train", task.initial()) for n in ("ana", "anna")})
    assert list(answers.replies) == ["ana"]
    assert answers.failures["anna"].reason.startswith("ConfigError: the task has no client 'anna'; did you mean 'ana'?")


def test_partitions_of_a_simulation_are_the_clients_in_order() -> None:
    grid = LoopGrid(client_app(lambda _: softmax_task()))
    for i in (4, 2, 0, 1, 3, 5):
        grid.join(**{"partition-id": i, "num-partitions": 6})
    assert FlowerFleet(grid, greet=1).clients() == NAMES  # the sixth has no client


ROOT = Path(__file__).parents[2]


def test_the_example_names_a_recipe_and_settings_that_exist() -> None:
    table = tomllib.loads((ROOT / "examples/flower-quickstart/pyproject.toml").read_text())
    name, config = recipe_from(settings_in(table["tool"]["flwr"]["app"]["config"]))
    assert (name, config.rounds, config.clients) == ("quickstart", 3, 3)
