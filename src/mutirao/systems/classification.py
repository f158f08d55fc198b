"""A labelled data set partitioned among clients, for the recipes that classify digits, pictures and the like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, build
from mutirao.datasets.labelled import Labelled, load_for_evaluation
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, partition_of
from mutirao.experiments.task import Task
from mutirao.partitioning import by_key, describe, natural, split_test_set
from mutirao.partitioning.feature_skew import disturb_rows, disturb_test, noise_levels
from mutirao.randomness import derive_seed, rng

NATURAL = ("natural", "auto")  # partitions by the owner of each sample; auto: where owners are known
Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class PartitionedData:
    """The data set, the training rows of each client, and the test rows with its distribution of classes."""

    data: Labelled
    parts: Sequence[Index]
    own_tests: Sequence[Index]
    seed: int
    noise: tuple[float, ...] = ()  # its standard deviation on the inputs of each client, if any

    @cached_property
    def test(self) -> Any:
        """The common test set, as Samples."""
        from mutirao.training.samples import Samples

        return Samples(self.data.x_test, self.data.y_test)

    @cached_property
    def x_train(self) -> npt.NDArray[Any]:
        """The training inputs, with each client's noise on its own rows."""
        return disturb_rows(self.noise, self.seed, self.parts, self.data.x_train)

    def with_noise_of(self, i: int, test: Any) -> Any:
        """Test samples with the noise of client i."""
        from mutirao.training.samples import Samples

        x, y = test.batch(slice(0, len(test)))
        return Samples(disturb_test(self.noise, self.seed, i, x.numpy()), y)

    def task(self, config: Common, model: Callable[[], Any], **more: Any) -> Task:
        """The task of training this model, evaluated on the common test set; `more` goes to the Trainer."""
        from mutirao.training.samples import pool_clients, virtual_clients
        from mutirao.training.trainer import Trainer

        data = self.data
        y = data.y_train
        seed = derive_seed(self.seed, 0, "samples")
        with_noise = self.with_noise_of if self.noise else None
        clients = virtual_clients(
            self.x_train, y, self.parts, config.samples, seed, self.test, self.own_tests, with_noise
        )
        trainer = Trainer.of(config, model, **more)
        population: Mapping[str, Any] = clients
        exhibits = partition_of(lambda: describe(named[y], self.parts))
        if config.centralised:
            population = pool_clients(clients)
            exhibits = Artifacts()
        named = np.array(data.names)
        return Task(
            handler=trainer,
            population=population,
            initial=lambda: trainer.initial(config.seed),
            evaluate=lambda arrays: trainer.evaluate(arrays, self.test),
            metrics=("accuracy", "loss"),
            basis=lambda: {"data": data.digest},
            exhibits=exhibits,
            classes=len(data.names),
            noise=self.noise,
        )


def partition_labelled(
    config: Common,
    seed: int | None = None,
    most: int = 100,
    equal: bool = False,
    judge_by: str = "test",
    split: int | None = None,
) -> PartitionedData:
    """Load the data set `data` and partition it as `partition` says, with equal sizes if `equal` and possible.

    `split` is the seed of the test split of sets without one, if it differs from that of the partition.
    """
    if seed is None:
        seed = config.seed
    if split is None:
        split = seed
    data = load_for_evaluation(config.data, split, judge_by)
    parts = partition_samples(config, data, rng(seed, 0, "partition"), equal)
    own_tests = split_test_set(data.y_train, parts, data.y_test, seed, most)
    if data.users is not None and data.test_users is not None and config.partition.name in NATURAL:
        # Users of LEAF have test samples of their own. With such a partition, all rows of a part are of one user.
        theirs = dict(zip(np.unique(data.test_users), by_key(data.test_users), strict=True))
        own_tests = [theirs.get(data.users[part[0]], like)[:most] for part, like in zip(parts, own_tests, strict=True)]
    return PartitionedData(
        data, parts, own_tests, seed, noise_levels(config.partition.name, config.partition.settings, len(parts))
    )


def partition_samples(config: Common, data: Labelled, draw: np.random.Generator, equal: bool = False) -> list[Index]:
    """The rows of each client, by their labels or by their owners."""
    y = data.y_train
    options = {}
    if equal:
        options["size"] = len(y) // config.clients
    split = build("partition", config.partition, **options)
    if config.partition.name not in NATURAL or (config.partition.name == "auto" and data.users is None):
        return list(split(y, clients=config.clients, rng=draw))
    if data.users is None:
        raise ConfigError(
            f"partition=natural: {config.data!r} does not name the owners of its samples; LEAF's data sets do"
        )
    return natural(data.users, config.clients, draw)
