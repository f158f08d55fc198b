"""The server's side: whatever a client sends as an encoding, it is a sound reply or that client's failure alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as arrays_of

from mutirao.compression import CodecCompression, Int8, TopK
from mutirao.compression.int8 import CODES, SCALES
from mutirao.compression.methods import DecodingFleet, decode_reply
from mutirao.compression.topk import VALUES, WHERE
from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.fleet import Failure, Reply, Request, Site, bytes_of_replies
from mutirao.simulation.local_fleet import LocalFleet

MODEL: Arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "seen": np.array([3, 4])}
REQUEST = Request("train", MODEL, {"seed": 0, "round": 1})
TYPES = st.sampled_from([np.uint8, np.int8, np.uint16, np.uint32, np.float32, np.float64, np.int64, np.bool_])
ARRAYS = TYPES.flatmap(lambda kind: arrays_of(kind, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=8)))
NAMES = st.sampled_from([WHERE, VALUES, CODES, SCALES, "w", "seen", "other"])


@given(st.dictionaries(NAMES, ARRAYS), st.sampled_from([TopK(0.3), TopK(0.9), Int8()]))
def test_nothing_that_is_sent_raises_or_makes_a_model_of_another_kind(sent: Arrays, codec: CodecCompression) -> None:
    made = decode_reply(codec, REQUEST, Reply(sent, n=1))
    if isinstance(made, Reply) and not codec.keys.isdisjoint(sent):
        assert (made.arrays["w"].shape, made.arrays["w"].dtype) == ((2, 3), np.float32)
        assert codec.keys.isdisjoint(made.arrays)


def test_what_comes_out_is_the_model_plus_what_was_sent() -> None:
    sent = {"seen": np.array([9, 9]), WHERE: np.array([0b01000100], np.uint8), VALUES: np.array([10, -20], np.float32)}
    made = decode_reply(TopK(0.3), REQUEST, Reply(sent, {"x": np.ones(1)}, {"loss": 2.0}, 5))
    assert isinstance(made, Reply)
    assert made.arrays["w"].tolist() == [[0, 11, 2], [3, 4, -15]]
    assert list(made.arrays) == ["w", "seen"]
    assert made.arrays["seen"].tolist() == [9, 9]
    assert (made.metrics, made.n, list(made.extras)) == ({"loss": 2.0}, 5, ["x"])


def test_an_encoding_beside_what_it_holds_is_malformed() -> None:
    sent = {CODES: np.zeros(6, np.int8), SCALES: np.ones(1, np.float32)}
    assert isinstance(decode_reply(Int8(), REQUEST, Reply(sent, n=1)), Reply)
    found = decode_reply(Int8(), REQUEST, Reply(sent | {"w": MODEL["w"]}, n=1))
    assert found == Failure("malformed", "sent 'w' besides an encoding of it")


def test_a_scale_beyond_the_numbers_of_the_model_is_left_to_the_checks_of_the_round() -> None:
    sent = {CODES: np.full(6, 127, np.int8), SCALES: np.array([3e38], np.float32)}
    made = decode_reply(Int8(), REQUEST, Reply(sent, n=1))
    assert isinstance(made, Reply)
    assert not is_finite(made.arrays)


@pytest.mark.parametrize("codec", [TopK(0.3), Int8()], ids=repr)
def test_one_bad_encoding_fails_alone_and_bytes_are_those_that_travelled(codec: CodecCompression) -> None:
    def handler(request: Request, site: Site) -> Reply:
        return Reply({k: v + 1 for k, v in request.arrays.items()}, metrics={"loss": 1.0}, n=1)

    def lying(request: Request, site: Site) -> Any:
        reply = codec.at_client(handler)(request, site)
        if site.id == "bia":
            return Reply(dict.fromkeys(codec.keys, np.full(3, np.nan)), n=1)
        return handler(request, site) if site.id == "caio" else reply

    inner = LocalFleet(lying, dict.fromkeys(["ana", "bia", "caio"]))
    requests = dict.fromkeys(inner.clients(), REQUEST)
    answers = DecodingFleet(inner, codec).ask(requests)
    assert list(answers.failures) == ["bia"]
    assert answers.failures["bia"].kind == "dtype"
    assert list(answers.replies) == ["ana", "caio"]
    assert answers.replies["caio"].arrays["w"].tolist() == (MODEL["w"] + 1).tolist()  # who sends all may do so
    down, up = answers.carried or (0, 0)
    assert down == 3 * (6 * 4 + 2 * 8)
    assert up == bytes_of_replies(inner.ask(requests))
    short = {"topk": 1 + 2 * 4, "int8": 6 + 4}[codec.name]
    nan = 2 * 3 * 8
    assert up == (short + 16 + 16) + (nan + 8) + (24 + 16 + 16)
