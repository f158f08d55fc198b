"""How high the one item sought ranks: HR, nDCG, MRR and recall at k, and how much of the catalogue is ever shown."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

CUTS = (5, 10, 20)

Ints = npt.NDArray[np.integer]


def sample_negatives(taken: npt.ArrayLike, items: int, count: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` different rows of `items`, drawn evenly from those that are not among the `taken`.

    >>> sorted(sample_negatives([0, 2, 3], 6, 3, np.random.default_rng(0)).tolist())
    [1, 4, 5]
    """
    known = np.unique(np.asarray(taken, np.int64))
    if count > items - len(known):
        raise ValueError(f"{count} items cannot be drawn: of {items}, only {items - len(known)} are not taken")
    places = draw.choice(items - len(known), count, replace=False)  # among the rows that are left
    return np.asarray(places + np.searchsorted(known - np.arange(len(known)), places, side="right"), np.int64)


def rank_among(target_score: npt.ArrayLike, other_scores: npt.ArrayLike) -> Ints:
    """The rank, from 1, of a score among others along the last axis: ties count against it, and so does NaN.

    >>> int(rank_among(0.5, [0.9, 0.5, 0.1]))
    3
    """
    target = np.asarray(target_score)
    return np.asarray(1 + np.count_nonzero(~(np.asarray(other_scores) < target[..., None]), axis=-1))


def summarise_ranks(ranks: npt.ArrayLike, cuts: Iterable[int] = CUTS) -> dict[str, float]:
    """Means over users whose one item has rank r (from 1), with 0 for r > k.

    hr@k 1, ndcg@k 1 / log2(r + 1), mrr@k 1 / r. There is one item to find, so recall@k is the same as hr@k.

    >>> summarise_ranks([1, 3, 40], cuts=[10])
    {'hr@10': 0.666..., 'ndcg@10': 0.5, 'mrr@10': 0.444..., 'recall@10': 0.666...}
    """
    r = np.asarray(ranks, np.float64)
    if not r.size:
        raise ValueError("there are no ranks to summarise")
    found = {}
    for k in cuts:
        hit = r <= k
        found[f"hr@{k}"] = float(hit.mean())
        found[f"ndcg@{k}"] = float(np.where(hit, 1 / np.log2(r + 1), 0).mean())
        found[f"mrr@{k}"] = float(np.where(hit, 1 / r, 0).mean())
        found[f"recall@{k}"] = found[f"hr@{k}"]
    return found


def coverage(top: npt.ArrayLike, items: int, cuts: Iterable[int] = CUTS) -> dict[str, float]:
    """The share of `items` that are in anybody's first k, from everybody's first items in order, a row a user.

    >>> coverage([[0, 1], [0, 2]], items=4, cuts=[1, 2])
    {'coverage@1': 0.25, 'coverage@2': 0.75}
    """
    first = np.asarray(top)
    return {f"coverage@{k}": len(np.unique(first[:, :k])) / items for k in cuts}


def top_rows(scores: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """The `count` highest of each row, highest first; of equal ones the lower number comes first."""
    count = min(count, scores.shape[1])
    some = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)
