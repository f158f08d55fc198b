"""Client selection: its effect on accuracy, fairness and cost.

Clients have equally many samples of skewed classes; the model is also evaluated on test samples of each client's own
classes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.datasets.labelled import DATA, EVALUATION_HELP, EVALUATION_SPLITS
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, Task
from mutirao.systems.classification import partition_labelled
from mutirao.systems.images.choices import NETWORK_NAMES


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the selection laboratory."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(10, "samples a step", low=1)
    lr: float = setting(0.03, "learning rate of the clients", low=1e-12)
    data: str = setting("digits", DATA)
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how samples are partitioned; dirichlet: equal sizes")
    partition_seed: int = setting(42, "seed of the partition (-1: that of the run)", low=-1)
    select: Part = setting(Part("aoiu"), "client selection policy")
    model: str = setting("auto", "the network: by the data, or one by name", choices=("auto", "mlp", *NETWORK_NAMES))
    own_test: int = setting(100, "most test samples of a client, of its own classes", low=1)
    judge_by: str = setting("test", EVALUATION_HELP, choices=EVALUATION_SPLITS)


# Data for other recipes: the files by which they are recognised, and the names of embedded sets.
OTHERS = {
    "tabular": ("breast_cancer", "wine", "diabetes"),
    "ranking": ("Fold1", "Data/Fold1", "QueryLevelNorm", "train.txt", "rank.train", "letor.txt"),
    "recsys": ("u.data", "ratings.dat", "ratings.csv", "movie_titles.txt"),
}


def refuse_others(data: str) -> None:
    """Refuse data of another recipe by naming it; selection policies work with all recipes."""
    path = Path(data).expanduser()
    for name, signs in OTHERS.items():
        if data in signs or (path.is_dir() and any((path / sign).exists() for sign in signs)):
            right = f"mutirao run {name} --set data={data} --set select=aoiu"
            raise ConfigError(
                f"data: {data!r} is for the recipe {name}, which has the same selection policies: {right}"
            )


def task(config: Config) -> Task:
    """Partitioned samples; the model is evaluated on the test set, and on test samples like each client's own."""
    refuse_others(config.data)
    seed = config.seed
    split = 0
    if config.partition_seed >= 0:
        seed = split = config.partition_seed
    partitioned = partition_labelled(config, seed, config.own_test, equal=True, judge_by=config.judge_by, split=split)
    shape = partitioned.data.shape
    outputs = len(partitioned.data.names)
    if len(shape) == 1 and config.model in NETWORK_NAMES:
        raise ConfigError(
            f"model: {config.model} is for pictures, {config.data!r} has rows of numbers; use mlp or auto"
        )

    # Late, so that a mistyped setting is reported without importing torch.
    from torch import Tensor

    from mutirao.systems.images.networks import make_network
    from mutirao.training.engine.batched_evaluation import map_batches

    name = "cnn" if config.model == "auto" else config.model
    task = partitioned.task(config, lambda: make_network(name, shape, 64, outputs))
    trainer: Any = task.handler
    test = partitioned.test
    own = partitioned.own_tests

    def own_accuracies(arrays: Arrays, right: npt.NDArray[np.bool_]) -> list[float]:
        # Without noise a client's samples are rows of the test set, which has been evaluated already.
        if not partitioned.noise:
            return [float(right[rows].mean()) for rows in own]
        clients: Any = task.population
        return [trainer.evaluate(arrays, clients[name].test)["accuracy"] for name in clients]

    def evaluate(arrays: Arrays) -> dict[str, float]:
        def look(outputs: Tensor, y: Tensor) -> tuple[float, npt.NDArray[np.bool_]]:
            return float(trainer.loss(outputs, y)) * len(y), (outputs.argmax(-1) == y).cpu().numpy()

        seen = map_batches(trainer, arrays, test, look)
        right = np.concatenate([r for _, r in seen])
        by_client = np.sort(own_accuracies(arrays, right))
        return {
            "accuracy": float(right.mean()),
            "loss": sum(loss for loss, _ in seen) / len(test),
            "accuracy_own": float(by_client.mean()),
            "accuracy_worst_decile": float(by_client[: -(-len(by_client) // 10)].mean()),
        }

    metrics = ("accuracy", "loss", "accuracy_own", "accuracy_worst_decile")
    return replace(task, evaluate=evaluate, metrics=metrics)


recipe = Recipe(Config, task)
