"""The ranking recipe's other reference: trees of everybody's documents (`centralised=lightgbm`), as an ordinary run."""

from dataclasses import fields
from functools import cache
from typing import Any

from mutirao.config import Part, build
from mutirao.datasets.labelled import digest_of_set
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits
from mutirao.experiments.task import Task
from mutirao.systems.ranking.forest import bare_forest, score_by_trees
from mutirao.systems.ranking.lambdamart import Grower, Pool, load_lightgbm
from mutirao.systems.ranking.metrics import DIRECTIONS
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_evaluation import Metrics, judge, write_queries

TREES = "lightgbm"
NOT_OF_TREES = ("privacy", "drift", "screen", "available", "devices")  # what clients do, of which there are none


def only_trees(config: Any) -> None:
    """Make the settings of a pooled forest say what is done: one site answers, and its answer is the model."""
    if config.centralised != TREES:
        return
    usual = {f.name: f.default for f in fields(config)}
    for name in NOT_OF_TREES:
        if getattr(config, name).name != usual[name].name:
            raise ConfigError(f"{name}: centralised={TREES} has no clients; use {name}={usual[name].name}")
    if config.patience:
        raise ConfigError(f"patience: centralised={TREES} has validation data of its own to stop by; use 0")
    object.__setattr__(config, "aggregate", Part("fedavg"))  # of one, as it is
    object.__setattr__(config, "select", Part("uniform"))


def grow_trees(config: Any, train: RankingData, vali: RankingData, judged: RankingData, measures: Metrics) -> Task:
    """One site with all documents; a round adds as many trees as the others, so that there is a curve to look at."""
    load_lightgbm()  # refused before the first round where it is missing
    how = build("trees", config.trees)

    def scored(arrays: Any) -> Any:
        return score_by_trees(arrays, judged.x)

    def write(run: Any, path: Any) -> None:
        write_queries(scored(run.arrays), judged, measures, path)

    return Task(
        handler=Grower(how, config.rounds),
        population={"pooled": Pool(train, vali)},
        initial=lambda: bare_forest(how.trees, how.leaves),
        evaluate=lambda arrays: judge(scored(arrays), judged, measures),
        judge=next(iter(measures)),
        basis=cache(lambda: {"features": digest_of_set([TREES], train.x, train.grades)}),
        metrics=tuple(measures),
        directions=DIRECTIONS,
        exhibits=Exhibits(
            files={"queries.csv": lambda run, path: write_queries(scored(run.arrays), judged, measures, path)}
        ),
    )
