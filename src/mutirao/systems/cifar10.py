"""CIFAR-10 over a hundred clients with skewed labels, a convolutional network and FedAvg: the papers' benchmark."""

from dataclasses import dataclass

from mutirao.config import Common, Part, setting
from mutirao.datasets.labelled import DATA, EVALUATION_HELP, EVALUATION_SPLITS
from mutirao.experiments.task import Recipe, Task
from mutirao.systems.classification import partition_labelled
from mutirao.systems.images.choices import NETWORK_NAMES


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings as most papers have them: ten of a hundred clients a round, five local epochs."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(50, "samples a step", low=1)
    lr: float = setting(0.01, "learning rate of the clients", low=1e-12)
    data: str = setting("synthetic", DATA)
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how samples are partitioned among clients")
    model: str = setting("cnn", "the network: cnn is the papers', small has a tenth of its size", choices=NETWORK_NAMES)
    judge_by: str = setting("test", EVALUATION_HELP, choices=EVALUATION_SPLITS)


def task(config: Config) -> Task:
    """Training images partitioned among clients; the model is evaluated on the test images."""
    partitioned = partition_labelled(config, judge_by=config.judge_by)

    # Late, so that a mistyped setting is reported without importing torch.
    from mutirao.systems.images.networks import make_network

    data = partitioned.data
    return partitioned.task(config, lambda: make_network(config.model, data.shape, 64, len(data.names)))


recipe = Recipe(Config, task)
