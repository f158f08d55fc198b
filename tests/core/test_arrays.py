"""The few verbs on dicts of arrays: types stay, order does not matter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mutirao.core import arrays as verbs
from mutirao.core.arrays import Arrays, cast_to, digest, flat, is_finite, mix, nbytes, weighted_mean

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
floats = st.floats(-1e6, 1e6, width=32)
vectors = hnp.arrays(np.float32, st.integers(0, 5), elements=floats)
models = st.dictionaries(st.text(max_size=4), vectors, max_size=4)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_rounded_and_stop_at_the_ends_of_their_range(dtype: Any) -> None:
    ends = np.iinfo(dtype)
    values = np.array([2.5, 3.5, 0.4, 1e30, -1e30, float(ends.max), float(ends.min)])
    out = cast_to(values, dtype)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out[:3], np.array([2, 4, 0], dtype))
    # The largest float64 within a 64-bit type is a little below the type's own end, and must not wrap around.
    most = ends.max if ends.bits < 64 else int(np.nextafter(float(ends.max), 0))
    assert [int(x) for x in out[3:]] == [most, ends.min, most, ends.min]


def test_bools_go_with_the_majority_and_narrow_floats_may_become_infinite() -> None:
    np.testing.assert_array_equal(cast_to(np.array([0.0, 0.49, 0.5, 1.0]), np.bool_), [False, False, True, True])
    assert np.isinf(cast_to(np.array([1e300]), np.float32)).all()
    assert cast_to(np.float64(2.0), np.float32).shape == ()


def test_weighted_mean_weighs() -> None:
    one, two = {"w": np.array([0.0, 8.0], np.float32)}, {"w": np.array([4.0, 0.0], np.float32)}
    out = weighted_mean({"ana": one, "bia": two}, {"ana": 3, "bia": 1})
    np.testing.assert_array_equal(out["w"], np.array([1.0, 6.0], np.float32))
    assert out["w"].dtype == np.float32


@pytest.mark.parametrize("weights", [{}, {"ana": 0.0}])
def test_a_mean_of_nothing_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one client with a positive weight"):
        weighted_mean({c: {"w": np.ones(1)} for c in weights}, weights)


@given(st.dictionaries(st.text(max_size=3), st.tuples(floats, st.integers(1, 99)), min_size=1), st.data())
def test_weighted_mean_does_not_depend_on_order(table: dict[str, tuple[float, int]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(list(table)))
    one = weighted_mean({c: {"w": np.array([table[c][0]])} for c in table}, {c: table[c][1] for c in table})
    two = weighted_mean({c: {"w": np.array([table[c][0]])} for c in order}, {c: table[c][1] for c in order})
    assert digest(one) == digest(two)


def test_integers_beyond_float64_survive_if_all_agree_and_are_averaged_if_not() -> None:
    big = {"ids": np.array([2**63 - 1, 2**53 + 1], np.int64)}
    np.testing.assert_array_equal(weighted_mean({"a": big, "b": big}, {"a": 1, "b": 2})["ids"], big["ids"])
    mean = weighted_mean({"a": {"x": np.array([1, 10])}, "b": {"x": np.array([2, 20])}}, {"a": 1, "b": 2})
    np.testing.assert_array_equal(mean["x"], [2, 17])


@given(models, models, st.floats(0, 1))
def test_mix_moves_from_one_to_the_other(a: Arrays, b: Arrays, share: float) -> None:
    b = {k: np.resize(b.get(k, np.ones(1, np.float32)), v.shape).astype(v.dtype) for k, v in a.items()}
    middle = mix(a, b, share)
    for k in a:
        assert middle[k].dtype == a[k].dtype
        np.testing.assert_array_equal(mix(a, b, 0.0)[k], a[k])
        np.testing.assert_array_equal(mix(a, b, 1.0)[k], b[k])
        right = a[k].astype(np.float64) + share * (b[k].astype(np.float64) - a[k])
        np.testing.assert_allclose(middle[k], right, rtol=1e-6, atol=0.1)  # of numbers up to a million


@given(models)
def test_flat_and_digest_go_by_sorted_names(model: Arrays) -> None:
    backwards = dict(reversed(model.items()))
    np.testing.assert_array_equal(flat(model), flat(backwards))
    assert flat(model).dtype == np.float64
    assert len(flat(model)) == sum(v.size for v in model.values())
    assert digest(model) == digest(backwards)


def test_digest_sees_name_type_shape_and_value_but_not_memory_layout() -> None:
    base = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    others: list[Arrays] = [
        {"v": base["w"]},
        {"w": base["w"].astype(np.float64)},
        {"w": base["w"].reshape(3, 2)},
        {"w": base["w"] + 1},
        {**base, "b": np.zeros(0)},
        {"w": -base["w"]},
    ]
    assert len({digest(m) for m in [base, *others]}) == 1 + len(others)
    assert digest({"w": np.asfortranarray(base["w"])}) == digest(base)
    assert digest({"w": base["w"].astype(">f4")}) == digest(base)


@given(hnp.arrays(st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.bool_]), st.integers(0, 4)))
def test_is_finite_is_numpys(values: np.ndarray) -> None:
    assert is_finite({"w": values}) == bool(np.isfinite(values).all())


def test_nbytes_counts_all_arrays() -> None:
    assert nbytes({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.int64)}) == 12 + 32


def test_examples_in_the_docstrings_hold() -> None:
    import doctest

    assert doctest.testmod(verbs).failed == 0
