"""Rankers in NumPy: linear, f(x) = w x, or a network with one hidden layer.

Each user has a model of a few hundred weights and ten documents a step, too little for torch to be faster.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.randomness import rng

Floats = npt.NDArray[np.float64]
START = 0.01  # norm of the initial linear model, as in the authors' code


@dataclass(frozen=True)
class Linear:
    """f(x) = w x."""

    features: int

    def initial(self, seed: int) -> Arrays:
        """A random direction of norm 0.01."""
        w = rng(seed, 0, "initial").standard_normal(self.features)
        return {"weight": (START * w / np.linalg.norm(w)).astype(np.float32)}

    def score(self, model: Arrays, x: Floats) -> Floats:
        """The scores of documents."""
        return np.asarray(x @ model["weight"])

    def gradient(self, model: Arrays, x: Floats, weights: Floats) -> Arrays:
        """sum_i weight_i df(x_i)/dmodel."""
        return {"weight": weights @ x}


@dataclass(frozen=True)
class Network:
    """f(x) = w2 relu(W1 x + b1): PDGD works with any differentiable ranker."""

    features: int
    hidden: int

    def initial(self, seed: int) -> Arrays:
        """Random weights of standard deviation 1 / sqrt(inputs)."""
        draw = rng(seed, 0, "initial")
        first = draw.standard_normal((self.features, self.hidden)) / np.sqrt(self.features)
        second = draw.standard_normal(self.hidden) / np.sqrt(self.hidden)
        arrays = {"first": first, "bias": np.zeros(self.hidden), "second": second}
        return {name: value.astype(np.float32) for name, value in arrays.items()}

    def score(self, model: Arrays, x: Floats) -> Floats:
        """The scores of documents."""
        return np.asarray(self.inside(model, x) @ model["second"])

    def gradient(self, model: Arrays, x: Floats, weights: Floats) -> Arrays:
        """sum_i weight_i df(x_i)/dmodel, by the chain rule."""
        inside = self.inside(model, x)
        back = (inside > 0) * np.outer(weights, model["second"])
        return {"first": x.T @ back, "bias": back.sum(0), "second": weights @ inside}

    def inside(self, model: Arrays, x: Floats) -> Floats:
        """relu(W1 x + b1)."""
        return np.asarray(np.maximum(x @ model["first"] + model["bias"], 0.0))


Ranker = Linear | Network


def make_ranker(features: int, hidden: int) -> Ranker:
    """The network, or a linear ranker if it has no hidden units."""
    if hidden:
        return Network(features, hidden)
    return Linear(features)
