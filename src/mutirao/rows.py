"""Only rows that matter travel: `items` with `items@rows` beside it stands for these rows of the model's `items`.

A reply that changed a few rows of a long table (embeddings) sends those rows and their numbers. An aggregator that
sets `takes_rows` gets replies as they came; for every other one, `whole` puts the rows into the current model.
"""

from collections.abc import Sequence

import numpy as np

from mutirao.arrays import Array, Arrays
from mutirao.fleet import ClientId, Failure, Reply

ROWS = "@rows"


def fault_of_rows(name: str, rows: object, mine: Array) -> Failure | None:
    """What is wrong with the row numbers sent for `name`, of which the model holds `mine`; None if nothing is."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "i" or rows.ndim != 1:
        return Failure("dtype", f"{name + ROWS!r} is not a vector of whole numbers")
    if mine.ndim == 0 or not 0 < len(rows) <= len(mine):
        return Failure("shape", f"{name + ROWS!r} names {len(rows)} rows of {mine.shape}")
    rising = np.count_nonzero(rows[1:] > rows[:-1])  # quicker than all(), and there is one for every client
    if rows[0] < 0 or rows[-1] >= len(mine) or rising < len(rows) - 1:
        return Failure("shape", f"{name + ROWS!r} is not in rising order from 0 to {len(mine) - 1}")
    return None


def whole(current: Arrays, arrays: Arrays) -> Arrays:
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


def whole_replies(current: Arrays, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """Replies with their arrays made whole; those that are stay as they are."""
    made = {c: whole(current, r.arrays) for c, r in replies.items()}
    return {c: r if made[c] is r.arrays else Reply(made[c], r.extras, r.metrics, r.n) for c, r in replies.items()}


def one_table(slices: Sequence[Array]) -> Array:
    """The slices below each other; those of a round mostly lie so already, cut from one array, and are not copied."""
    base = slices[0].base
    if isinstance(base, np.ndarray) and base.flags.c_contiguous and base.dtype == slices[0].dtype:
        at = base.__array_interface__["data"][0]
        for piece in slices:
            if piece.base is not base or piece.__array_interface__["data"][0] != at:
                break
            at += piece.nbytes
        else:
            if at == base.__array_interface__["data"][0] + base.nbytes:
                return base.reshape(-1, slices[0].shape[1])
    return np.concatenate(slices)
