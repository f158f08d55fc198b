"""Frames bring what was sent, and one that lies costs no memory; nothing but arrays and JSON."""

import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mutirao.deploy.site.worker_client import FRAME, MAGIC, ProtocolError, receive, send

KINDS = st.sampled_from(["<f4", "<f8", "<i8", "|b1", "<c16", "|u1", ">f8"])
TABLE = st.dictionaries(
    st.text(max_size=8),
    KINDS.flatmap(lambda kind: arrays(np.dtype(kind), array_shapes(min_dims=0, min_side=0))),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["model", "state"]), TABLE), st.dictionaries(st.text(), st.floats() | st.text()))
def test_a_frame_brings_what_was_sent(groups: dict[str, Any], facts: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, facts, groups))
        sender.start()
        told, came = receive(theirs)
        sender.join()
    np.testing.assert_equal(told, facts)
    assert {g: set(a) for g, a in came.items()} == {g: set(a) for g, a in groups.items() if a}
    for group, table in came.items():
        for name, array in table.items():
            sent = groups[group][name]
            assert (array.dtype, array.shape) == (sent.dtype, sent.shape)
            np.testing.assert_array_equal(array, sent)


@pytest.mark.parametrize(
    "head",
    [
        '{"facts": {}, "arrays": [["m", "w", "|O", [1]]]}',
        '{"facts": {}, "arrays": [["m", "w", "<f8", [-1]]]}',
        '{"facts": {}, "arrays": [["m", "w", "<f8", [99999999999999]]]}',
        '{"facts": {}, "arrays": [["m", "w", "<f8", [3]]]}',
        '{"facts": [], "arrays": []}',
        "[" * 100000,
        "\xff",
    ],
)
def test_a_frame_that_lies_is_refused_before_memory_is_taken(head: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = head.encode("latin-1")
        ours.sendall(FRAME.pack(MAGIC, len(text), 8) + text[:200000])
        with pytest.raises(ProtocolError):
            receive(theirs)
