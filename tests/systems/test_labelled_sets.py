"""The recipes on labelled sets take any of them, by name or path, with a network that fits; users are clients."""

from typing import Any

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.simulation.local_fleet import LocalFleet
from sets import write_classes, write_four, write_leaf

RECIPES = ("quickstart", "selection", "groups", "cifar10")
SMALL = {"rounds": 1, "clients": 2, "per_round": 2, "epochs": 1, "lr": 0.01, "partition": "iid"}


def task_of(recipe: str, **more: Any) -> tuple[Any, Task]:
    settings = SMALL | ({"model": "small"} if recipe not in ("quickstart", "images") else {}) | more
    config = resolve(find(recipe).config, {**settings})
    return config, find(recipe).task(config)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("sets")
    write_four(home / "idx", train=60, test=20)
    return {
        "idx": str(home / "idx"),
        "leaf": str(write_leaf(home / "leaf", writers=4, count=15)),
        "pictures": str(write_classes(home / "pictures", count=30)),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["idx", "leaf", "pictures"])
def test_every_form_of_data_trains_in_every_recipe(recipe: str, kind: str, sets: dict[str, str]) -> None:
    config, task = task_of(recipe, data=sets[kind])
    fleet = LocalFleet(task.handler, dict(task.population))
    run = Run(task.initial())
    rows = [done.row for done in find(recipe).flow(fleet, config, task, run)]
    assert rows[0]["replied"] == 2
    assert np.isfinite(rows[0]["loss"])
    assert task.classes == {"idx": 10, "leaf": 5, "pictures": 2}[kind]


@pytest.mark.parametrize("recipe", ["quickstart", "selection", "cifar10"])
def test_users_of_leaf_are_the_clients_and_judge_by_their_own_samples(recipe: str, sets: dict[str, str]) -> None:
    _, task = task_of(recipe, data=sets["leaf"], partition="natural", clients=50)
    assert len(task.population) == 4
    held = [task.population[c] for c in task.population]
    assert [(len(data.train), len(data.test)) for data in held] == [(15, 4)] * 4
    mine = [{x.numpy().tobytes() for x in data.train.batch(slice(0, 15))[0]} for data in held]
    assert not mine[0] & mine[1]


def test_of_many_users_some_are_drawn_with_a_word(sets: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    _, task = task_of("quickstart", data=sets["leaf"], partition="natural", clients=3)
    assert len(task.population) == 3
    assert "3 of 4 users are sampled; clients=4 takes all" in caplog.text


@pytest.mark.parametrize("recipe", RECIPES)
def test_natural_clients_need_data_that_have_them(recipe: str) -> None:
    model = {"selection": {"model": "auto"}}.get(recipe, {})
    with pytest.raises(ConfigError, match="partition=natural: 'digits' does not name the owners"):
        task_of(recipe, data="digits", partition="natural", **model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_set_that_is_not_there_is_one_line(recipe: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder or file 'nowhere'"):
        task_of(recipe, data="nowhere")


def test_a_network_for_pictures_is_refused_for_rows_of_numbers() -> None:
    with pytest.raises(ConfigError, match="model: cnn is for pictures, 'digits' has rows of numbers"):
        task_of("selection", data="digits", model="cnn")


def test_a_dense_network_takes_pictures_too(sets: dict[str, str]) -> None:
    _, task = task_of("selection", data=sets["idx"], model="mlp")
    assert sorted(a.shape for a in task.initial().values()) == [(10,), (10, 64), (64,), (64, 784)]


@pytest.mark.parametrize("recipe", [*RECIPES, "images"])
def test_judged_by_validation_data_no_test_sample_is_looked_at(
    recipe: str, monkeypatch: pytest.MonkeyPatch, sets: dict[str, str]
) -> None:
    from dataclasses import replace

    from mutirao.datasets import labelled

    def judged(read: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(labelled, "load_labelled", read)
        config, task = task_of(recipe, data=sets["idx"], judge_by="vali", clients_every=1)
        fleet = LocalFleet(task.handler, dict(task.population))
        return [done.row for done in find(recipe).flow(fleet, config, task, Run(task.initial()))]

    read = labelled.load_labelled
    plain = judged(read)

    def blind(data: str, seed: int) -> labelled.Labelled:
        found = read(data, seed)
        return replace(found, x_test=255 - found.x_test, y_test=(found.y_test + 1) % len(found.names))

    kept = [{k: v for k, v in row.items() if "seconds" not in k} for row in judged(blind)]
    assert kept == [{k: v for k, v in row.items() if "seconds" not in k} for row in plain]
    assert np.isfinite(plain[0]["accuracy"])
