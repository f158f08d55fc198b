"""Only rows that matter travel: `items` with `items@rows` beside it stands for these rows of the model's `items`.

A reply that changed a few rows of a long table (embeddings) sends those rows and their numbers. An aggregator that
needs `replies:rows` gets replies as they came; for every other one, `whole` puts the rows into the current model. With
`items@of` beside them, how many rows there are in all, a client can make a whole table of those it was sent: `spread`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Failure, Reply

ROWS = "@rows"
OF = "@of"
BLOCKS = "blocks"  # the extra in which a client names rows of which most are not its own; else the table's name
MOST_BYTES = 2**30  # of a table that a client makes because it is told how long it is


def fault_of_rows(name: str, rows: object, mine: Array) -> Failure | None:
    """What is wrong with the row numbers sent for `name`, of which the model holds `mine`, but for their order."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "i" or rows.ndim != 1:
        return Failure("dtype", f"{name + ROWS!r} is not a vector of whole numbers")
    if mine.ndim == 0 or not 0 < len(rows) <= len(mine):
        return Failure("shape", f"{name + ROWS!r} names {len(rows)} rows of {mine.shape}")
    return None


def faults_of_order(name: str, rows: Mapping[ClientId, Array], mine: Array) -> dict[ClientId, Failure]:
    """Whose row numbers are not in rising order within `mine`; all that passed `fault_of_rows`, looked at in one go."""
    if not rows:
        return {}
    joined = np.concatenate(list(rows.values()))
    begins = [0, *accumulate(map(len, rows.values()))][:-1]
    before = np.empty_like(joined)
    before[1:] = joined[:-1]
    before[begins] = -1  # every client's begin anew
    bad = np.flatnonzero((joined <= before) | (joined >= len(mine)))
    whose, names = np.searchsorted(begins, bad, "right") - 1, list(rows)
    wrong = Failure("shape", f"{name + ROWS!r} is not in rising order from 0 to {len(mine) - 1}")
    return {names[i]: wrong for i in whose.tolist()}


def to_dense(current: Arrays, arrays: Arrays) -> Arrays:
    """The arrays a reply stands for: rows that did not travel are as in the current model."""
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
    """The arrays sent, tables of which rows came made whole, 0 elsewhere; ValueError if that cannot be."""
    tables = [name.removesuffix(OF) for name in arrays if name.endswith(OF)]
    full = {k: v for k, v in arrays.items() if not k.endswith((ROWS, OF))} if tables else arrays
    for name in tables:
        sent, rows, of = arrays[name], arrays.get(name + ROWS), arrays[name + OF]
        if of.shape != (1,) or of.dtype.kind != "i" or not 0 < int(of[0]) * sent[:1].nbytes <= MOST_BYTES:
            raise ValueError(f"{name + OF!r} is not a number of rows that can be")
        empty = np.zeros((int(of[0]), *sent.shape[1:]), sent.dtype)
        wrong = fault_of_rows(name, rows, empty) or (rows is not None and faults_of_order(name, {"": rows}, empty))
        if wrong or rows is None or len(rows) != len(sent):
            raise ValueError(f"{name + ROWS!r} are not the rows that were sent")
        empty[rows] = sent
        full[name] = empty
    return full


def dense_replies(current: Arrays, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """Replies with their arrays made whole; those that are stay as they are."""
    made = {c: to_dense(current, r.arrays) for c, r in replies.items()}
    return {c: r if made[c] is r.arrays else Reply(made[c], r.extras, r.metrics, r.n) for c, r in replies.items()}


def concatenate_rows(slices: Sequence[Array]) -> Array:
    """The slices below each other; those of a round mostly lie so already, cut from one array, and are not copied."""
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
        except (TypeError, ValueError):  # one is empty, read-only or has gaps: no address is told
            pass
    return np.concatenate(slices)


def address(array: Array) -> int:
    """Where an array begins in memory; ctypes tells it five times as quickly as NumPy."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # it is a buffer
