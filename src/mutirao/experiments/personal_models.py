"""Personal models in a task: allowed settings, new clients, and the evaluation of each client's own model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from mutirao.config import build
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import across_clients
from mutirao.core.exclusion import FleetWithout, PopulationWithout
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.needs import Capabilities
from mutirao.core.parts import as_handler
from mutirao.core.records import Row
from mutirao.core.rounds import Evaluate, Run
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts
from mutirao.metrics import direction_of
from mutirao.personalization import OneModel, Personal

T = TypeVar("T")  # a Task, which is made of this
COMMON_MODEL_ARTIFACTS = (
    "confusion.png",
    "verdict.json",
    "queries.csv",
    "ranker.safetensors",
)  # that show results of the common model


def personal_of(config: Any) -> Personal:
    """The configured kind of personal model; ConfigError if it conflicts with other settings."""
    kind: Personal = build("personal", config.personal)
    if isinstance(kind, OneModel):
        return kind
    called = f"personal={kind.name} evaluates each client's own model"
    if config.centralised:
        raise ConfigError(f"{called}, but centralised=true has one client; use personal=none")
    if config.secure.name != "none":
        raise ConfigError(f"{called}, but secure={config.secure.name} reveals only sums; use secure=none")
    if config.privacy.name not in ("none", "central"):
        raise ConfigError(f"{called}, but with privacy={config.privacy.name} clients report no metrics; use central")
    return kind


def check_test_data(kind: Personal, capabilities: Capabilities, population: Mapping[ClientId, Any]) -> None:
    """Refuse clients without test data of their own."""
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    if "evaluate" not in capabilities.requests and not can_evaluate(population):
        raise ConfigError(
            f"personal={kind.name}: the clients of this task have no test data of their own; use personal=none"
        )


def as_global(evaluate: Evaluate) -> Evaluate:
    """The evaluation of the common model beside personal ones, with metrics such as `global_accuracy`."""

    def evaluate_global(arrays: Arrays) -> dict[str, float]:
        return {f"global_{k.removeprefix('global_')}": v for k, v in evaluate(arrays).items()}

    return evaluate_global


def client_metric_names(task: Any, handler: Any, summed: bool = False) -> tuple[str, tuple[str, ...]]:
    """The primary metric where clients evaluate on their own test data, and all metrics that they report.

    If the server sees sums alone (`summed`), these are only loss and accuracy.
    """
    standard = {"loss", *({"accuracy"} & {*task.capabilities.metrics})}
    # Clients compute the task's own metrics only if their handler has code for it, and never inside of sums.
    own = not summed and getattr(handler, "figures", None) is not None
    reported = [m for m in task.metrics if direction_of(m, task.directions) and (own or m in standard)]
    primary = task.judge
    if primary not in standard and not (own and primary in task.metrics):
        primary = "accuracy" if "accuracy" in standard else "loss"
    return primary, tuple(dict.fromkeys([*reported, *sorted(standard)]))


def without_common_model(artifacts: Artifacts) -> Artifacts:
    """The artifacts without those that show results of the common model."""
    return replace(
        artifacts,
        pictures={k: v for k, v in artifacts.pictures.items() if k not in COMMON_MODEL_ARTIFACTS},
        files={k: v for k, v in artifacts.files.items() if k not in COMMON_MODEL_ARTIFACTS},
    )


def make_personal(given: T, config: Any) -> T:
    """The task with personal models, if they are configured."""
    kind = personal_of(config)
    task = cast("Any", given)
    if isinstance(kind, OneModel):
        return given
    check_test_data(kind, as_handler(task.handler).capabilities, task.population)
    handler: Any = kind.at_client(task.handler)
    initial = task.initial
    artifacts = task.exhibits
    shared = getattr(handler, "shared", None)  # None if the handler builds its model later
    judge, metrics = client_metric_names(task, handler)
    evaluate = None
    # Only a whole model can be evaluated on the server; a part of one lacks the layers that stay at the clients.
    if not kind.whole:
        artifacts = without_common_model(artifacts)
    elif task.evaluate is not None:
        evaluate = as_global(task.evaluate)
    made_of_it: T = replace(
        task,
        handler=handler,
        initial=initial if shared is None else lambda: shared(initial()),
        evaluate=evaluate,
        judge=judge,
        metrics=metrics,
        exhibits=artifacts,
    )
    return made_of_it


@dataclass(frozen=True)
class ClientRoles:
    """The clients that train and new clients, which are evaluated apart."""

    kind: Personal = OneModel()
    new: frozenset[ClientId] = frozenset()

    @classmethod
    def of(cls, config: Any, population: Mapping[ClientId, Any]) -> "ClientRoles":
        """Of all clients of a task; the seed decides who is new."""
        kind = personal_of(config)
        if not kind.new:
            return cls(kind)
        return cls(kind, kind.new_clients(list(population), config.seed))

    @property
    def has_personal_models(self) -> bool:
        """Whether clients have models of their own."""
        return not isinstance(self.kind, OneModel)

    def without_new(self, fleet: Fleet, given: T) -> tuple[Fleet, T]:
        """The fleet and the task without new clients."""
        task = cast("Any", given)
        if not self.new:
            return fleet, given
        return FleetWithout(fleet, self.new), replace(task, population=PopulationWithout(task.population, self.new))

    def evaluate(self, fleet: Fleet, run: Run, metrics: tuple[str, bool, Mapping[str, bool]]) -> Row:
        """Metrics of the clients' own models: `accuracy`, `accuracy_worst` ..., and `new_accuracy` of new clients."""
        row: Row = {}
        metric, higher_is_better, others = metrics
        present = fleet.clients()
        trained = [c for c in present if c not in self.new]
        new = [c for c in present if c in self.new]
        for prefix, names in (("", trained), ("new_", new)):
            if names:
                found = across_clients(fleet, run, names, metric, higher_is_better, {**others, "loss": False})
                row |= {prefix + name.removesuffix("_mean"): value for name, value in found.items()}
        return row
