"""Trees as arrays, which a run can keep like any other model: score = sum over trees of the leaf a document falls into.

Node k of tree t asks whether x[feature[t, k]] <= threshold[t, k] and goes on to `left` or `right`: above 0 that is
a node, below 0 the leaf -1 - number, and 0 is nothing: a tree that has not been grown yet adds nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays

NAMES = ("feature", "threshold", "left", "right", "value")
Scores = npt.NDArray[np.float64]


def bare_forest(trees: int, leaves: int) -> Arrays:
    """Arrays for so many trees of at most so many leaves, none of them grown."""
    nodes = (trees, leaves - 1)
    return {
        "feature": np.zeros(nodes, np.int64),
        "threshold": np.zeros(nodes, np.float64),
        "left": np.zeros(nodes, np.int64),
        "right": np.zeros(nodes, np.int64),
        "value": np.zeros((trees, leaves), np.float64),
    }


def plant(found: Iterable[Mapping[str, Any]], trees: int, leaves: int) -> Arrays:
    """The trees of a LightGBM model (`dump_model()["tree_info"]`) as arrays."""
    forest = bare_forest(trees, leaves)
    for t, tree in enumerate(found):
        root = tree["tree_structure"]
        if "leaf_value" in root:  # one leaf, and no question
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
            forest["feature"][t, k], forest["threshold"][t, k] = node["split_feature"], node["threshold"]
            for side in ("left", "right"):
                child = node[f"{side}_child"]
                waiting.append(child)
                forest[side][t, k] = -1 - child["leaf_index"] if "leaf_value" in child else child["split_index"]
    return forest


def first_trees(forest: Arrays, count: int) -> Arrays:
    """The same with only so many of its trees grown."""
    out = {name: np.zeros_like(array) for name, array in forest.items()}
    for name, array in forest.items():
        out[name][:count] = array[:count]
    return out


def score_by_trees(forest: Arrays, x: npt.NDArray[np.float32]) -> Scores:
    """What documents are ranked by: trees are added up one after the other, as LightGBM does."""
    scores = np.zeros(len(x))
    for t in np.flatnonzero(forest["left"][:, 0]).tolist():
        feature, threshold, left, right, value = (forest[name][t] for name in NAMES)
        node = np.zeros(len(x), np.int64)
        rows = np.arange(len(x))
        while len(rows):
            at = node[rows]
            node[rows] = np.where(x[rows, feature[at]] <= threshold[at], left[at], right[at])
            rows = rows[node[rows] > 0]
        scores += value[-1 - node]
    return scores
