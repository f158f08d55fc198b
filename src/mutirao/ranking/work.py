"""What the clients of a ranking task train: a classifier of grades, or a scorer by a loss of lists."""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.ranking.judging import Metrics
from mutirao.ranking.lists import flat_lists
from mutirao.ranking.losses import ListLoss
from mutirao.ranking.scorers import Scorer, dense
from mutirao.training.trainer import Trainer


def trainer_of(config: Any, features: int, grades: int, measures: Metrics) -> Trainer:
    """What trains a classifier of so many grades, or a scorer by a loss of lists; whoever ranks lists tells metrics."""
    shape = {"hidden": config.hidden, "layers": config.layers, "norm": config.norm}
    if config.loss == "grades":
        return Trainer.of(config, partial(dense, features, grades, **shape))
    loss, tell = ListLoss(config.loss, grades), partial(judge_lists, measures)
    return Trainer.of(config, partial(Scorer, features, **shape), loss=loss, figures=tell)


def judge_lists(measures: Metrics, outputs: npt.NDArray[Any], grades: npt.NDArray[Any]) -> dict[str, float]:
    """Each metric over some lists, as a client tells it of its own."""
    scores, known, lists = flat_lists(outputs, grades)
    return {name: measure(np.nan_to_num(scores), known, lists) for name, measure in measures.items()}
