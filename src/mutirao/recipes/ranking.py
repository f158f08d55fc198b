"""Federated learning to rank: search sites keep their queries and documents, and share a model that orders them."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays
from mutirao.core.moments import Transform, combine_moments, measure_moments, standardise
from mutirao.datasets.labelled import digest_of_set
from mutirao.partition import describe
from mutirao.randomness import rng
from mutirao.ranking.judging import judge, write_queries
from mutirao.ranking.measures import DIRECTIONS, EMPTY, USUAL, measures_of, metric_names
from mutirao.ranking.sources import load_parts
from mutirao.ranking.split import deal
from mutirao.recipes.ending import Ending, check_one_model
from mutirao.recipes.exhibits import Exhibits, partition_of
from mutirao.recipes.pooled_trees import TREES, grow_trees, only_trees
from mutirao.recipes.task import Recipe, Task

LOSS_NAMES = ("grades", "listnet", "ranknet", "lambdarank", "approxndcg")
GAINS = ("exponential", "linear")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the ranking recipe; the defaults are the paper's, but for the learning rate."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    lr: float = setting(0.01, "learning rate of the clients", low=1e-12)
    data: str = setting("generated", "'generated', a folder as published (with Fold1 to Fold5), or one file")
    fold: int = setting(0, "which of the five folds (0: the one that data names, or else the first)", low=0, high=5)
    qrels: str = setting("", "judgements in place of the file's grades: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    transform: Transform = setting("none", "what is done to features before they are standardised")
    partition: Part = setting(
        Part("dirichlet", {"alpha": 0.5}, home="mutirao.ranking.split"), "how documents are dealt to clients"
    )
    aggregate: Part = setting(Part("fedrisk", {"memory": "momentum"}), "how updates are joined")
    loss: str = setting("grades", "classify grades, or rank lists", choices=LOSS_NAMES)
    hidden: int = setting(64, "width of the hidden layers", low=1)
    layers: int = setting(1, "how many hidden layers (0: linear)", low=0, high=16)
    norm: str = setting("none", "what normalises the hidden layers", choices=("none", "batch", "layer"))
    metrics: str = setting(USUAL, "what judges, such as ndcg@5,mrr@10,map,err@10,p@5; the first names the best round")
    gain: str = setting("exponential", "what a grade is worth in nDCG: 2^grade - 1 or the grade", choices=GAINS)
    empty: str = setting("0", "what a query without relevant documents counts in metrics", choices=tuple(EMPTY))
    judge_by: str = setting("test", "which part judges the model", choices=("test", "vali"))
    patience: int = setting(0, "rounds without gain on the validation part that end a run (0: none do)", low=0)
    centralised: bool | Literal["lightgbm"] = setting(  # type: ignore[assignment]
        False, "train on the pooled data instead, the network or LightGBM's trees: the reference"
    )
    trees: Part = setting(
        Part("lambdamart", home="mutirao.ranking.lambdamart"), "centralised=lightgbm: how trees are grown"
    )

    def __post_init__(self) -> None:
        """Settings of a pooled forest say what is done."""
        only_trees(self)


def task(config: Config) -> Task:
    """Documents dealt to the clients, put on one scale by the moments each of them sends."""
    from mutirao.ranking.scorers import score
    from mutirao.ranking.work import clients_of, trainer_of

    names = metric_names(config.metrics)
    check_one_model(config)
    train, vali, test = load_parts(config)
    judged = test if config.judge_by == "test" else vali
    highest = max(1, *(int(data.grades.max()) for data in (train, vali, test)))
    measures = measures_of(config.metrics, config.gain, config.empty, highest)
    if config.centralised == TREES:
        return grow_trees(config, train, vali, judged, measures)
    split = build("partition", config.partition)
    parts = deal(split, train.grades, train.queries, config.clients, rng(config.seed, 0, "partition"), train.x)
    mean, std = combine_moments([measure_moments(train.x[part], config.transform) for part in parts])
    x, judged_x = (standardise(data.x, mean, std, config.transform) for data in (train, judged))
    trainer = trainer_of(config, train.features, highest + 1, measures)

    def scored(arrays: Arrays) -> npt.NDArray[np.float64]:
        return score(trainer.fill(arrays), judged_x)

    def evaluate(arrays: Arrays) -> dict[str, float]:
        return judge(scored(arrays), judged, measures)

    def watch(arrays: Arrays) -> dict[str, float]:
        found = judge(score(trainer.fill(arrays), vali_x), vali, measures)
        return {f"vali_{name}": value for name, value in found.items()}

    if config.patience:
        vali_x = standardise(vali.x, mean, std, config.transform)
    pictures = Exhibits() if config.centralised else partition_of(lambda: describe(train.grades, parts))
    return Task(
        handler=trainer,
        population=clients_of(config, train, judged, parts, x, judged_x),
        initial=lambda: trainer.initial(config.seed),
        evaluate=watch if config.patience else evaluate,
        ending=Ending(config.patience, evaluate if config.patience else None),
        judge=f"vali_{names[0]}" if config.patience else names[0],
        basis=cache(lambda: {"features": digest_of_set([config.transform], x, train.grades, mean, std)}),
        metrics=(*(f"vali_{name}" for name in names if config.patience), *names),
        directions=DIRECTIONS,
        exhibits=replace(pictures, files={"queries.csv": partial(write_queries, scored, judged, measures)}),
        classes=highest + 1,
    )


recipe = Recipe(Config, task)
