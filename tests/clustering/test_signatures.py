"""What leaves a client in the warm-up, and the noise on it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from mutirao.clustering.signatures import NAMES, Bias, Projection, Weights, add_noise, gaussian_sigma, generator


def model(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {"0.weight": (40, 30), "0.bias": (40,), "2.weight": (5, 40), "2.bias": (5,), "count": ()}
    return {k: (scale * draw.normal(size=s)).astype(np.float32) for k, s in shapes.items()}


def test_each_signature_is_the_change_it_names() -> None:
    before, after = model(0), model(1)
    assert Bias()(before, after, "2") == pytest.approx(after["2.bias"] - before["2.bias"])
    assert Weights()(before, after, "2") == pytest.approx(np.ravel(after["2.weight"] - before["2.weight"]))
    assert Projection(size=64)(before, after, "2").shape == (64,)
    assert not Projection()(before, before, "2").any()
    with pytest.raises(ValueError, match=r"no array '9.bias'"):
        Bias()(before, after, "9")
    with pytest.raises(ValueError, match="size"):
        Projection(size=0)
    assert set(NAMES) == {"bias", "weights", "projection"}


def test_a_projection_keeps_angles_and_gives_each_layer_the_same_say() -> None:
    base = {k: np.zeros_like(v) for k, v in model(0).items()}
    one, two = model(1), model(2)
    near = {k: v + 0.3 * two[k] for k, v in one.items()}
    sketch = Projection(size=8192)
    a, b, c = (sketch(base, m, "2") for m in (one, near, two))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) == pytest.approx(1 / math.sqrt(1 + 0.3**2), abs=0.05)
    assert abs(a @ c) / np.linalg.norm(a) / np.linalg.norm(c) < 0.1
    louder = {k: v * (100 if k == "0.weight" else 1) for k, v in one.items()}
    assert sketch(base, louder, "2") == pytest.approx(a, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 30), st.sampled_from([1e-3, 1e-5, 1e-8]), st.floats(0.1, 10))
def test_the_noise_is_just_enough(epsilon: float, delta: float, sensitivity: float) -> None:
    d = gaussian_sigma(epsilon, delta, sensitivity)
    a, b = sensitivity / (2 * d), epsilon * d / sensitivity
    spent = norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)  # Balle and Wang, Theorem 8
    assert spent == pytest.approx(delta, rel=1e-3)
    assert gaussian_sigma(epsilon * 1.1, delta, sensitivity) < d


def test_noise_is_cut_drawn_and_not_guessable() -> None:
    vector = np.full(4, 50.0)
    draws = np.stack([add_noise(vector, 2.0, 1.0, np.random.default_rng(i)) for i in range(4000)])
    assert draws.mean(0) == pytest.approx(np.full(4, 0.5), abs=0.15)
    assert draws.std(0) == pytest.approx(np.full(4, gaussian_sigma(2.0, 1e-5, 2.0)), rel=0.06)
    assert generator(True, 0, 0, "ana").random(1) == generator(True, 0, 0, "ana").random(1)
    assert generator(False, 0, 0, "ana").random(1) != generator(False, 0, 0, "ana").random(1)
    with pytest.raises(ValueError, match="epsilon"):
        gaussian_sigma(0.0, 1e-5, 1.0)
