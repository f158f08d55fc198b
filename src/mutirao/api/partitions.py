"""The partitions of data that come from Python: the usual ones, and `dealt` for data that come dealt to clients."""

from typing import Any, NoReturn

import numpy as np

from mutirao import partitioning
from mutirao.errors import ConfigError


def dealt(labels: Any, clients: int, rng: np.random.Generator) -> NoReturn:
    """Who holds what was said with the data: by a dict of clients, or by a column."""
    raise ConfigError("partition=dealt: the data do not say who holds what; give client=, or a dict of clients")


NAMES = {k: make for k, make in partitioning.NAMES.items() if k not in ("by_key", "noise")} | {"dealt": dealt}
