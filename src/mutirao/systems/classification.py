"""A labelled set dealt to clients: what the recipes on handwritten digits, pictures and the like have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, build
from mutirao.datasets.labelled import Labelled, load_for_evaluation
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits, partition_of
from mutirao.experiments.task import Task
from mutirao.partitioning import by_key, describe, natural, split_test_set
from mutirao.partitioning.feature_skew import disturb_rows, disturb_test, noise_levels
from mutirao.randomness import derive_seed, rng

NATURAL = ("natural", "auto")  # partitions by whose samples they are; auto: where that is known
Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class PartitionedData:
    """The set, which rows each client trains on, and the rows of the test set that are like its own."""

    data: Labelled
    parts: Sequence[Index]
    own: Sequence[Index]
    seed: int
    noise: tuple[float, ...] = ()  # its deviation on the inputs of each client, if any

    @cached_property
    def test(self) -> Any:
        """The common test set, as Samples."""
        from mutirao.training.samples import Samples

        return Samples(self.data.x_test, self.data.y_test)

    @cached_property
    def x_train(self) -> npt.NDArray[Any]:
        """What is trained on, with each client's noise on its own rows."""
        return disturb_rows(self.noise, self.seed, self.parts, self.data.x_train)

    def sees(self, i: int, test: Any) -> Any:
        """Test samples as client i would have them, with noise of its own level."""
        from mutirao.training.samples import Samples

        x, y = test.batch(slice(0, len(test)))
        return Samples(disturb_test(self.noise, self.seed, i, x.numpy()), y)

    def task(self, config: Common, model: Callable[[], Any], **more: Any) -> Task:
        """Clients that train this model; the test set, which nobody trains on, judges it. `more` is for the Trainer."""
        from mutirao.training.samples import pool_clients, virtual_clients
        from mutirao.training.trainer import Trainer

        data, y = self.data, self.data.y_train
        seed = derive_seed(self.seed, 0, "samples")
        sees = self.sees if self.noise else None
        clients = virtual_clients(self.x_train, y, self.parts, config.samples, seed, self.test, self.own, sees)
        trainer = Trainer.of(config, model, **more)
        named = np.array(data.names)
        return Task(
            handler=trainer,
            population=pool_clients(clients) if config.centralised else clients,
            initial=lambda: trainer.initial(config.seed),
            evaluate=lambda arrays: trainer.evaluate(arrays, self.test),
            metrics=("accuracy", "loss"),
            basis=lambda: {"data": data.digest},
            exhibits=Exhibits() if config.centralised else partition_of(lambda: describe(named[y], self.parts)),
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
    """The set that `data` names, dealt as `partition` says, `equal` if it can: equally many samples a client.

    `split` is the seed that draws a test part where the set has none of its own, if it is not the one that deals.
    """
    seed = config.seed if seed is None else seed
    data = load_for_evaluation(config.data, seed if split is None else split, judge_by)
    parts = partition_samples(config, data, rng(seed, 0, "partition"), equal)
    own = split_test_set(data.y_train, parts, data.y_test, seed, most)
    if data.users is not None and data.test_users is not None and config.partition.name in NATURAL:
        theirs = dict(zip(np.unique(data.test_users), by_key(data.test_users), strict=True))
        own = [theirs.get(data.users[part[0]], like)[:most] for part, like in zip(parts, own, strict=True)]
    return PartitionedData(
        data, parts, own, seed, noise_levels(config.partition.name, config.partition.settings, len(parts))
    )


def partition_samples(config: Common, data: Labelled, draw: np.random.Generator, equal: bool = False) -> list[Index]:
    """The rows of each client, by their labels or by whose they are."""
    y = data.y_train
    split = build("partition", config.partition, **{"size": len(y) // config.clients} if equal else {})
    if config.partition.name not in NATURAL or (config.partition.name == "auto" and data.users is None):
        return list(split(y, clients=config.clients, rng=draw))
    if data.users is None:
        raise ConfigError(f"partition=natural: {config.data!r} does not say whose its samples are; LEAF's sets do")
    return natural(data.users, config.clients, draw)
