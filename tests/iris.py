"""A small, real federated task in plain NumPy: softmax regression on iris."""

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_iris

from mutirao.config import Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.experiments.task import Recipe, Task
from mutirao.randomness import rng

X, Y = load_iris(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)


def softmax_step(request: Request, site: Site) -> Reply:
    """One epoch of softmax regression on iris; the site counts its visits in a state that never leaves."""
    x, y = site.data
    w, b = request.arrays["w"].copy(), request.arrays["b"].copy()
    order = rng(int(request.config["seed"]), int(request.config["round"]), "batches", site.id).permutation(len(y))
    for i in order:
        z = x[i] @ w + b
        p = np.exp(z - z.max())  # of a model with much noise exp(z) alone is infinite
        p /= p.sum()
        p[y[i]] -= 1
        w -= 0.05 * np.outer(x[i], p)
        b -= 0.05 * p
    visits = int(site.state.get("visits", np.zeros((), np.int64))) + 1
    site.state["visits"] = np.asarray(visits)
    arrays: Arrays = {"w": w, "b": b + 1e-3 * visits, "seen": np.asarray(request.arrays["seen"] + len(y))}
    return Reply(arrays, metrics={"loss": float(-np.log(p[y[i]] + 1))}, n=len(y))


def accuracy(arrays: Arrays) -> dict[str, float]:
    return {"accuracy": float(((X @ arrays["w"] + arrays["b"]).argmax(1) == Y).mean())}


@dataclass(frozen=True, kw_only=True)
class IrisConfig(Common):
    clients: int = setting(6, "how many clients", low=1)
    per_round: int | float = setting(3, "clients a round", low=1e-9)
    rounds: int = setting(4, "how many rounds", low=1)
    aggregate: Part = setting(Part("fedadam"), "how updates are joined")


def iris_task(config: IrisConfig) -> Task:
    parts = np.array_split(rng(config.seed, 0, "deal").permutation(len(Y)), config.clients)
    return Task(
        handler=softmax_step,
        population={f"c{i}": (X[p], Y[p]) for i, p in enumerate(parts)},
        initial=lambda: {"w": np.zeros((4, 3)), "b": np.zeros(3), "seen": np.zeros((), np.int64)},
        evaluate=accuracy,
    )


iris = Recipe(IrisConfig, iris_task)
