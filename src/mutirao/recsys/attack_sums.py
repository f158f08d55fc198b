"""What a server reads in the sum of many users' updates: rows that one user alone touched are that user's own.

A rare item is touched by a single user of the round, and its row of the sum is lr e_i s of that user. Rows of one user
are multiples of one vector: rows in one direction belong together, and are read as the update of one user. Whose it
is, the sum does not say.
"""

from collections.abc import Sequence

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.recsys.attack import Attacker, Floats, Reading
from mutirao.recsys.fedrecon import ITEM_ROWS, ITEMS

ALIKE = 3e-3  # sine of the angle between two rows below which they are of one user
FEWEST = 3  # rows of a user: two fall on the scale by chance


def read_sum(attacker: Attacker, sent: Arrays, change: Floats) -> list[Reading]:
    """Groups of rows that one user alone touched, with their ratings; `change` is the sum of all updates."""
    lengths = np.linalg.norm(change, axis=1)
    rows = np.flatnonzero(lengths > 1e-5)
    units = change[rows] / lengths[rows, None]
    found = []
    for group in alike(units):
        mine = rows[group].astype(np.int32)
        reply = {ITEMS: (sent[ITEMS][mine] + change[mine]).astype(np.float64), ITEM_ROWS: mine}
        reading = attacker(sent, reply)
        if reading.is_sure:
            found.append(reading)
    return found


def alike(units: Floats) -> Sequence[Floats]:
    """Places of rows in one direction, or in the opposite one: the largest groups first, each row in one."""
    left = np.arange(len(units))
    near = units @ units.T
    together = 1 - near**2 < ALIKE**2
    groups = []
    while len(left):
        inner = together[np.ix_(left, left)]
        most = int(inner.sum(1).argmax())
        if inner[most].sum() < FEWEST:
            break
        groups.append(left[inner[most]])
        left = left[~inner[most]]
    return groups
