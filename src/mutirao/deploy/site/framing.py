"""The frames between a client process and the site's worker: JSON and arrays of bounded size, never a pickle."""

import json
import math
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from mutirao.core.arrays import NUMBERS, Arrays

Groups = dict[str, Arrays]

MAGIC = b"mtr1"
FRAME = struct.Struct("<4sIQ")  # magic, length of the JSON, length of the arrays
MAX_JSON = 8 * 2**20
MAX_BYTES = 8 * 2**30


class ProtocolError(Exception):
    """The bytes on the socket are not a valid frame."""


def send(link: socket.socket, facts: Mapping[str, Any], groups: Mapping[str, Arrays] | None = None) -> None:
    """Write one frame: JSON, then the bytes of all arrays one after the other."""
    table: list[list[Any]] = []
    parts: list[np.ndarray[Any, Any]] = []
    for group, arrays in (groups or {}).items():
        for name, value in arrays.items():
            array = np.asarray(value, order="C")
            if array.dtype.kind not in NUMBERS:
                raise TypeError(f"an array holds {array.dtype}, not numbers")
            table.append([group, name, array.dtype.str, list(array.shape)])
            parts.append(array)
    header = json.dumps({"facts": facts, "arrays": table}).encode()
    size = sum(array.nbytes for array in parts)
    if len(header) > MAX_JSON or size > MAX_BYTES:
        raise ValueError(f"{len(header)} bytes of JSON and {size} of arrays are too many")
    link.sendall(FRAME.pack(MAGIC, len(header), size) + header)
    for array in parts:
        if array.nbytes:
            link.sendall(array.reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Groups]:
    """Read one frame. Sizes are checked before memory is allocated; EOFError if the peer has disconnected."""
    magic, header_size, size = FRAME.unpack(read_bytes(link, FRAME.size))
    if magic != MAGIC or header_size > MAX_JSON or size > MAX_BYTES:
        raise ProtocolError("this is no frame")
    facts, table = read_header(read_bytes(link, header_size))
    if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in table) != size:
        raise ProtocolError("the arrays are not as long as the frame says")
    groups: Groups = {}
    for group, name, dtype, shape in table:
        array = np.empty(shape, dtype)
        if array.nbytes:
            fill_array(link, array.reshape(-1).view(np.uint8).data)
        groups.setdefault(group, {})[name] = array
    return facts, groups


def read_header(text: bytes) -> tuple[dict[str, Any], list[tuple[str, str, np.dtype[Any], tuple[int, ...]]]]:
    """The facts and the table of arrays in the JSON header of a frame; ProtocolError if it is invalid."""
    try:
        content = json.loads(text)
        facts = content["facts"]
        rows = content["arrays"]
        table = [table_entry(*row) for row in rows]
    except RecursionError as error:
        raise ProtocolError("the head of a frame is nested too deeply") from error
    except Exception as error:
        raise ProtocolError("the head of a frame cannot be read") from error
    for _, _, dtype, shape in table:
        if dtype.kind not in NUMBERS or len(shape) > 32 or not all(0 <= n <= MAX_BYTES for n in shape):
            raise ProtocolError("an array of a frame is not one of numbers")
    if not isinstance(facts, dict):
        raise ProtocolError("the head of a frame holds no facts")
    return facts, table


def table_entry(group: Any, name: Any, dtype: Any, shape: Any) -> tuple[str, str, np.dtype[Any], tuple[int, ...]]:
    """One row of the table of arrays: its group, name, type and shape."""
    return str(group), str(name), np.dtype(str(dtype)), tuple(int(length) for length in shape)


def read_bytes(link: socket.socket, size: int) -> bytes:
    """Read so many bytes; memory is allocated as they arrive, not as they are announced."""
    content = bytearray()
    while len(content) < size:
        block = link.recv(min(size - len(content), 2**16))
        if not block:
            raise EOFError("the other side is gone")
        content += block
    return bytes(content)


def fill_array(link: socket.socket, view: memoryview) -> None:
    """Fill an array's memory from the socket."""
    while view:
        count = link.recv_into(view, min(len(view), 2**20))
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]
