"""Mutirão: federated learning when data cannot be moved and does not look alike.

The public names are loaded when first used, so that `import mutirao` and the command line start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutirao.api.compare import Table, compare
    from mutirao.api.result import Result
    from mutirao.api.run import load, run
    from mutirao.config import Common, Part, setting
    from mutirao.core.arrays import Arrays
    from mutirao.core.fleet import Answers, Failure, Fleet, Reply, Request, Site, Wrapper
    from mutirao.core.handler_wrapper import Forward, HandlerWrapper
    from mutirao.core.needs import Capabilities, Needs
    from mutirao.core.parts import Aggregator, Filter, Handler, Merged, Selector
    from mutirao.core.records import Round
    from mutirao.core.rounds import Group, Run, step, train
    from mutirao.errors import MutiraoError
    from mutirao.experiments.artifacts import Artifacts, Picture
    from mutirao.experiments.task import Recipe, Task, federate
    from mutirao.report import execute
    from mutirao.report.notebook import show
    from mutirao.runs.run_folder import load_run, save_run
    from mutirao.simulation.local_fleet import LocalFleet
    from mutirao.systems.ranking.ranker import Ranker
    from mutirao.systems.recsys.recommender import Recommender
    from mutirao.training.adapters import number_classes, renumber
    from mutirao.training.samples import ClientData, Samples, virtual_clients
    from mutirao.training.trainer import Trainer

__version__ = "0.2.0"

_HOME = {
    "core.arrays": ["Arrays"],
    "config": ["Common", "Part", "setting"],
    "errors": ["MutiraoError"],
    "core.fleet": ["Answers", "Failure", "Fleet", "Reply", "Request", "Site", "Wrapper"],
    "api.compare": ["Table", "compare"],
    "api.result": ["Result"],
    "api.run": ["load", "run"],
    "simulation.local_fleet": ["LocalFleet"],
    "experiments.task": ["Recipe", "Task", "federate"],
    "systems.ranking.ranker": ["Ranker"],
    "systems.recsys.recommender": ["Recommender"],
    "core.handler_wrapper": ["Forward", "HandlerWrapper"],
    "core.needs": ["Capabilities", "Needs"],
    "core.parts": ["Aggregator", "Filter", "Handler", "Merged", "Selector"],
    "core.records": ["Round"],
    "core.rounds": ["Group", "Run", "step", "train"],
    "experiments.artifacts": ["Artifacts", "Picture"],
    "report": ["execute"],
    "report.notebook": ["show"],
    "runs.run_folder": ["load_run", "save_run"],
    "training.adapters": ["number_classes", "renumber"],
    "training.samples": ["ClientData", "Samples", "virtual_clients"],
    "training.trainer": ["Trainer"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Aggregator",
    "Answers",
    "Arrays",
    "Artifacts",
    "Capabilities",
    "ClientData",
    "Common",
    "Failure",
    "Filter",
    "Fleet",
    "Forward",
    "Group",
    "Handler",
    "HandlerWrapper",
    "LocalFleet",
    "Merged",
    "MutiraoError",
    "Needs",
    "Part",
    "Picture",
    "Ranker",
    "Recipe",
    "Recommender",
    "Reply",
    "Request",
    "Result",
    "Round",
    "Run",
    "Samples",
    "Selector",
    "Site",
    "Table",
    "Task",
    "Trainer",
    "Wrapper",
    "compare",
    "execute",
    "federate",
    "load",
    "load_run",
    "number_classes",
    "renumber",
    "run",
    "save_run",
    "setting",
    "show",
    "step",
    "train",
    "virtual_clients",
]


_FORMER = {"Cohort": "Group", "Exhibits": "Artifacts"}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        from mutirao.deprecation import former_names

        return former_names("mutirao", _FORMER)(name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mutirao' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mutirao.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
