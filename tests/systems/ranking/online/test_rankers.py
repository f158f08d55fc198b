"""Rankers in NumPy give the scores and the derivatives that torch gives."""

import numpy as np
import pytest
import torch

from mutirao.systems.ranking.online.pdgd import make_ranker


@pytest.mark.parametrize("hidden", [0, 7])
def test_derivatives_are_those_of_torch(hidden: int) -> None:
    draw = np.random.default_rng(2)
    ranker, x, weights = make_ranker(5, hidden), draw.normal(size=(9, 5)), draw.normal(size=9)
    model = {name: value.astype(np.float64) for name, value in ranker.initial(3).items()}
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in model.items()}
    if hidden:
        scores = torch.relu(torch.tensor(x) @ tensors["first"] + tensors["bias"]) @ tensors["second"]
    else:
        scores = torch.tensor(x) @ tensors["weight"]
    (scores * torch.tensor(weights)).sum().backward()
    assert ranker.score(model, x) == pytest.approx(scores.detach().numpy())
    for name, pull in ranker.gradient(model, x, weights).items():
        assert pull == pytest.approx(tensors[name].grad.numpy())


def test_a_linear_ranker_begins_near_nothing_and_with_the_seed() -> None:
    first, again, other = (make_ranker(46, 0).initial(seed)["weight"] for seed in (1, 1, 2))
    assert np.linalg.norm(first) == pytest.approx(0.01)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
