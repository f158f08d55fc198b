"""Noise that grows with the client: how much, on which inputs, and in which recipes."""

import doctest
from typing import Any

import numpy as np
import pytest

import mutirao.partitioning.feature_skew
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.datasets.labelled import load_labelled
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.partitioning import iid
from mutirao.partitioning.feature_skew import deviations, disturb, disturb_rows, disturb_test, noise
from mutirao.simulation.local_fleet import LocalFleet

RECIPES = ("quickstart", "selection", "groups", "cifar10")
SMALL = {"rounds": 2, "clients": 4, "per_round": 4, "epochs": 1, "lr": 0.05, "clients_every": 1}
NOISE = {"partition": {"name": "noise", "sigma": 0.5}}


def prepared(recipe: str, **more: Any) -> tuple[Any, Task]:
    model = {"model": "small", "samples": 20} if recipe == "cifar10" else {}
    config = resolve(find(recipe).config, SMALL | NOISE | model | more)
    return config, find(recipe).prepare(config)


def rows(samples: Any) -> np.ndarray[Any, Any]:
    return np.asarray(samples.batch(slice(0, len(samples)))[0].numpy())


def test_the_examples_in_the_docs_are_true() -> None:
    result = doctest.testmod(mutirao.partitioning.feature_skew)
    assert result.attempted
    assert not result.failed


def test_deviations_are_the_papers_and_the_codes() -> None:
    np.testing.assert_allclose(deviations(10, 0.1) ** 2, [0.1 * i / 10 for i in range(1, 11)])
    np.testing.assert_allclose(deviations(10, 0.1, "code"), [0.1 / 9 * i for i in range(10)])
    assert deviations(1, 0.1, "code").tolist() == [0.0]


def test_rows_are_dealt_as_iid_deals_them() -> None:
    y = np.arange(103) % 5
    ours, plain = (deal(y, 4, np.random.default_rng(0)) for deal in (noise, iid))
    assert all(np.array_equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_each_client_has_noise_of_its_own_level_and_nobody_else_does() -> None:
    x = np.full((40_000, 5), 0.5, np.float32)
    x[:, 1] = np.linspace(0, 1, len(x))
    parts = noise(np.zeros(len(x) - 4), 4, np.random.default_rng(0))  # the last four rows are nobody's
    seen = disturb_rows(deviations(4, 0.2).tolist(), 7, parts, x)
    for part, level in zip(parts, deviations(4, 0.2), strict=True):
        added = seen[part] - x[part]
        assert added.std() == pytest.approx(level, rel=0.02)
        assert abs(added.mean()) < 5 * level / added.size**0.5
        assert abs(np.corrcoef(added[:, 0], added[:, 1])[0, 1]) < 0.05
    assert np.array_equal(seen[-4:], x[-4:])
    assert np.array_equal(x, np.where(np.arange(5) == 1, np.linspace(0, 1, len(x))[:, None], 0.5).astype(np.float32))
    assert np.array_equal(seen, disturb_rows(deviations(4, 0.2).tolist(), 7, parts, x))
    assert not np.array_equal(seen, disturb_rows(deviations(4, 0.2).tolist(), 8, parts, x))


def test_bytes_get_the_same_noise_on_their_own_scale_and_are_not_cut() -> None:
    x = np.full((50, 3, 8, 8), 250, np.uint8)
    seen = disturb(x, 0.3, np.random.default_rng(0))
    plain = disturb((x / 255).astype(np.float32), 0.3, np.random.default_rng(0))
    np.testing.assert_allclose(seen / 255, plain, atol=1e-5)
    assert seen.max() > 255
    with pytest.raises(ConfigError, match="inputs are int64"):
        disturb(np.zeros((3, 2), np.int64), 0.1, np.random.default_rng(0))


def test_without_levels_nothing_is_changed_or_copied() -> None:
    x = np.ones((4, 2), np.float32)
    assert disturb_rows((), 0, [np.arange(4)], x) is x
    assert disturb_test((), 0, 2, x) is x


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_labelled_recipe_trains_on_it_and_the_common_test_set_is_clean(recipe: str) -> None:
    config, task = prepared(recipe)
    run = Run(task.initial())
    history = [d.row for d in find(recipe).flow(LocalFleet(task.handler, task.population), config, task, run)]
    assert history[-1]["failed"] == 0
    assert history[-1]["accuracy_clients"] == 4
    np.testing.assert_allclose(task.noise, deviations(4, 0.5))
    clients: Any = task.population
    scale = 255 if recipe == "cifar10" else 1
    for name, level in zip(clients, task.noise, strict=True):
        for samples in (clients[name].train, clients[name].test):  # noise is what leaves the range of clean inputs
            x = rows(samples) / scale
            below = -x[x < 0]
            assert below.std() > level / 4
            assert np.abs(x).max() < 1 + 6 * level
        assert np.array_equal(rows(clients[name].test), rows(clients[name].test))
    if recipe in ("quickstart", "cifar10"):
        assert rows(clients.test).min() >= 0  # what judges the model for all
        assert len({id(clients[name].train.x) for name in clients}) == 1  # one storage for everybody


def test_test_samples_are_the_clients_own_with_noise_of_its_level() -> None:
    _, task = prepared("quickstart", clients=2)
    clients: Any = task.population
    for i, level in enumerate(task.noise):
        clean = rows(clients.test)[clients.tests[i]]
        assert (rows(clients[f"c{i}"].test) - clean).std() == pytest.approx(level, rel=0.05)


def test_a_cap_of_samples_leaves_each_sample_its_noise() -> None:
    whole, few = (prepared("quickstart", samples=n)[1].population for n in (0, 50))
    mine = {x.tobytes() for x in rows(whole["c3"].train)}
    assert len(few["c3"]) == 50
    assert {x.tobytes() for x in rows(few["c3"].train)} <= mine


def test_selection_judges_each_client_by_what_it_sees() -> None:
    config, task = prepared("selection")
    found = task.evaluate(task.initial()) if task.evaluate else {}
    trainer, clients = task.handler, task.population
    own = [trainer.evaluate(task.initial(), clients[c].test)["accuracy"] for c in clients]  # type: ignore[attr-defined]
    assert found["accuracy_own"] == pytest.approx(np.mean(own))
    assert config.partition.settings["sigma"] == 0.5


def test_no_noise_is_the_even_partition() -> None:
    runs = []
    for partition in ({"name": "noise", "sigma": 0.0}, {"name": "iid"}):
        config, task = prepared("quickstart", partition=partition, clients_every=0)
        run = Run(task.initial())
        list(find("quickstart").flow(LocalFleet(task.handler, task.population), config, task, run))
        runs.append(digest(run.arrays))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("recipe", ["tabular", "ranking"])
def test_recipes_that_cannot_change_inputs_refuse_it(recipe: str) -> None:
    config = resolve(find(recipe).config, {"clients": 4, "partition": "noise"})
    with pytest.raises(ConfigError, match="partition=noise: this recipe does not change its clients' inputs"):
        find(recipe).prepare(config)


@pytest.mark.parametrize("recipe", ["images", "cytology"])
def test_pictures_in_files_have_no_such_partition(recipe: str) -> None:
    with pytest.raises(ConfigError, match="partition: no part is called 'noise'"):
        resolve(find(recipe).config, {"partition": "noise"})


def test_hidden_populations_are_not_noisy() -> None:
    with pytest.raises(ConfigError, match="partition=noise"):
        prepared("groups", hidden="skewed", populations=2)


@pytest.mark.parametrize(("setting", "value"), [("sigma", -0.1), ("sigma", float("inf")), ("form", "mine")])
def test_settings_that_cannot_be_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"partition\.{setting}"):
        prepared("quickstart", partition={"name": "noise", setting: value})


def test_the_set_itself_is_left_alone() -> None:
    before = load_labelled("digits", 0).x_train.copy()
    prepared("quickstart")
    assert np.array_equal(load_labelled("digits", 0).x_train, before)
