"""8 bits: levels and scales as the formula has them, right on average if rounding is stochastic."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of

from mutirao.compression.codec import Malformed
from mutirao.compression.int8 import CODES, SCALES, Int8
from mutirao.randomness import rng

FLOATS = st.floats(-1e6, 1e6, width=32)


@given(arrays_of(np.float32, st.integers(1, 50), elements=FLOATS), arrays_of(np.float32, (2, 3), elements=FLOATS))
def test_nearest_is_the_formula_array_by_array(a: Any, b: Any) -> None:
    update, names = {"a": a, "b": b}, ["a", "b"]
    sent = Int8().encode(update, names, rng(0, 1, "compress", "ana"))
    there = Int8().decode(sent, update, names)
    at = 0
    for i, name in enumerate(names):
        wanted = update[name].ravel().astype(np.float64)
        scale = np.float32(np.abs(update[name]).max() / np.float32(127))
        assert sent[SCALES][i] == scale
        got = there[at : at + wanted.size]
        levels = [max(-127, min(127, round(x / float(scale)))) if scale else 0 for x in wanted]  # halves to even, too
        assert sent[CODES][at : at + wanted.size].tolist() == levels
        assert np.abs(got - wanted).max() <= 0.5001 * scale + 1e-30
        at += wanted.size
    assert sent[CODES].nbytes == a.size + b.size


def test_stochastic_rounding_is_right_on_average_and_its_own_client_s() -> None:
    codec = Int8(rounding="stochastic")
    update = {"w": np.array([127.0, 0.3, -0.3, 10.9, 0.0], np.float32)}

    def once(number: int, client: str = "ana") -> Any:
        return codec.encode(update, ["w"], rng(0, number, "compress", client))[CODES]

    mean = np.mean([once(t).astype(np.float64) for t in range(4000)], axis=0)
    assert np.abs(mean - update["w"]).max() < 5 * 0.5 / np.sqrt(4000)
    assert np.array_equal(once(1), once(1))
    assert any(not np.array_equal(once(t), once(t, "bia")) for t in range(20))


def test_an_update_of_zeros_or_next_to_nothing_arrives_as_zeros() -> None:
    for value in (0.0, 1e-45):
        update = {"w": np.full(3, value, np.float32), "none": np.zeros((0, 4), np.float32)}
        sent = Int8().encode(update, ["none", "w"], rng(0, 1, "compress"))
        assert Int8().decode(sent, update, ["none", "w"]).tolist() == [0, 0, 0]


def test_scales_have_the_type_of_the_model_and_float32_at_least() -> None:
    for kind, wanted in ((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)):
        update = {"w": np.array([1, 2], kind)}
        assert Int8().encode(update, ["w"], rng(0, 1, "compress"))[SCALES].dtype == wanted


LIKE = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
LEVELS, RIGHT = np.array([1, -2, 3, 4, 5], np.int8), np.array([0.1, 0.2], np.float32)
HOSTILE = {
    "no codes": ({SCALES: RIGHT}, "missing_key"),
    "no scales": ({CODES: LEVELS}, "missing_key"),
    "unsigned": ({CODES: LEVELS.astype(np.uint8), SCALES: RIGHT}, "dtype"),
    "floats": ({CODES: LEVELS.astype(np.float32), SCALES: RIGHT}, "dtype"),
    "too many": ({CODES: np.zeros(10**6, np.int8), SCALES: RIGHT}, "too_large"),
    "too few": ({CODES: LEVELS[:4], SCALES: RIGHT}, "shape"),
    "one scale": ({CODES: LEVELS, SCALES: RIGHT[:1]}, "shape"),
    "NaN": ({CODES: LEVELS, SCALES: np.array([np.nan, 1], np.float32)}, "not_finite"),
    "infinity": ({CODES: LEVELS, SCALES: np.array([1, np.inf], np.float32)}, "not_finite"),
    "below 0": ({CODES: LEVELS, SCALES: np.array([1, -1], np.float32)}, "not_finite"),
}


@pytest.mark.parametrize(("sent", "kind"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_cannot_be_is_malformed(sent: Any, kind: str) -> None:
    with pytest.raises(Malformed) as error:
        Int8().decode(sent, LIKE, ["a", "b"])
    assert error.value.kind == kind


def test_rounding_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="rounding is 'up'"):
        Int8(rounding="up")  # type: ignore[arg-type]
