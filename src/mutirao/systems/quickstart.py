"""Handwritten digits on fifty clients that have different digits: federated learning in under a minute."""

from dataclasses import dataclass

from mutirao.config import Common, Part, setting
from mutirao.datasets.labelled import DATA, EVALUATION_HELP, EVALUATION_SPLITS
from mutirao.experiments.task import Recipe, Task
from mutirao.systems.classification import partition_labelled


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the quickstart."""

    rounds: int = setting(40, "how many rounds", low=1)
    lr: float = setting(0.3, "learning rate of the clients", low=1e-12)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(16, "samples a step", low=1)
    data: str = setting("digits", DATA)
    partition: Part = setting(Part("dirichlet", {"alpha": 0.3}), "how samples are partitioned among clients")
    hidden: int = setting(64, "width of the hidden layer, for rows of numbers", low=1)
    judge_by: str = setting("test", EVALUATION_HELP, choices=EVALUATION_SPLITS)


def task(config: Config) -> Task:
    """Samples partitioned with skewed labels; the network depends on their shape, dense for digits."""
    partitioned = partition_labelled(config, judge_by=config.judge_by)

    # Late, so that a mistyped setting is reported without importing torch.
    from mutirao.systems.images.networks import make_network

    data = partitioned.data
    return partitioned.task(config, lambda: make_network("small", data.shape, config.hidden, len(data.names)))


recipe = Recipe(Config, task)
