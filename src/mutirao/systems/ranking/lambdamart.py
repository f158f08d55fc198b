"""LambdaMART by LightGBM on the pooled documents: the strongest centralised baseline for ranking data.

Boosted trees that follow LambdaRank's gradients (Burges, "From RankNet to LambdaRank to LambdaMART", 2010), as
Ke et al., "LightGBM", 2017, grow them. Growing stops when nDCG@5 on the validation part has not risen for a while.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import Capabilities
from mutirao.errors import ConfigError
from mutirao.systems.ranking.ranking_data import RankingData

TREE_ARRAYS = ("feature", "threshold", "left", "right", "value")
Scores = npt.NDArray[np.float64]
CUT = 5  # nDCG@5 decides when to stop


@dataclass(frozen=True)
class LambdaMART:
    """At most `trees` trees of `leaves` leaves with at least `least` documents each, at learning rate `rate`.

    Growing stops after `patience` trees without improvement on the validation part (0: never).

    >>> LambdaMART(trees=100, leaves=15)
    LambdaMART(trees=100, leaves=15, rate=0.05, least=20, patience=50)
    """

    trees: int = 500
    leaves: int = 31
    rate: float = 0.05
    least: int = 20
    patience: int = 50

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        lows = {"trees": 1, "leaves": 2, "least": 1, "patience": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {low}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}; expected above 0, up to 1")

    def grow(self, train: RankingData, vali: RankingData, seed: int) -> Arrays:
        """Grow trees and keep those up to the best validation result; deterministic for a seed and documents."""
        lightgbm = load_lightgbm()
        x, grades, sizes = sort_by_query(train)
        vali_x, vali_grades, vali_sizes = sort_by_query(vali)
        stop = [lightgbm.early_stopping(self.patience, verbose=False)] if self.patience else []
        try:
            data = lightgbm.Dataset(x, grades, group=sizes, free_raw_data=False)
            validation = lightgbm.Dataset(vali_x, vali_grades, group=vali_sizes, reference=data, free_raw_data=False)
            settings = self.settings(seed, int(max(grades.max(), vali_grades.max())))
            grown = lightgbm.train(settings, data, self.trees, valid_sets=[validation], callbacks=stop)
        except lightgbm.basic.LightGBMError as error:
            raise ConfigError(f"centralised=lightgbm: {error}") from error
        best = self.trees
        if self.patience and grown.best_iteration > 0:
            best = grown.best_iteration
        return forest_from_lightgbm(grown.dump_model(num_iteration=best)["tree_info"][:best], self.trees, self.leaves)

    def settings(self, seed: int, highest: int) -> dict[str, Any]:
        """LightGBM's parameters, which make it deterministic; gains are 2^grade - 1."""
        # One thread and row-wise histograms: with several threads sums differ from machine to machine.
        return {
            "objective": "lambdarank",
            "metric": "ndcg",
            "eval_at": [CUT],
            "label_gain": [2.0**grade - 1 for grade in range(highest + 1)],
            "learning_rate": self.rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": self.least,
            "seed": seed % 2**31,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": 1,
            "use_missing": False,
            "verbosity": -1,
        }


NAMES = {"lambdamart": LambdaMART}


class PooledDocuments(NamedTuple):
    """The pooled documents, and those of the validation part, which decide when to stop."""

    train: RankingData
    vali: RankingData


@dataclass(frozen=True)
class TreeHandler:
    """A handler for the one site that has the pooled documents: in round r of R it sends r / R of the trees."""

    method: LambdaMART
    rounds: int

    capabilities = Capabilities(metrics={"trees"})

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request; trees are grown once, in the first round, and stay in the site's state."""
        pool: PooledDocuments = site.data
        if not site.state:
            site.state.update(self.method.grow(pool.train, pool.vali, int(request.config["seed"])))
        grown = int(np.count_nonzero(site.state["left"][:, 0]))
        sent = math.ceil(grown * min(1.0, int(request.config["round"]) / self.rounds))
        return Reply(first_trees(site.state, sent), metrics={"trees": float(sent)}, n=len(pool.train))


def sort_by_query(data: RankingData) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Features and grades ordered by query, and the number of documents of each query."""
    order = np.argsort(data.queries, kind="stable")
    return data.x[order], data.grades[order], np.bincount(data.queries)


def load_lightgbm() -> Any:
    """The package lightgbm; ConfigError with the command to install it."""
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: its library lacks another one
        raise ConfigError(f"centralised=lightgbm: {error}; install it by pip install 'mutirao[ranking]'") from error
    return lightgbm


# Trees as arrays, which a run stores like any other model: score = sum over trees of the leaf that a document reaches.
# Node k of tree t tests whether x[feature[t, k]] <= threshold[t, k] and goes on to left[t, k] or right[t, k]. Above 0
# that is a node, below 0 the leaf -1 - number. 0 marks a tree that has not been grown yet, and adds nothing.


def empty_forest(trees: int, leaves: int) -> Arrays:
    """Arrays for so many trees of at most so many leaves, none of which is grown."""
    nodes = (trees, leaves - 1)
    return {
        "feature": np.zeros(nodes, np.int64),
        "threshold": np.zeros(nodes, np.float64),
        "left": np.zeros(nodes, np.int64),
        "right": np.zeros(nodes, np.int64),
        "value": np.zeros((trees, leaves), np.float64),
    }


def forest_from_lightgbm(found: Iterable[Mapping[str, Any]], trees: int, leaves: int) -> Arrays:
    """The trees of a LightGBM model (`dump_model()["tree_info"]`) as arrays."""
    forest = empty_forest(trees, leaves)
    for t, tree in enumerate(found):
        root = tree["tree_structure"]
        if "leaf_value" in root:
            # One leaf and no split: both sides of an empty node lead to it.
            forest["left"][t, 0] = forest["right"][t, 0] = -1
            forest["value"][t, 0] = root["leaf_value"]
            continue
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if "leaf_value" in node:
                forest["value"][t, node["leaf_index"]] = node["leaf_value"]
                continue
            k = node["split_index"]
            forest["feature"][t, k] = node["split_feature"]
            forest["threshold"][t, k] = node["threshold"]
            for side in ("left", "right"):
                child = node[f"{side}_child"]
                waiting.append(child)
                if "leaf_value" in child:
                    forest[side][t, k] = -1 - child["leaf_index"]
                else:
                    forest[side][t, k] = child["split_index"]
    return forest


def first_trees(forest: Arrays, count: int) -> Arrays:
    """The same with its first `count` trees only."""
    out = {name: np.zeros_like(array) for name, array in forest.items()}
    for name, array in forest.items():
        out[name][:count] = array[:count]
    return out


def score_by_trees(forest: Arrays, x: npt.NDArray[np.float32]) -> Scores:
    """Scores of documents; trees are summed one after the other, as LightGBM does."""
    scores = np.zeros(len(x))
    for t in np.flatnonzero(forest["left"][:, 0]).tolist():
        feature, threshold, left, right, value = (forest[name][t] for name in TREE_ARRAYS)
        node = np.zeros(len(x), np.int64)
        rows = np.arange(len(x))
        while len(rows):
            at = node[rows]
            node[rows] = np.where(x[rows, feature[at]] <= threshold[at], left[at], right[at])
            rows = rows[node[rows] > 0]
        scores += value[-1 - node]
    return scores
