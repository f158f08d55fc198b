"""What a client process and the site's worker tell each other: JSON and arrays of bounded size, never a pickle."""

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
FRAME = struct.Struct("<4sIQ")  # the mark, bytes of JSON, bytes of arrays
MOST_JSON = 8 * 2**20
MOST_BYTES = 8 * 2**30


class ProtocolError(Exception):
    """What came over the socket is no frame."""


def send(link: socket.socket, facts: Mapping[str, Any], groups: Mapping[str, Arrays] | None = None) -> None:
    """Write one frame: JSON, then the bytes of all arrays one after the other."""
    plain = {g: {k: np.asarray(v, order="C") for k, v in arrays.items()} for g, arrays in (groups or {}).items()}
    table = [[g, k, v.dtype.str, list(v.shape)] for g, arrays in plain.items() for k, v in arrays.items()]
    parts = [v for arrays in plain.values() for v in arrays.values()]
    if bad := next((v.dtype for v in parts if v.dtype.kind not in NUMBERS), None):
        raise TypeError(f"an array holds {bad}, not numbers")
    head = json.dumps({"facts": facts, "arrays": table}).encode()
    body = sum(v.nbytes for v in parts)
    if len(head) > MOST_JSON or body > MOST_BYTES:
        raise ValueError(f"{len(head)} bytes of text and {body} of arrays are too many")
    link.sendall(FRAME.pack(MAGIC, len(head), body) + head)
    for v in parts:
        if v.nbytes:
            link.sendall(v.reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Groups]:
    """Read one frame. Sizes are compared before memory is taken; EOFError if the other side is gone."""
    mark, size, body = FRAME.unpack(read_bytes(link, FRAME.size))
    if mark != MAGIC or size > MOST_JSON or body > MOST_BYTES:
        raise ProtocolError("this is no frame")
    facts, table = read_header(read_bytes(link, size))
    if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in table) != body:
        raise ProtocolError("the arrays are not as long as the frame says")
    groups: Groups = {}
    for group, name, dtype, shape in table:
        array = np.empty(shape, dtype)
        if array.nbytes:
            fill_array(link, array.reshape(-1).view(np.uint8).data)
        groups.setdefault(group, {})[name] = array
    return facts, groups


def read_header(text: bytes) -> tuple[dict[str, Any], list[tuple[str, str, np.dtype[Any], tuple[int, ...]]]]:
    """The facts and the table of arrays in the JSON of a frame; ProtocolError if it is anything else."""
    try:
        content = json.loads(text)
        facts, rows = content["facts"], content["arrays"]
        table = [(str(g), str(k), np.dtype(str(d)), tuple(int(n) for n in shape)) for g, k, d, shape in rows]
    except RecursionError as error:
        raise ProtocolError("the head of a frame is nested too deeply") from error
    except Exception as error:
        raise ProtocolError("the head of a frame cannot be read") from error
    for _, _, dtype, shape in table:
        if dtype.kind not in NUMBERS or len(shape) > 32 or not all(0 <= n <= MOST_BYTES for n in shape):
            raise ProtocolError("an array of a frame is not one of numbers")
    if not isinstance(facts, dict):
        raise ProtocolError("the head of a frame holds no facts")
    return facts, table


def read_bytes(link: socket.socket, size: int) -> bytes:
    """So many bytes of the socket; memory is taken as they come, not as they are announced."""
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
