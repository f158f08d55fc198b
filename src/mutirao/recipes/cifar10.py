"""CIFAR-10 over a hundred clients with skewed labels, a convolutional network and FedAvg: the papers' benchmark."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mutirao.config import Common, Part, build, setting
from mutirao.datasets import cifar10
from mutirao.images.names import NETWORK_NAMES
from mutirao.partition import deal_tests, describe
from mutirao.randomness import number, rng
from mutirao.recipes.exhibits import Exhibits, partition_of
from mutirao.recipes.task import Recipe, Task

SYNTHETIC_TRAIN, SYNTHETIC_TEST = 10_000, 2_000  # a fifth of the real set: enough to learn from, soon done


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings as most papers have them: ten of a hundred clients a round, five local epochs."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    epochs: int = setting(5, "passes over its data a client makes a round", low=1)
    batch_size: int = setting(50, "samples a step", low=1)
    lr: float = setting(0.01, "learning rate of the clients", low=1e-12)
    data: str = setting("synthetic", "'synthetic', or the folder of CIFAR-10's binary or Python version")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how samples are dealt to clients")
    model: str = setting("cnn", "the network: the papers', or one a tenth its size", choices=NETWORK_NAMES)


def load(config: Config) -> cifar10.Cifar10:
    """The set that `data` names."""
    if config.data != "synthetic":
        return cifar10.read_cifar10(Path(config.data).expanduser())
    train = cifar10.synthetic(SYNTHETIC_TRAIN, rng(config.seed, 0, "synthetic train"))
    test = cifar10.synthetic(SYNTHETIC_TEST, rng(config.seed, 0, "synthetic test"))
    return cifar10.Cifar10(*train, *test, tuple(f"texture {c}" for c in range(10)))


def task(config: Config) -> Task:
    """Training images dealt to the clients; the test images, which nobody trains on, judge the model."""
    from mutirao.images.networks import NETWORKS
    from mutirao.training.samples import Samples, pool_clients, virtual_clients
    from mutirao.training.trainer import Trainer

    data = load(config)
    x, y, test = data.x_train, data.y_train, Samples(data.x_test, data.y_test)
    parts = build("partition", config.partition)(y, clients=config.clients, rng=rng(config.seed, 0, "partition"))
    own = deal_tests(y, parts, data.y_test, config.seed)
    clients = virtual_clients(x, y, parts, config.samples, number(config.seed, 0, "samples"), test, own)
    trainer = Trainer.of(config, NETWORKS[config.model])

    return Task(
        handler=trainer,
        population=pool_clients(clients) if config.centralised else clients,
        initial=lambda: trainer.initial(config.seed),
        evaluate=lambda arrays: trainer.evaluate(arrays, test),
        metrics=("accuracy", "loss"),
        exhibits=Exhibits() if config.centralised else partition_of(lambda: describe(np.array(data.names)[y], parts)),
        classes=10,
    )


recipe = Recipe(Config, task)
