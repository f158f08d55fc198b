"""A model in few parcels: as many objects for Flower however many arrays it has, and nothing in it is believed."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as Parcel
from flwr.app import ArrayRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from mutirao.flower import messages
from mutirao.flower.messages import STYPE, MalformedError, deserialize, pack, pack_together, serialize, unpack


def test_a_model_of_many_arrays_is_as_few_objects_as_one_of_one() -> None:
    one, many = {"w": np.zeros(50)}, {f"w{i}": np.full(3, i) for i in range(50)}
    assert len(get_all_nested_objects(pack_together(many))) == len(get_all_nested_objects(pack_together(one))) == 3
    assert len(get_all_nested_objects(pack(many))) == 101


def test_layout_and_order_survive_and_each_array_is_its_owners() -> None:
    arrays = {"z": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "a": np.array(2, np.int8), "": np.zeros((0, 2))}
    record = pack_together(arrays)
    found = unpack(record)
    assert list(found) == ["z", "a", ""]
    assert found["z"].flags.f_contiguous
    found["z"][:] = 7
    assert unpack(record)["z"].tolist() == arrays["z"].tolist()
    assert unpack(pack_together({})) == {}


def test_a_large_model_goes_in_several_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ROOM", 100)
    arrays = {name: np.full(size, 7, np.uint8) for name, size in {"a": 60, "b": 40, "c": 1, "d": 500, "e": 0}.items()}
    record = pack_together(arrays)
    assert [list(deserialize(parcel)) for parcel in record.values()] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert {k: v.tolist() for k, v in unpack(record).items()} == {k: v.tolist() for k, v in arrays.items()}
    with pytest.raises(MalformedError, match="two arrays of one name"):
        unpack(ArrayRecord({"1": serialize(arrays), "2": serialize(arrays)}))


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="not numbers"):
        serialize({"w": np.array([{}], object)})


def made(table: Any, body: bytes = b"\0" * 8) -> bytes:
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<I", len(head)) + head + body


BAD = {
    "no bytes": b"",
    "garbage": b"garbage" * 20,
    "no JSON": made(b"[["),
    "deep": made(b"[" * 100_000),
    "no list": made({"a": 1}),
    "short row": made([["w", "<f4", [2]]]),
    "name is a number": made([[1, "<f4", [2], False]]),
    "objects": made([["w", "|O", [1], False]]),
    "text": made([["w", "<U1", [2], False]]),
    "structure": made([["w", [["a", "<f4"]], [2], False]]),
    "unknown type": made([["w", "float33", [2], False]]),
    "type in other words": made([["w", "float32", [2], False]]),
    "too few bytes": made([["w", "<f4", [3], False]]),
    "too many bytes": made([["w", "<f4", [1], False]]),
    "absurdly long": made([["w", "<f4", [2**62, 4], False]]),
    "negative": made([["w", "<f4", [-1, -2], False]]),
    "a share": made([["w", "<f4", [2.0], False]]),
    "true": made([["w", "<f8", [True], False]]),
    "text for a shape": made([["w", "<f4", "2", False]]),
    "no shape": made([["w", "<f8", None, False]]),
    "many dimensions": made([["w", "<f8", [1] * 65, False]]),
    "twice": made([["w", "<f4", [1], False], ["w", "<f4", [1], False]]),
    "empty and huge": made([["w", "<f4", [0, 2**60], False]], b""),
    "empty and too large": made([["w", "<f4", [0, 2**47, 2**47], False]], b""),
    "head without end": struct.pack("<I", 2**32 - 1) + b"[]",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        deserialize(Parcel("uint8", (len(data),), STYPE, data))
