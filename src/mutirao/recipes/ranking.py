"""Federated learning to rank: search sites keep their queries and documents, and share a model that orders them."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays
from mutirao.core.moments import Transform, combine_moments, measure_moments, standardise
from mutirao.datasets.labelled import digest_of_set
from mutirao.partition import deal_tests, describe
from mutirao.randomness import number, rng
from mutirao.ranking.judging import METRICS, judge, write_queries
from mutirao.ranking.sources import load_parts
from mutirao.ranking.split import deal
from mutirao.recipes.exhibits import Exhibits, partition_of
from mutirao.recipes.pooled_trees import TREES, grow_trees, only_trees
from mutirao.recipes.task import Recipe, Task

OWN_TEST = 200  # documents a client with a personal model is judged by at most


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
    loss: str = setting("grades", "classify grades, or rank lists", choices=("grades", "listnet", "lambdarank"))
    hidden: int = setting(64, "width of the hidden layer", low=1)
    judge_by: str = setting("test", "which part judges the model", choices=("test", "vali"))
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
    from mutirao.ranking.models import LOSSES, Scorer, classifier, lists_of, score
    from mutirao.training.samples import Samples, pool_clients, virtual_clients
    from mutirao.training.trainer import Trainer

    train, vali, test = load_parts(config)
    judged = test if config.judge_by == "test" else vali
    if config.centralised == TREES:
        return grow_trees(config, train, vali, judged)
    split = build("partition", config.partition)
    parts = deal(split, train.grades, train.queries, config.clients, rng(config.seed, 0, "partition"), train.x)
    mean, std = combine_moments([measure_moments(train.x[part], config.transform) for part in parts])
    x, tested = (standardise(data.x, mean, std, config.transform) for data in (train, judged))
    grades, highest = train.grades, int(max(train.grades.max(), judged.grades.max(), 1))

    if config.loss == "grades":
        own: tuple[Any, Any] = (None, ())
        if config.personal.name != "none":  # then each client is judged by documents with grades like its own
            likes = deal_tests(grades, parts, judged.grades, config.seed, OWN_TEST)
            own = (Samples(tested, judged.grades), likes)
        clients = virtual_clients(x, grades, parts, config.samples, number(config.seed, 0, "samples"), *own)
        trainer = Trainer.of(config, lambda: classifier(train.features, config.hidden, highest + 1))
    else:
        lists, targets, owned = lists_of(x, grades, train.queries.astype(np.intp), parts)
        clients = virtual_clients(lists, targets, owned, config.samples, number(config.seed, 0, "samples"))
        trainer = Trainer.of(config, lambda: Scorer(train.features, config.hidden), loss=LOSSES[config.loss])

    def scored(arrays: Arrays) -> npt.NDArray[np.float64]:
        return score(trainer.fill(arrays), tested)

    pictures = Exhibits() if config.centralised else partition_of(lambda: describe(grades, parts))
    return Task(
        handler=trainer,
        population=pool_clients(clients) if config.centralised else clients,
        initial=lambda: trainer.initial(config.seed),
        evaluate=lambda arrays: judge(scored(arrays), judged, METRICS),
        judge="ndcg@5",
        basis=cache(lambda: {"features": digest_of_set([config.transform], x, grades, mean, std)}),
        metrics=tuple(METRICS),
        exhibits=replace(pictures, files={"queries.csv": partial(write_queries, scored, judged, METRICS)}),
        classes=highest + 1 if config.loss == "grades" else None,
    )


recipe = Recipe(Config, task)
