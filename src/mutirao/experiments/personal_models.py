"""A task with personal models: what it goes with, who is new, and how each client fares by its own model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from mutirao.config import build
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import across_clients
from mutirao.core.exclusion import FleetWithout, PopulationWithout
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.parts import as_handler, names_of
from mutirao.core.records import Row
from mutirao.core.rounds import Evaluate, Run
from mutirao.errors import ConfigError
from mutirao.metrics import direction_of
from mutirao.personalization import OneModel, Personal

T = TypeVar("T")  # a Task, which is made of this
COMMON_MODEL_ARTIFACTS = (
    "confusion.png",
    "verdict.json",
    "queries.csv",
    "ranker.safetensors",
)  # exhibits that show how the common model judges


def personal_of(config: Any) -> Personal:
    """The kind that a configuration asks for, if it goes with the other settings."""
    kind: Personal = build("personal", config.personal)
    if isinstance(kind, OneModel):
        return kind
    called = f"personal={kind.name} judges each client by its own model"
    if config.centralised:
        raise ConfigError(f"{called}, and centralised=true has one client; use personal=none")
    if config.secure.name != "none":
        raise ConfigError(f"{called}, and secure={config.secure.name} shows nothing but sums; use secure=none")
    if config.privacy.name not in ("none", "central"):
        raise ConfigError(f"{called}, and with privacy={config.privacy.name} clients tell no metrics; use central")
    return kind


def check_test_data(kind: Personal, provides: frozenset[str], population: Mapping[ClientId, Any]) -> None:
    """Refuse clients that have nothing of their own to be judged by."""
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    if "evaluate" not in provides and not can_evaluate(population):
        raise ConfigError(f"personal={kind.name}: the clients of this task hold no test data of their own to judge by")


def as_global(evaluate: Evaluate) -> Evaluate:
    """The judgement of the common model, where personal ones are judged beside it: `global_accuracy`."""

    def judge(arrays: Arrays) -> dict[str, float]:
        return {k if k.startswith("global_") else f"global_{k}": v for k, v in evaluate(arrays).items()}

    return judge


def client_metric_names(task: Any, handler: Any, summed: bool = False) -> tuple[str, tuple[str, ...]]:
    """The metric that judges a task whose clients judge on their own test data, and all that they tell.

    If no more than sums are seen (`summed`), these are of loss and accuracy alone.
    """
    usual = {"loss", *({"accuracy"} & names_of(task.provides, "metrics"))}
    tells = not summed and getattr(handler, "figures", None) is not None
    own = task.judge in usual or (task.judge in task.metrics and tells)
    figures = [name for name in task.metrics if direction_of(name, task.directions) and (tells or name in usual)]
    return task.judge if own else max(usual & {"accuracy"}, default="loss"), tuple(
        dict.fromkeys([*figures, *sorted(usual)])
    )


def make_personal(given: T, config: Any) -> T:
    """The task with personal models, if the configuration asks for any."""
    kind, task = personal_of(config), cast("Any", given)
    if isinstance(kind, OneModel):
        return given
    check_test_data(kind, as_handler(task.handler).provides, task.population)
    handler: Any = kind.at_client(task.handler)
    initial, show = task.initial, task.exhibits
    shared = getattr(handler, "shared", None)  # a handler whose model is made later begins with it by itself
    judge, metrics = client_metric_names(task, handler)
    if not kind.whole:
        show = replace(
            show,
            pictures={k: v for k, v in show.pictures.items() if k not in COMMON_MODEL_ARTIFACTS},
            files={k: v for k, v in show.files.items() if k not in COMMON_MODEL_ARTIFACTS},
        )
    made_of_it: T = replace(
        task,
        handler=handler,
        initial=initial if shared is None else lambda: shared(initial()),
        evaluate=as_global(task.evaluate) if kind.whole and task.evaluate is not None else None,
        judge=judge,
        metrics=metrics,
        exhibits=show,
    )
    return made_of_it


@dataclass(frozen=True)
class ClientRoles:
    """Who trains and who is new, and how both are judged."""

    kind: Personal = OneModel()
    new: frozenset[ClientId] = frozenset()

    @classmethod
    def of(cls, config: Any, population: Mapping[ClientId, Any]) -> "ClientRoles":
        """Of all clients of a task; the seed decides who is new."""
        kind = personal_of(config)
        return cls(kind, kind.new_clients(list(population), config.seed) if kind.new else frozenset())

    @property
    def personal(self) -> bool:
        """Whether there are personal models at all."""
        return not isinstance(self.kind, OneModel)

    def trained(self, fleet: Fleet, given: T) -> tuple[Fleet, T]:
        """The fleet and the task without new clients."""
        task = cast("Any", given)
        if not self.new:
            return fleet, given
        return FleetWithout(fleet, self.new), replace(task, population=PopulationWithout(task.population, self.new))

    def judge(self, fleet: Fleet, run: Run, judged: tuple[str, bool, Mapping[str, bool]]) -> Row:
        """How clients fare by their own models: `accuracy`, `accuracy_worst` and so on, of new ones `new_accuracy`."""
        row: Row = {}
        metric, higher, also = judged
        here = fleet.clients()
        for prefix, names in (
            ("", [c for c in here if c not in self.new]),
            ("new_", [c for c in here if c in self.new]),
        ):
            if names:
                found = across_clients(fleet, run, names, metric, higher, {**also, "loss": False})
                row |= {prefix + name.removesuffix("_mean"): value for name, value in found.items()}
        return row
