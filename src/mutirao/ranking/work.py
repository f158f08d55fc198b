"""What the clients of a ranking task train, and on what: documents with a grade each, or lists of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Array
from mutirao.core.fleet import ClientId
from mutirao.partition import deal_tests
from mutirao.randomness import number, rng
from mutirao.ranking.data import RankingData
from mutirao.ranking.judging import Metrics
from mutirao.ranking.lists import flat_lists, lists_of, most_of
from mutirao.ranking.losses import ListLoss
from mutirao.ranking.scorers import Scorer, dense
from mutirao.training.samples import ClientData, Index, Samples, pool_clients, virtual_clients
from mutirao.training.trainer import Trainer

OWN_TEST = 200  # documents that a client with a personal model is judged by at most
OWN_LISTS = 20  # and queries, where it ranks lists
Clients = Mapping[ClientId, Any]


def trainer_of(config: Any, features: int, grades: int, measures: Metrics) -> Trainer:
    """What trains a classifier of so many grades, or a scorer by a loss of lists; whoever ranks lists tells metrics."""
    shape = {"hidden": config.hidden, "layers": config.layers, "norm": config.norm}
    if config.loss == "grades":
        return Trainer.of(config, partial(dense, features, grades, **shape))
    loss, tell = ListLoss(config.loss, grades), partial(judge_lists, measures)
    return Trainer.of(config, partial(Scorer, features, **shape), loss=loss, figures=tell)


def clients_of(
    config: Any, train: RankingData, test: RankingData, parts: list[Index], x: Array, test_x: Array
) -> Clients:
    """The parts of the training data as clients have them, with features `x`; pooled if the configuration says so.

    With a personal model each is judged by test documents with grades like its own, or by test queries drawn for it.
    """
    own, seed = config.personal.name != "none", number(config.seed, 0, "samples")
    if config.loss == "grades":
        likes = deal_tests(train.grades, parts, test.grades, config.seed, OWN_TEST) if own else ()
        judged = Samples(test_x, test.grades) if own else None
        dealt = virtual_clients(x, train.grades, parts, config.samples, seed, judged, likes)
        return pool_clients(dealt) if config.centralised else dealt
    if config.centralised:
        return {"pooled": most_of(lists_of(x, train.grades, train.queries), config.samples, seed)}
    width, found = len(str(len(parts) - 1)), dict[ClientId, Any]()
    whole = lists_of(test_x, test.grades, test.queries) if own else None
    for i, part in enumerate(parts):
        name = f"c{i:0{width}d}"
        mine = most_of(lists_of(x, train.grades, train.queries, part), config.samples, seed + i)
        found[name] = mine
        if whole is not None:
            drawn = rng(config.seed, 0, "own test", name).permutation(len(whole))[:OWN_LISTS]
            found[name] = ClientData(mine, whole.rows(np.sort(drawn)))
    return found


def judge_lists(measures: Metrics, outputs: npt.NDArray[Any], grades: npt.NDArray[Any]) -> dict[str, float]:
    """Each metric over some lists, as a client tells it of its own."""
    scores, known, lists = flat_lists(outputs, grades)
    return {name: measure(np.nan_to_num(scores), known, lists) for name, measure in measures.items()}
