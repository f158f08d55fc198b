"""Client selection: who takes part in a round, and what that does to accuracy, fairness and cost.

Clients hold equally many samples of skewed classes, and each is judged by test samples of its own classes, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays
from mutirao.datasets import cifar10, digits
from mutirao.images.names import NETWORK_NAMES
from mutirao.partition import deal_tests, describe
from mutirao.randomness import number, rng
from mutirao.recipes.exhibits import Exhibits, partition_of
from mutirao.recipes.task import Recipe, Task

Index = npt.NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the selection laboratory."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    epochs: int = setting(5, "passes over its data a client makes a round", low=1)
    batch_size: int = setting(10, "samples a step", low=1)
    lr: float = setting(0.03, "learning rate of the clients", low=1e-12)
    data: str = setting("digits", "'digits', which are embedded, or the folder of CIFAR-10")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how samples are dealt; dirichlet: equally many each")
    partition_seed: int = setting(42, "where the randomness of dealing starts, whatever the seed of the run", low=0)
    select: Part = setting(Part("aoiu"), "who takes part in a round")
    model: str = setting("auto", "the network: by the data, or one by name", choices=("auto", "mlp", *NETWORK_NAMES))
    own_test: int = setting(100, "test samples a client is judged by at most, of its own classes", low=1)


def load(config: Config) -> tuple[Any, Any, Any, Any]:
    """Training and test samples of the set that `data` names."""
    if config.data == "digits":
        return digits.read_digits(config.partition_seed)
    return cifar10.read_cifar10(Path(config.data).expanduser())[:4]


def task(config: Config) -> Task:
    """Samples dealt to the clients; the test set judges the model for all, and for each client by its own classes."""
    from torch import Tensor

    from mutirao.images.networks import NETWORKS, mlp
    from mutirao.training.engine.judging import batch_by_batch
    from mutirao.training.samples import Samples, pool_clients, virtual_clients
    from mutirao.training.trainer import Trainer

    x, y, x_test, y_test = load(config)
    test = Samples(x_test, y_test)
    deal = build("partition", config.partition, size=len(y) // config.clients)
    parts = deal(y, clients=config.clients, rng=rng(config.partition_seed, 0, "partition"))
    own = deal_tests(y, parts, test.y.numpy(), config.partition_seed, config.own_test)
    clients = virtual_clients(x, y, parts, config.samples, number(config.partition_seed, 0, "samples"), test, own)
    name = ("mlp" if config.data == "digits" else "cnn") if config.model == "auto" else config.model
    trainer = Trainer.of(config, NETWORKS.get(name, mlp))

    def evaluate(arrays: Arrays) -> dict[str, float]:
        def look(outputs: Tensor, y: Tensor) -> tuple[float, npt.NDArray[np.bool_]]:
            return float(trainer.loss(outputs, y)) * len(y), (outputs.argmax(-1) == y).cpu().numpy()

        seen = batch_by_batch(trainer, arrays, test, look)
        right = np.concatenate([r for _, r in seen])
        by_client = np.sort([right[rows].mean() for rows in own])
        return {
            "accuracy": float(right.mean()),
            "loss": sum(loss for loss, _ in seen) / len(test),
            "accuracy_own": float(by_client.mean()),
            "accuracy_worst_decile": float(by_client[: -(-len(by_client) // 10)].mean()),
        }

    return Task(
        handler=trainer,
        population=pool_clients(clients) if config.centralised else clients,
        initial=lambda: trainer.initial(config.seed),
        evaluate=evaluate,
        metrics=("accuracy", "loss", "accuracy_own", "accuracy_worst_decile"),
        exhibits=Exhibits() if config.centralised else partition_of(lambda: describe(y, parts)),
        classes=int(y.max()) + 1,
    )


recipe = Recipe(Config, task)
