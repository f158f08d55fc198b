import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.datasets import labelled as module
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report.run_plots import PAINTERS
from mutirao.simulation.local_fleet import LocalFleet

RECIPE = find("cifar10")


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(module, "SYNTHETIC_SAMPLES", (600, 200))


def configured(**settings):
    quick = {"model": "small", "rounds": 2, "clients": 6, "per_round": 3, "epochs": 1, "batch_size": 20, "lr": 0.05}
    return resolve(RECIPE.config, quick, settings.items())


def run(config):
    task = RECIPE.task(config)
    state = Run(task.initial(), seed=config.seed)
    return task, state, list(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, state))


def test_the_defaults_are_those_of_the_papers():
    config = resolve(RECIPE.config, {})
    assert (config.rounds, config.clients, config.per_round) == (100, 100, 10)
    assert (config.epochs, config.batch_size, config.lr) == (5, 50, 0.01)
    assert (config.partition.name, config.partition.settings["alpha"]) == ("dirichlet", 0.5)
    assert (config.data, config.model) == ("synthetic", "cnn")


def test_two_rounds_on_the_stand_in(tmp_path):
    task, state, rounds = run(configured())
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["replied"] == 3 for r in rounds)
    assert all(0 <= r.row["accuracy"] <= 1 and r.row["loss"] > 0 for r in rounds)
    assert digest(state.arrays) != digest(task.initial())
    assert sum(len(task.population[c]) for c in task.population) == 600
    for name, picture in task.exhibits.pictures.items():
        PAINTERS[picture.kind](picture.data(state), tmp_path / name)
    assert (tmp_path / "partition.png").stat().st_size > 1000


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    first, again, other = (digest(run(configured(seed=seed))[1].arrays) for seed in (1, 1, 2))
    assert first == again != other


def test_images_stay_bytes_at_rest_and_lie_in_one_place():
    task = RECIPE.task(configured())
    stores = {task.population[c].train.x.data_ptr() for c in task.population}
    assert len(stores) == 1
    assert str(task.population["c0"].train.x.dtype) == "torch.uint8"


@pytest.mark.parametrize("samples", [0, 30])
def test_centralised_is_one_client_with_all_that_the_clients_have(samples):
    config = configured(samples=samples)
    parted, pooled = RECIPE.task(config), RECIPE.task(configured(samples=samples, centralised=True))
    assert list(pooled.population) == ["pooled"]
    sizes = [len(parted.population[c]) for c in parted.population]
    assert len(pooled.population["pooled"]) == sum(sizes)
    assert max(sizes) <= (samples or 600)
    assert sum(sizes) == (600 if not samples else sum(min(samples, s) for s in sizes))
    _, _, rounds = run(configured(samples=samples, centralised=True, rounds=1))
    assert rounds[0].row["selected"] == 1


@pytest.mark.parametrize("partition", ["iid", "shards", "by_class", "k_classes", "by_key"])
def test_every_partition_can_be_chosen(partition):
    task = RECIPE.task(configured(partition=partition, clients=10))
    held = np.concatenate([task.population[c].train.index for c in task.population])
    assert sorted(held) == list(range(600))


def test_wrong_data_and_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        RECIPE.task(configured(data=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="cnn, deep, mobilenet, small"):
        configured(model="big")


@pytest.mark.slow
def test_a_little_of_the_real_set_is_learned(real_data):
    if not (real_data / "cifar-10-batches-bin").is_dir():
        pytest.skip("MUTIRAO_DATA holds no cifar-10-batches-bin")
    config = configured(data=str(real_data), partition="iid", rounds=4, samples=400, clients=10, per_round=3, epochs=2)
    _, _, rounds = run(config)
    assert rounds[-1].row["loss"] < rounds[0].row["loss"]
    assert rounds[-1].row["accuracy"] > 0.17  # chance is 0.10
