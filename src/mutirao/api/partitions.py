"""Partitions of data passed from Python: the usual ones, and `dealt` for data that are already assigned to clients.

`dealt` is a name that old run folders hold.
"""

from typing import Any, NoReturn

import numpy as np

from mutirao import partitioning
from mutirao.errors import ConfigError


def already_assigned(labels: Any, clients: int, rng: np.random.Generator) -> NoReturn:
    """Refuse: such data name their clients by a dict or a column, so there is nothing to split."""
    raise ConfigError("partition=dealt: the data do not name their clients; pass client=COLUMN, or a dict of clients")


NAMES = {k: make for k, make in partitioning.NAMES.items() if k not in ("by_key", "noise")} | {
    "dealt": already_assigned
}
