"""The recipe `tabular` against scikit-learn on pooled rows: the same training rows, the same test rows, five seeds.

python -m research.tabular            # the table of docs/tabular.md, about three minutes on two cores
python -m research.tabular --first 100 --seeds 20 --split iid    # seeds that no setting was chosen by
"""

import argparse
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.metrics import classification_metrics, regression_metrics
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.tabular.recipe import MEMORY, Config, recipe
from mutirao.systems.tabular.schema import parse_schema

SETS = {"breast_cancer": "accuracy", "wine": "accuracy", "diabetes": "r2"}
SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet 0.5": {"name": "dirichlet", "alpha": 0.5},
    "dirichlet 0.1": {"name": "dirichlet", "alpha": 0.1},
}
SEEDS = 5


def federate(data: str, model: str, split: str, seed: int, clients: int) -> tuple[dict[str, float], Any, Run]:
    """The figures after the last round, the task and the run."""
    settings = {"data": data, "model": model, "partition": SPLITS[split], "seed": seed, "clients": clients}
    config = resolve(Config, settings)
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=seed)
    for done in recipe.flow(LocalFleet(task.handler, task.population), config, task, run):
        row = done.row
    return row, task, run


def pooled(task: Any, run: Run, model: str, seed: int) -> dict[str, float]:
    """What scikit-learn's model of the same kind and size reaches with all training rows in one place."""
    schema = parse_schema(run.memory[MEMORY].tobytes())
    held = [task.population[name] for name in sorted(task.population)]
    parts = [(*schema.encode(h.train, h.targets)[:2], *schema.encode(h.test, h.kept)[:2]) for h in held]
    x, y, x_test, y_test = (np.concatenate([p[k] for p in parts]) for k in range(4))
    # The same steps as the clients make, in one place: 30 rounds of 5 passes, and the weight decay, which
    # scikit-learn divides by the rows of a batch.
    dense = {"hidden_layer_sizes": (64,), "solver": "sgd", "learning_rate_init": Config.lr, "momentum": 0.0}
    dense |= {"batch_size": Config.batch_size, "alpha": Config.weight_decay * Config.batch_size, "random_state": seed}
    dense |= {"max_iter": Config.rounds * Config.epochs, "n_iter_no_change": 10**6}
    if schema.task == "classification":
        kind = LogisticRegression(max_iter=5000) if model == "linear" else MLPClassifier(**dense)
        return classification_metrics(kind.fit(x, y).predict_proba(x_test), y_test)
    kind = Ridge() if model == "linear" else MLPRegressor(**dense)
    found = kind.fit(x, y.ravel()).predict(x_test)
    return regression_metrics(found * schema.std + schema.mean, y_test * schema.std + schema.mean)


def rows(seeds: range, clients: int, splits: Sequence[str]) -> Iterator[str]:
    """The table, line by line: the mean, and how far it is from scikit-learn's on the same rows."""
    yield f"| set | model | figure | {' | '.join(splits)} |"
    yield f"|---|---|---|{'---|' * len(splits)}"
    for data, figure in SETS.items():
        for model in ("linear", "dense"):
            cells = []
            for split in splits:
                ours, theirs = [], []
                for seed in seeds:
                    row, task, run = federate(data, model, split, seed, clients)
                    ours.append(100 * row[figure])
                    theirs.append(100 * pooled(task, run, model, seed)[figure])
                apart = np.subtract(ours, theirs)
                cells.append(f"{np.mean(ours):.1f} ({np.mean(apart):+.1f} ± {np.std(apart, ddof=1):.1f})")
            yield f"| {data} | {model} | {figure} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--split", action="append", choices=list(SPLITS), help="may be repeated; all if not given")
    parser.add_argument("--clients", type=int, default=Config.clients)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # as many passes as clients make, no more
    logging.disable(logging.WARNING)  # in skewed splits every round says who counts for fewer samples
    for line in rows(range(asked.first, asked.first + asked.seeds), asked.clients, asked.split or list(SPLITS)):
        print(line, flush=True)
