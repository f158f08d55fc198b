"""Combining the models of groups over the union of their classes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from mutirao.clustering import combine
from mutirao.clustering.ensemble import weights_by_distance, weights_by_sample, weights_by_validation


def opinions(seed: int, n: int) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    draw = np.random.default_rng(seed)
    classes = {"g0": [0, 1], "g1": [2, 3, 4], "g2": [1, 4]}
    return {g: draw.dirichlet(np.ones(len(c)), size=n) for g, c in classes.items()}, classes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0, 5), min_size=3, max_size=3).filter(lambda w: sum(w) > 1e-3))
def test_a_combination_is_a_distribution_over_the_union(seed: int, weights: list[float]) -> None:
    p, classes = opinions(seed, 4)
    out = combine(p, classes, dict(zip(p, weights, strict=True)))
    assert out.shape == (4, 5)
    assert out.sum(1) == pytest.approx(np.ones(4))
    by_hand = sum(
        w * np.array([p[g][0][classes[g].index(3)] if 3 in classes[g] else 0.0])
        for g, w in zip(p, weights, strict=True)
    )
    assert out[0, 3] == pytest.approx(by_hand[0] / sum(weights))


def test_weights_that_cannot_be_are_refused() -> None:
    p, classes = opinions(0, 2)
    with pytest.raises(ValueError, match="negative"):
        combine(p, classes, {"g0": -1, "g1": 3})
    with pytest.raises(ValueError, match="above 0"):
        combine(p, classes, {})
    with pytest.raises(ValueError, match="no groups"):
        combine({}, {})
    with pytest.raises(ValueError, match="3 classes"):
        combine({"g1": [[0.5, 0.5]]}, classes)
    assert combine({"g0": [[0.5, 0.5]]}, classes, total=10).shape == (1, 10)


def test_the_askers_sample_finds_the_most_likely_weights() -> None:
    p, classes = opinions(3, 60)
    y = np.random.default_rng(4).integers(0, 5, 60)
    found = weights_by_sample(p, classes, y)
    table = np.zeros((60, 3))
    for j, g in enumerate(sorted(p)):
        for i, label in enumerate(y):
            table[i, j] = p[g][i][classes[g].index(label)] if label in classes[g] else 0.0

    def loss(logits: np.ndarray) -> float:
        w = np.exp(logits - logits.max())
        return -float(np.log(table @ (w / w.sum()) + 1e-12).sum())

    best = minimize(loss, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9})
    w = np.exp(best.x - best.x.max())
    assert list(found.values()) == pytest.approx((w / w.sum()).tolist(), abs=0.01)
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_group_that_never_saw_the_classes_gets_nothing() -> None:
    p = {"g0": np.tile([0.9, 0.1], (20, 1)), "g1": np.tile([0.5, 0.5], (20, 1))}
    found = weights_by_sample(p, {"g0": [0, 1], "g1": [2, 3]}, np.zeros(20, int))
    assert found["g0"] == pytest.approx(1.0, abs=1e-6)


def test_weights_by_nearness_and_by_validation() -> None:
    near = weights_by_distance({"g0": 1.0, "g1": 2.0, "g2": 9.0})
    assert near["g0"] == 1.0
    assert near["g1"] == pytest.approx(np.exp(-1.5))
    assert near["g2"] < 1e-10
    assert weights_by_validation({"g0": 0.7, "g1": -0.1}) == {"g0": 0.7, "g1": 0.0}
