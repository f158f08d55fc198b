"""Mutirão: federated learning when data cannot be moved and does not look alike.

The public names are loaded when first used, so that `import mutirao` and the command line start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutirao.arrays import Arrays
    from mutirao.config import Common, Part, setting
    from mutirao.errors import MutiraoError
    from mutirao.fleet import Answers, Failure, Fleet, Handler, Reply, Request, Site
    from mutirao.fleets.local import LocalFleet
    from mutirao.recipes import Recipe, Task, federate
    from mutirao.rounds import Aggregator, Merged, Round, Run, Selector, step, train
    from mutirao.running import execute
    from mutirao.samples import Samples, virtual_clients
    from mutirao.training import Trainer

__version__ = "0.1.0"

_HOME = {
    "arrays": ["Arrays"],
    "config": ["Common", "Part", "setting"],
    "errors": ["MutiraoError"],
    "fleet": ["Answers", "Failure", "Fleet", "Handler", "Reply", "Request", "Site"],
    "fleets.local": ["LocalFleet"],
    "recipes": ["Recipe", "Task", "federate"],
    "rounds": ["Aggregator", "Merged", "Round", "Run", "Selector", "step", "train"],
    "running": ["execute"],
    "samples": ["Samples", "virtual_clients"],
    "training": ["Trainer"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Aggregator",
    "Answers",
    "Arrays",
    "Common",
    "Failure",
    "Fleet",
    "Handler",
    "LocalFleet",
    "Merged",
    "MutiraoError",
    "Part",
    "Recipe",
    "Reply",
    "Request",
    "Round",
    "Run",
    "Samples",
    "Selector",
    "Site",
    "Task",
    "Trainer",
    "execute",
    "federate",
    "setting",
    "step",
    "train",
    "virtual_clients",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mutirao' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mutirao.{_MODULE_OF[name]}"), name)
