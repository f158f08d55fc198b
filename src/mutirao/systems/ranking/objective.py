"""What the clients of a ranking task train: a classifier of grades, or a scorer by a loss of lists."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from mutirao.systems.ranking.losses import ListLoss
from mutirao.systems.ranking.query_lists import flat_lists
from mutirao.systems.ranking.ranking_evaluation import Metrics
from mutirao.systems.ranking.scorers import Scorer, dense
from mutirao.training.trainer import Trainer


def network_of(
    features: int, grades: int, loss: str, hidden: int = 64, layers: int = 1, norm: str = "none"
) -> Callable[[], nn.Module]:
    """What makes a classifier of so many grades, or a scorer where lists are ranked."""
    shape: dict[str, Any] = {"hidden": hidden, "layers": layers, "norm": norm}
    return partial(dense, features, grades, **shape) if loss == "grades" else partial(Scorer, features, **shape)


def trainer_of(config: Any, features: int, grades: int, measures: Metrics) -> Trainer:
    """What trains such a network; whoever ranks lists tells metrics."""
    network = network_of(features, grades, config.loss, config.hidden, config.layers, config.norm)
    if config.loss == "grades":
        return Trainer.of(config, network)
    return Trainer.of(config, network, loss=ListLoss(config.loss, grades), figures=partial(judge_lists, measures))


def judge_lists(measures: Metrics, outputs: npt.NDArray[Any], grades: npt.NDArray[Any]) -> dict[str, float]:
    """Each metric over some lists, as a client tells it of its own."""
    scores, known, lists = flat_lists(outputs, grades)
    return {name: measure(np.nan_to_num(scores), known, lists) for name, measure in measures.items()}
