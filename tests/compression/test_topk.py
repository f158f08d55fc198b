"""Top-k: what travels is the largest numbers and where they stand, and nothing else can be made of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.compression.codec import Malformed
from mutirao.compression.topk import VALUES, WHERE, TopK, read_places, write_places
from mutirao.core.arrays import Arrays
from mutirao.randomness import rng

DRAW = rng(0, 1, "compress", "ana")


def model(*sizes: int, dtype: Any = np.float32) -> Arrays:
    return {f"w{i}": np.zeros(size, dtype) for i, size in enumerate(sizes)}


def kept_by_sorting(line: Any, count: int) -> Any:
    """The same by a full sort: largest first, of equal ones the first."""
    order = sorted(range(len(line)), key=lambda i: (-abs(line[i]), i))[:count]
    out = np.zeros_like(line)
    out[order] = line[order]
    return out


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=200),  # many equal ones
    st.floats(0.001, 1.0),
)
def test_what_arrives_is_what_a_full_sort_keeps(numbers: list[int], share: float) -> None:
    line, codec = np.array(numbers, np.float32), TopK(share)
    sent = codec.encode({"w": line}, ["w"], DRAW)
    there = codec.decode(sent, {"w": line}, ["w"])
    assert there.tobytes() == kept_by_sorting(line, codec.count(len(line))).tobytes()
    assert len(sent[VALUES]) == max(1, int(np.ceil(share * len(line))))


@given(st.integers(1, 3000), st.data())
def test_places_come_back_in_the_shortest_form(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    places = np.sort(rng(size, count, "places").permutation(size)[:count])
    sent = write_places(places, size)
    assert np.array_equal(read_places({WHERE: sent}, size, count), places)
    assert sent.nbytes == min(2 * count, -(-size // 8))


def test_the_largest_are_found_over_the_whole_model_and_large_models_need_wider_places() -> None:
    like = model(70_000, 3)
    update = {"w0": np.zeros(70_000, np.float32), "w1": np.array([0, 5, -7], np.float32)}
    update["w0"][69_999] = 6
    sent = TopK(2 / 70_003).encode(update, ["w0", "w1"], DRAW)
    assert (sent[WHERE].dtype, sent[WHERE].tolist()) == (np.uint32, [69_999, 70_002])
    assert sent[VALUES].tolist() == [6, -7]
    assert TopK(2 / 70_003).decode(sent, like, ["w0", "w1"])[[69_999, 70_001, 70_002]].tolist() == [6, 0, -7]


def test_models_of_two_types_travel_in_the_wider_one() -> None:
    like = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float64)}
    sent = TopK(0.5).encode({"a": np.array([3, 0], np.float32), "b": np.array([0, 1e-300])}, ["a", "b"], DRAW)
    assert sent[VALUES].dtype == np.float64
    assert TopK(0.5).decode(sent, like, ["a", "b"]).tolist() == [3, 0, 0, 1e-300]


PLACES, FLOATS = np.array([1, 5], np.uint16), np.array([1, 2], np.float32)
HOSTILE = {
    "no places": ({VALUES: FLOATS}, "missing_key"),
    "no values": ({WHERE: PLACES}, "missing_key"),
    "out of range": ({WHERE: np.array([1, 100], np.uint16), VALUES: FLOATS}, "malformed"),
    "twice": ({WHERE: np.array([5, 5], np.uint16), VALUES: FLOATS}, "malformed"),
    "out of order": ({WHERE: PLACES[::-1], VALUES: FLOATS}, "malformed"),
    "signed": ({WHERE: np.array([-1, 5], np.int64), VALUES: FLOATS}, "dtype"),
    "as floats": ({WHERE: np.array([1, 5], np.float32), VALUES: FLOATS}, "dtype"),
    "wider places": ({WHERE: PLACES.astype(np.uint32), VALUES: FLOATS}, "dtype"),
    "wider values": ({WHERE: PLACES, VALUES: FLOATS.astype(np.float64)}, "dtype"),
    "more than asked": ({WHERE: np.arange(9, dtype=np.uint16), VALUES: np.ones(9, np.float32)}, "too_large"),
    "fewer": ({WHERE: PLACES[:1], VALUES: FLOATS[:1]}, "shape"),
    "none": ({WHERE: PLACES[:0], VALUES: FLOATS[:0]}, "shape"),
    "places of another length": ({WHERE: PLACES[:1], VALUES: FLOATS}, "shape"),
    "a table": ({WHERE: PLACES[None], VALUES: FLOATS}, "shape"),
    "no axes": ({WHERE: PLACES, VALUES: np.float32(1)}, "shape"),
    "NaN": ({WHERE: PLACES, VALUES: np.array([1, np.nan], np.float32)}, "not_finite"),
    "infinity": ({WHERE: PLACES, VALUES: np.array([1, np.inf], np.float32)}, "not_finite"),
}


@pytest.mark.parametrize(("sent", "kind"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_cannot_be_is_malformed(sent: Any, kind: str) -> None:
    with pytest.raises(Malformed) as error:
        TopK(0.02).decode(sent, model(60, 40), ["w0", "w1"])
    assert error.value.kind == kind


@pytest.mark.parametrize("bits", [b"\xff\xff", b"\xff\x00", b"\xf0\x01", b"\x00\x00"])
def test_a_mask_must_name_so_many_numbers_and_none_beyond_the_model(bits: bytes) -> None:
    sent = {WHERE: np.frombuffer(bits, np.uint8), VALUES: np.ones(5, np.float32)}
    with pytest.raises(Malformed, match="does not name 5 of 10 numbers"):
        TopK(0.5).decode(sent, model(10), ["w0"])


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("inf")])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share is"):
        TopK(share)
