"""Sparse updates: `items` with `items@rows` beside it are only these rows of the model's `items`.

A reply that changed a few rows of a long table (embeddings) sends those rows and their numbers. An aggregator that
needs `replies:rows` gets replies as they were sent; for every other one, `to_dense` puts the rows into the current
model. With `items@of` beside them, the number of all rows, a client can make a full table of the rows it was sent:
`expand_rows`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Failure, Reply

ROWS = "@rows"
OF = "@of"
BLOCKS = "blocks"  # the extra in which a client requests rows that are mostly not its own; else the table's name
MOST_BYTES = 2**30  # of a table that a client makes from `@of`, which it cannot trust


def fault_of_rows(name: str, rows: object, mine: Array) -> Failure | None:
    """What is wrong with the row numbers sent for `name`, the model's table `mine`, except for their order."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "i" or rows.ndim != 1:
        return Failure("dtype", f"{name + ROWS!r} is not a vector of whole numbers")
    if mine.ndim == 0 or not 0 < len(rows) <= len(mine):
        return Failure("shape", f"{name + ROWS!r} names {len(rows)} rows of {mine.shape}")
    return None


def faults_of_order(name: str, rows: Mapping[ClientId, Array], mine: Array) -> dict[ClientId, Failure]:
    """The clients with row numbers that do not increase, or exceed `mine`; checked after `fault_of_rows`."""
    if not rows:
        return {}
    joined = np.concatenate(list(rows.values()))
    begins = [0, *accumulate(map(len, rows.values()))][:-1]
    before = np.empty_like(joined)
    before[1:] = joined[:-1]
    before[begins] = -1  # each client's numbers start again
    bad = np.flatnonzero((joined <= before) | (joined >= len(mine)))
    owners = np.searchsorted(begins, bad, "right") - 1
    names = list(rows)
    wrong = Failure("shape", f"{name + ROWS!r} is not in rising order from 0 to {len(mine) - 1}")
    return {names[i]: wrong for i in owners.tolist()}


def to_dense(current: Arrays, arrays: Arrays) -> Arrays:
    """The full arrays of a reply: rows that were not sent are those of the current model."""
    if not any(name.endswith(ROWS) for name in arrays):
        return arrays
    full: Arrays = {}
    for name, mine in current.items():
        full[name] = arrays[name]
        if (rows := arrays.get(name + ROWS)) is not None:
            full[name] = mine.copy()
            full[name][rows] = arrays[name]
    return full


def expand_rows(arrays: Arrays) -> Arrays:
    """The arrays received, with tables expanded from the rows that were sent, 0 elsewhere; ValueError if invalid."""
    tables = [name.removesuffix(OF) for name in arrays if name.endswith(OF)]
    full = {k: v for k, v in arrays.items() if not k.endswith((ROWS, OF))} if tables else arrays
    for name in tables:
        sent = arrays[name]
        rows = arrays.get(name + ROWS)
        of = arrays[name + OF]
        if of.shape != (1,) or of.dtype.kind != "i" or not 0 < int(of[0]) * sent[:1].nbytes <= MOST_BYTES:
            raise ValueError(f"{name + OF!r} is not a valid number of rows")
        empty = np.zeros((int(of[0]), *sent.shape[1:]), sent.dtype)
        wrong = fault_of_rows(name, rows, empty) or (rows is not None and faults_of_order(name, {"": rows}, empty))
        if wrong or rows is None or len(rows) != len(sent):
            raise ValueError(f"{name + ROWS!r} do not fit the rows that were sent")
        empty[rows] = sent
        full[name] = empty
    return full


def dense_replies(current: Arrays, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """Replies with full arrays; those that are full already are unchanged."""
    dense = {}
    for client, reply in replies.items():
        arrays = to_dense(current, reply.arrays)
        dense[client] = reply
        if arrays is not reply.arrays:
            dense[client] = replace(reply, arrays=arrays)
    return dense


def concatenate_rows(slices: Sequence[Array]) -> Array:
    """The slices as one table, without a copy if they are consecutive views of one array, as they mostly are."""
    base = slices[0].base
    if isinstance(base, np.ndarray) and base.dtype == slices[0].dtype:
        try:
            begin = at = address(base)
            for piece in slices:
                if piece.base is not base or address(piece) != at:
                    break
                at += piece.nbytes
            else:
                if at == begin + base.nbytes:
                    return base.reshape(-1, *slices[0].shape[1:])
        except (TypeError, ValueError):  # one is empty, read-only or has gaps, and has no such address
            pass
    return np.concatenate(slices)


def address(array: Array) -> int:
    """The address of an array in memory; ctypes is five times as fast as NumPy here."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # it is a buffer
