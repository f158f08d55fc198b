"""What a server reads in the sum of many users' updates: rows that one user alone touched are that user's own.

A rare item is touched by a single user of the round, and its row of the sum is lr e_i s of that user. Rows of one user
are multiples of one vector: rows in one direction belong together, and are read as the update of one user. Whose it
is, the sum does not say.
"""

import numpy as np
import numpy.typing as npt

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
        reply: Arrays = {ITEMS: (sent[ITEMS][mine] + change[mine]).astype(np.float64), ITEM_ROWS: mine}
        reading = attacker(sent, reply)
        if reading.is_sure:
            found.append(reading)
    return found


def alike(units: Floats) -> list[npt.NDArray[np.intp]]:
    """Places of rows in one direction, or in the opposite one: the largest groups first, each row in one."""
    together = 1 - (units @ units.T) ** 2 < ALIKE**2
    count, groups = together.sum(1), []
    while len(count) and count.max() >= FEWEST:
        members = np.flatnonzero(together[count.argmax()])
        groups.append(members)
        count -= together[:, members].sum(1)
        together[:, members] = False
        count[members] = 0
    return groups
