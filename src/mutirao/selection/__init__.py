"""Client selection. A selector is called as `(roster, round, rng) -> clients`, and selects among those present.

A selector that must ask clients first has `.probes(roster, round, rng)`; one that uses metrics of clients declares them
in `needs`. All that is known of clients stands in the roster's columns, so a selection among a million is a few array
operations.
"""

from collections.abc import Callable
from typing import Any

from mutirao.selection.aoiu import AoI, AoIU, Entropy
from mutirao.selection.base import PROBE_SAMPLES, check_setting, how_many, names_in, sizes
from mutirao.selection.basic import RoundRobin, Uniform, everyone
from mutirao.selection.divfl import DivFL
from mutirao.selection.fedcor import FedCor
from mutirao.selection.fedcs import FedCS
from mutirao.selection.hicsfl import HiCSFL
from mutirao.selection.oort import Oort
from mutirao.selection.powerofchoice import PowerOfChoice
from mutirao.selection.weighted_scores import Mix

PARTS = (everyone, Uniform, RoundRobin, AoI, Entropy, AoIU, Mix, PowerOfChoice, Oort, FedCS, HiCSFL, DivFL, FedCor)
NAMES: dict[str, Callable[..., Any]] = {part.__name__.lower(): part for part in PARTS}

__all__ = [
    "NAMES",
    "PROBE_SAMPLES",
    "AoI",
    "AoIU",
    "DivFL",
    "Entropy",
    "FedCS",
    "FedCor",
    "HiCSFL",
    "Mix",
    "Oort",
    "PowerOfChoice",
    "RoundRobin",
    "Uniform",
    "check_setting",
    "everyone",
    "how_many",
    "names_in",
    "sizes",
]
