"""Fixed-point sums: they equal the exact mean to the step, and never wrap, whatever clients hold."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mutirao.core.arrays import Arrays, flat, weighted_mean
from mutirao.core.fleet import Reply
from mutirao.errors import ConfigError
from mutirao.privacy.secure_aggregation.fixed_point import METRIC, FixedPoint
from mutirao.privacy.secure_aggregation.settings import Settings

settings_of_sums = st.builds(
    Settings,
    range=st.sampled_from([1e-3, 1.0, 8.0, 1e4]),
    bits=st.integers(2, 40),
    most_samples=st.sampled_from([1, 7, 500, 10_000]),
)


def total(scale: FixedPoint, current: Arrays, replies: list[Reply], weights: list[int]) -> Any:
    parts = [scale.write(current, r, w) for r, w in zip(replies, weights, strict=True)]
    update, wide = parts[0]
    for more, wider in parts[1:]:
        update, wide = update + more, wide + wider
    return scale.read(current, update, wide, trained=True)


@given(settings_of_sums, st.integers(1, 40), st.data())
def test_the_mean_of_a_sum_is_the_exact_one_to_half_a_step(secure: Settings, clients: int, data: st.DataObject) -> None:
    scale = FixedPoint(secure, clients, ("loss",))
    within = hnp.arrays(np.float64, 5, elements=st.floats(-secure.range, secure.range))
    updates = [data.draw(within) for _ in range(clients)]
    weights = [data.draw(st.integers(1, secure.most_samples)) for _ in range(clients)]
    losses = [data.draw(st.floats(-METRIC, METRIC)) for _ in range(clients)]
    current = {"w": np.zeros(5)}
    replies = [Reply({"w": u}, metrics={"loss": v}, n=1) for u, v in zip(updates, losses, strict=True)]
    arrays, metrics, weight = total(scale, current, replies, weights)
    exact = np.array([math.fsum(w * u[i] for w, u in zip(weights, updates, strict=True)) for i in range(5)])
    np.testing.assert_allclose(arrays["w"], exact / sum(weights), rtol=1e-12, atol=scale.step / 2 * (1 + 1e-9))
    loss = math.fsum(w * v for w, v in zip(weights, losses, strict=True)) / sum(weights)
    assert abs(metrics["loss"] - loss) <= 2.0**-scale.fraction / 2 + 1e-9 * abs(loss)
    assert weight == sum(weights)


@given(settings_of_sums, st.integers(1, 1000), st.sampled_from([1.0, -1.0]))
def test_a_sum_of_extremes_never_wraps(secure: Settings, clients: int, sign: float) -> None:
    scale = FixedPoint(secure, clients, ("loss",))
    current = {"w": np.zeros(2), "steps": np.array([0, 5])}
    far = {"w": sign * np.array([1e300, secure.range]), "steps": np.array([0, 5]) + int(sign) * 2**61}
    part = scale.write(current, Reply(far, metrics={"loss": sign * 1e300}, n=1), secure.most_samples)
    with np.errstate(over="ignore"):
        update, wide = part[0] * part[0].dtype.type(clients), part[1] * np.uint64(clients)
    arrays, metrics, weight = scale.read(current, update, wide, trained=True)
    np.testing.assert_allclose(arrays["w"], sign * secure.range, rtol=1e-12)
    assert (np.sign(arrays["steps"]) == sign).all()
    assert metrics["loss"] == sign * METRIC
    assert weight == clients * secure.most_samples


@given(st.lists(st.tuples(st.integers(-50, 50), st.booleans(), st.integers(1, 9)), min_size=1, max_size=9))
def test_integers_and_truth_values_take_the_rounded_mean_as_under_fedavg(clients: list[tuple[int, bool, int]]) -> None:
    current = {"steps": np.array([3], np.int32), "on": np.array([True])}
    replies = [Reply({"steps": np.array([i], np.int32), "on": np.array([b])}, n=1) for i, b, _ in clients]
    weights = [w for _, _, w in clients]
    scale = FixedPoint(Settings(most_samples=9), len(clients))
    arrays, _, _ = total(scale, current, replies, weights)
    mean = sum(w * i for i, _, w in clients) / sum(weights)
    assert arrays["steps"].dtype == np.int32
    assert abs(int(arrays["steps"][0]) - mean) <= 0.5
    if abs(mean % 1 - 0.5) > 1e-9:
        plain = weighted_mean(
            {str(i): r.arrays for i, r in enumerate(replies)}, {str(i): w for i, w in enumerate(weights)}
        )
        np.testing.assert_array_equal(arrays["steps"], plain["steps"])
    assert arrays["on"].tolist() == [2 * sum(w for _, b, w in clients if b) >= sum(weights)]


def test_integers_that_all_agree_on_stay_however_large() -> None:
    current = {"ids": np.array([2**62 + 1, -5], np.int64)}
    parts = [Reply({"ids": np.array([2**62 + 12, -5], np.int64)}, n=1)] * 3
    arrays, _, _ = total(FixedPoint(Settings(), 3), current, parts, [5, 6, 7])
    assert arrays["ids"].tolist() == [2**62 + 12, -5]


@given(hnp.arrays(np.float64, 6, elements=st.floats(-5, 5)), st.floats(0.01, 2.0), st.integers(4, 24))
def test_no_update_in_a_sum_is_longer_than_its_clip(update: Any, clip: float, bits: int) -> None:
    scale = FixedPoint(Settings(clip=clip, bits=bits, most_samples=1), 1)
    part = scale.write({"w": np.zeros(6)}, Reply({"w": update}, n=1), 1)
    arrays, _, _ = scale.read({"w": np.zeros(6)}, *part, trained=True)
    assert np.linalg.norm(flat(arrays)) <= clip * (1 + 1e-12)


def test_words_are_as_small_as_they_can_be_and_what_does_not_fit_is_refused() -> None:
    assert FixedPoint(Settings(bits=16, most_samples=500), 10).word == np.uint32
    assert FixedPoint(Settings(bits=24, most_samples=500), 10).word == np.uint64
    with pytest.raises(ConfigError, match="do not fit"):
        FixedPoint(Settings(bits=40, most_samples=10**6), 1000)
