"""Partitioners of flwr-datasets deal as they are: by a dotted path with settings, and as objects from Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr_datasets import partitioner as flower
from torch import nn

import mutirao
from mutirao.config import Common, Part, build, complete_part, resolve
from mutirao.errors import ConfigError
from mutirao.partitioning.flwr_partitioners import is_partitioner, partition_by
from mutirao.randomness import rng

HOME = "flwr_datasets.partitioner"
LABELS = np.repeat(np.arange(5), 60)  # in order, as a reader may give them


def settle(name: str, **settings: Any) -> Any:
    """The partition that a configuration asks for."""
    return build("partition", complete_part("partition", Part(f"{HOME}:{name}", settings)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 5}),
        ("PathologicalPartitioner", {"num_classes_per_partition": 2}),
        ("ShardPartitioner", {"num_shards_per_partition": 2}),
        ("LinearPartitioner", {}),
    ],
)
def test_a_partitioner_by_its_path_deals_every_sample_once(name: str, settings: dict[str, Any]) -> None:
    parts = settle(name, **settings)(LABELS, clients=6, rng=rng(1, 0, "partition"))
    assert len(parts) == 6
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    again = settle(name, **settings)(LABELS, clients=6, rng=rng(1, 0, "partition"))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = settle(name, **settings)(LABELS, clients=6, rng=rng(2, 0, "partition"))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_labels_are_dealt_as_the_partitioner_says() -> None:
    parts = settle("PathologicalPartitioner", num_classes_per_partition=2)(LABELS, clients=5, rng=rng(0, 0, "x"))
    assert {len(np.unique(LABELS[part])) for part in parts} == {2}
    even = settle("IidPartitioner")(LABELS, clients=5, rng=rng(0, 0, "x"))
    assert all(len(np.unique(LABELS[part])) == 5 for part in even)  # though the labels come in order


def test_its_settings_are_settings_and_chance_comes_from_the_run() -> None:
    config = resolve(Common, {}, [("partition", f"{HOME}:DirichletPartitioner"), ("partition.alpha", 0.3)])
    assert config.partition.settings["alpha"] == 0.3
    assert config.partition.settings["min_partition_size"] == 10
    for name in ("seed", "num_partitions", "partition_by"):
        with pytest.raises(ConfigError, match=f"has no setting {name!r}"):
            settle("DirichletPartitioner", alpha=0.3, **{name: 1})
    with pytest.raises(ConfigError, match=r"partition.alpha: 'much' is not a"):
        settle("DirichletPartitioner", alpha="much")


def test_what_it_cannot_do_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"partition=DirichletPartitioner: .*'?alpha"):
        settle("DirichletPartitioner")(LABELS, clients=3, rng=rng(0, 0, "x"))
    halves = build("partition", complete_part("partition", Part("test_flwr_partitioners:Halves")))
    with pytest.raises(ConfigError, match=r"^partition=Halves: it makes 2 clients; set clients=2$"):
        halves(LABELS, clients=3, rng=rng(0, 0, "x"))
    with pytest.raises(ConfigError, match=r"it divides by 'hospital', and there are only labels"):
        partition_by(flower.NaturalIdPartitioner("hospital"), LABELS, rng(0, 0, "x"))
    with pytest.raises(ConfigError, match="it divides columns, not samples"):
        partition_by(flower.VerticalEvenPartitioner(2, shuffle=False), LABELS, rng(0, 0, "x"))


class Halves(flower.SizePartitioner):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__([150, 150])


def test_an_object_deals_the_data_of_a_run(tmp_path: Path) -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    data = (x, torch.tensor(LABELS))
    dealer = flower.PathologicalPartitioner(5, "label", 1, class_assignment_mode="deterministic")
    results = [
        mutirao.run(lambda: nn.Linear(4, 5), data, partition=dealer, rounds=1, out=tmp_path / str(i)) for i in range(2)
    ]
    config = (tmp_path / "0" / "config.toml").read_text()
    assert 'name = "dealt"' in config
    assert "clients = 5" in config
    assert results[0].digest == results[1].digest  # the object is as it was, and deals the same again
    with pytest.raises(ConfigError, match="clients: the data are already assigned to 5 clients"):
        mutirao.run(nn.Linear(4, 5), data, partition=dealer, clients=7, rounds=1, out=tmp_path / "x")
    with pytest.raises(ConfigError, match="a recipe takes it by its name"):
        mutirao.run("quickstart", partition=dealer, rounds=1, out=tmp_path / "x")
    with pytest.raises(ConfigError, match="the data are already assigned to 2 clients"):
        mutirao.run(nn.Linear(4, 5), {"a": data, "b": data}, partition=dealer, rounds=1, out=tmp_path / "x")
    with pytest.raises(ConfigError, match="this partitioner splits by class"):
        mutirao.run(nn.Linear(4, 1), (x, x[:, 0]), partition=dealer, rounds=1, out=tmp_path / "x")


def test_what_is_no_partitioner_is_none() -> None:
    assert is_partitioner(flower.IidPartitioner(2))
    assert not any(map(is_partitioner, ("dirichlet", None, {"name": "iid"}, np.zeros(3))))
