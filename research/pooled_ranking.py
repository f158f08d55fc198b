"""References for implicit feedback that see everybody's items: `python -m research.pooled_ranking --data ~/ml-1m`.

Popularity, EASE (Steck, 2019: written out), and ALS and BPR of the library `implicit` (`pip install implicit`), judged
as `mutirao run recsys --set split=leave_one_out` judges. Settings are chosen by nDCG@10 on the validation items, from
those printed; the test is then judged once a seed, which draws candidates, ties of time and first vectors.
`ease-recent` and `als-recent` are given what our clients have: an item counts 2^-(later items / half-life) when a user
is scored.
"""

import argparse
import importlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mutirao.systems.recsys.evaluation import hold_out
from mutirao.systems.recsys.ratings import Ratings, leave_one_out
from mutirao.systems.recsys.readers import read_ratings

Score = Callable[[slice], npt.NDArray[np.floating]]


def matrix(train: Ratings, half: float = 0.0) -> sparse.csr_matrix:
    """Users x items: 1, or less the older."""
    ages = np.repeat(train.offsets[1:], train.counts()) - 1 - np.arange(len(train))
    values = np.exp2(-ages / half) if half else np.ones(len(train))
    shape = (len(train.users), len(train.catalogue))
    return sparse.csr_matrix((values.astype(np.float32), train.items, train.offsets), shape=shape)


def popularity(train: Ratings, seed: int) -> Score:
    counts = np.bincount(train.items, minlength=len(train.catalogue)).astype(np.float32)
    return lambda part: np.tile(counts, (part.stop - part.start, 1))


def ease(train: Ratings, seed: int, ridge: float, half: float = 0.0) -> Score:
    taken, rows = matrix(train), matrix(train, half)
    inverse = np.linalg.inv((taken.T @ taken).toarray().astype(np.float64) + ridge * np.eye(taken.shape[1]))
    weights = (inverse / -np.diag(inverse)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return lambda part: np.asarray(rows[part] @ weights)


def als(train: Ratings, seed: int, factors: int, ridge: float, alpha: float = 10.0, half: float = 0.0) -> Score:
    model_of = importlib.import_module("implicit.als").AlternatingLeastSquares
    model = model_of(factors, regularization=ridge, alpha=alpha, iterations=15, random_state=seed, num_threads=1)
    model.fit(matrix(train), show_progress=False)
    users, items = model.user_factors, model.item_factors
    if half:
        rows, gram = matrix(train, half), items.T @ items + ridge * np.eye(factors, dtype=np.float32)
        for u in range(len(users)):
            mine = slice(rows.indptr[u], rows.indptr[u + 1])
            x, c = items[rows.indices[mine]], alpha * rows.data[mine]
            users[u] = np.linalg.solve(gram + (x * c[:, None]).T @ x, x.T @ c)
    return lambda part: np.asarray(users[part] @ items.T)


def bpr(train: Ratings, seed: int, factors: int, ridge: float) -> Score:
    model_of = importlib.import_module("implicit.bpr").BayesianPersonalizedRanking
    model = model_of(factors, 0.05, ridge, iterations=100, random_state=seed, num_threads=1)
    model.fit(matrix(train), show_progress=False)
    users, items = model.user_factors, model.item_factors
    return lambda part: np.asarray(users[part] @ items.T)


def grid(**choices: tuple[float, ...]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


METHODS: dict[str, tuple[Callable[..., Score], list[dict[str, Any]]]] = {
    "popularity": (popularity, [{}]),
    "ease": (ease, grid(ridge=(100.0, 300.0, 1000.0))),
    "ease-recent": (ease, grid(ridge=(300.0, 1000.0), half=(5.0, 10.0))),
    "als": (als, grid(factors=(32, 64), ridge=(10.0,))),
    "als-recent": (als, grid(factors=(32, 64), ridge=(10.0,), half=(5.0, 10.0))),
    "bpr": (bpr, grid(factors=(32, 64), ridge=(0.01, 0.03))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of MovieLens")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    ratings = read_ratings(args.data.expanduser(), "").implicit().with_at_least(4)
    parts = leave_one_out(ratings)
    vali = hold_out(parts, "vali", 99, 0)
    for name in args.methods.split(","):
        fit, settings = METHODS[name]
        tried = [(vali(fit(parts[0], 0, **one))["ndcg@10"], one) for one in settings]
        best = max(tried, key=lambda pair: pair[0])[1]
        print(json.dumps({"method": name, "vali ndcg@10": [[round(v, 4), s] for v, s in tried]}), flush=True)
        for seed in range(args.seeds):
            own = leave_one_out(ratings, seed)
            found = hold_out(own, "test", 99, seed)(fit(own[0], seed, **best))
            print(json.dumps({"method": name, "seed": seed} | {k: round(v, 4) for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
