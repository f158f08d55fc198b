"""Task and Recipe: a recipe is a configuration class, the task it describes and the flow that trains it."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from mutirao.clustering.context import EvaluateGroups
from mutirao.compression import Compression, NoCompression, compress_of
from mutirao.config import Common, build, load_name, nearest
from mutirao.core.agreement import agreement_config
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import across_clients
from mutirao.core.exclusion import PopulationWithout, parse_names
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler, as_handler, check_needs
from mutirao.core.rounds import Evaluate, Group, Patience, Round, Run, train
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts
from mutirao.experiments.disclosure import Disclosure, is_private, ordinary_disclosure
from mutirao.experiments.group_flow import federate_groups
from mutirao.experiments.grouping import (
    Predictions,
    add_signatures,
    check_groups,
    group_disclosure,
    has_groups,
    make_grouped,
)
from mutirao.experiments.personal_models import ClientRoles, make_personal, personal_of
from mutirao.experiments.simulated_parts import (
    EarlyStopping,
    build_aggregate,
    build_screen,
    build_select,
    check_clients_per_round,
    check_min_clients,
    is_asynchronous,
    make_asynchronous,
    simulate,
)
from mutirao.metrics import direction_of
from mutirao.privacy import build_privacy, within_budget
from mutirao.privacy.secure_aggregation import NoSecureAggregation, Secure
from mutirao.privacy.secure_aggregation.kinds import secure_of
from mutirao.registry import check_module
from mutirao.simulation.drift import DriftContext, DriftHandler, check_drift
from mutirao.training.lr_schedules import Constant

log = logging.getLogger("mutirao")

# Settings that a flow of its own must support, as its recipe declares, and the reason to refuse them where it does not.
FLOW_SETTINGS = {
    "privacy": "does not support it",
    "secure": "looks at single clients",
    "compress": "takes whole updates",
    "drift": "does not model it",
    "personal": "has its own models",
    "cluster": "has one model for all",
}
MAX_EVALUATING_CLIENTS = 10_000  # clients that evaluate the final model by default
PYTHON = "python"  # the recipe name of runs with a model and data that were passed as objects
# The path and the description of each recipe; they are here so that listing recipes imports none of them.
NAMES = {
    "quickstart": ("mutirao.systems.quickstart:recipe", "handwritten digits over 50 non-IID clients, in seconds"),
    "ranking": ("mutirao.systems.ranking.recipe:recipe", "learning to rank with FedRisk, on LETOR or generated data"),
    "online": (
        "mutirao.systems.ranking.online.recipe:recipe",
        "online learning to rank from clicks with FPDGD; each user is a client",
    ),
    "selection": (
        "mutirao.systems.selection_lab:recipe",
        "client selection: AoI-U and its rivals, on handwritten digits",
    ),
    "groups": (
        "mutirao.systems.groups_lab.recipe:recipe",
        "client groups: one model for each group of similar clients, without Byzantine ones",
    ),
    "recsys": (
        "mutirao.systems.recsys.recipe:recipe",
        "recommendation with FedRecon: users' vectors are rebuilt, never kept",
    ),
    "cytology": (
        "mutirao.systems.cytology.recipe:recipe",
        "cervical screening: hospitals train a classifier on their own slides",
    ),
    "tabular": (
        "mutirao.systems.tabular.recipe:recipe",
        "any table, partitioned by a column of client names, or one file for each site",
    ),
    "images": (
        "mutirao.systems.images.recipe:recipe",
        "pictures of any kind in folders by class, over clients or sites",
    ),
    "cifar10": ("mutirao.systems.cifar10:recipe", "CIFAR-10, or a synthetic stand-in, over 100 non-IID clients"),
}


@dataclass(frozen=True)
class Task:
    """The learning problem: the clients' handler and data, the initial model, and how the model is evaluated.

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> def mean(request, site):
    ...     return Reply({"mean": np.array([np.mean(site.data)])}, n=len(site.data))
    >>> task = Task(mean, {"ana": [1.0, 2.0], "bia": [6.0]}, lambda: {"mean": np.zeros(1)}, judge="loss")
    >>> sorted(task.population), task.higher_is_better
    (['ana', 'bia'], False)
    """

    handler: AnyHandler
    population: Mapping[ClientId, Any]
    initial: Callable[[], Arrays]
    evaluate: Evaluate | None = None
    judge: str = "accuracy"  # the metric that defines the best round
    ending: EarlyStopping = EarlyStopping()
    metrics: tuple[str, ...] = ()  # all metrics of `evaluate`, if known beforehand
    directions: Mapping[str, str] = field(default_factory=dict)  # metric -> "higher" or "lower", where not standard
    classes: int | None = None  # number of classes of a classifier
    noise: tuple[float, ...] = ()  # its standard deviation on each client's inputs, with partition=noise
    secure: Secure = NoSecureAggregation()  # how clients hide single updates in sums
    compress: Compression = NoCompression()  # how clients compress updates
    agreed: Mapping[str, str] = field(default_factory=dict)  # digests that all clients must have in common
    basis: Callable[[], Mapping[str, str]] = dict  # more such digests, outside the handler: data, features
    evaluate_groups: EvaluateGroups | None = None  # if not each group's model on all test data
    opinions: Predictions | None = None  # class probabilities by each group's model
    # Raises ConfigError if the model does not fit the data.
    check: Callable[[Arrays, Mapping[ClientId, Any]], None] | None = None
    knows: Any = None  # context for the recipe's own flow
    left_out: Mapping[ClientId, str] = field(default_factory=dict)  # clients excluded from what precedes the rounds
    facts: Mapping[str, Any] = field(default_factory=dict)  # stored with the run; must not change when it resumes
    exhibits: Artifacts = Artifacts()  # pictures and files of the report

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the primary metric is better; ConfigError if that is not known."""
        direction = direction_of(self.judge, self.directions)
        if direction is None:
            right = f"give the Task directions={{{self.judge!r}: 'higher'}}, or 'lower'"
            raise ConfigError(f"judge: it is not known whether a higher {self.judge!r} is better; {right}")
        return direction == "higher"

    @property
    def capabilities(self) -> Capabilities:
        """What clients can do besides returning arrays."""
        return as_handler(self.handler).capabilities

    @property
    def worker(self) -> AnyHandler:
        """The handler as clients run it, with secure aggregation and compression."""
        return self.compress.at_client(self.secure.at_client(self.handler))

    @property
    def update_metrics(self) -> set[str] | None:
        """The metrics that clients may send with an update; None if the handler declares none, and any are allowed."""
        return set(self.capabilities.metrics) or None


def client_evaluation_interval(config: Any, task: "Task") -> int:
    """Number of rounds between evaluations on every client's own test data; 0 disables them.

    Defaults to one evaluation after the last round, for simulated clients that have test data and may report metrics.
    Raises ConfigError before the first round if clients would be evaluated on their training data.
    """
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    interval = int(config.clients_every)
    if interval > 0 and "evaluate" not in task.capabilities.requests and not can_evaluate(task.population):
        raise ConfigError("clients_every: the clients of this task have no test data of their own; use 0")
    if interval:
        return max(0, interval)
    if config.centralised or getattr(config, "sites", False) or len(task.population) > MAX_EVALUATING_CLIENTS:
        return 0
    if f"{task.judge}_worst_decile" in task.metrics:  # the task evaluates single clients itself
        return 0
    reports = task.judge in task.capabilities.metrics and can_evaluate(task.population, surely=True)
    if reports and not is_private(config):
        return int(config.rounds)
    return 0


def client_metrics(task: Task, with_others: bool = True) -> tuple[str, bool, dict[str, bool]]:
    """The primary metric, whether more of it is better, and the same of the task's other metrics."""
    names: list[str] = []
    if with_others:
        names += task.metrics
        if "accuracy" in task.capabilities.metrics:
            names.append("accuracy")
    others = {}
    for metric in names:
        direction = direction_of(metric, task.directions)
        if direction:
            others[metric] = direction == "higher"
    return task.judge, task.higher_is_better, others


def evaluate_clients(fleet: Fleet, config: Any, task: Task, run: Run) -> dict[str, float]:
    """The model's metrics over all clients; a failure is fatal only if `clients_every` is set."""
    metrics = client_metrics(task, with_others=bool(config.clients_every))
    try:
        return across_clients(fleet, run, None, *metrics)
    except ConfigError as error:
        if config.clients_every:
            raise
        log.info("metrics of single clients are not available: %s", error)
        return {}


def federate(fleet: Fleet, config: Any, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow: rounds of select, train, aggregate, evaluate; with groups, one model for each.

    >>> import numpy as np
    >>> from mutirao import Common, LocalFleet, Reply, Run
    >>> from mutirao.config import resolve
    >>> def mean(request, site):
    ...     return Reply({"mean": np.array([np.mean(site.data)])}, n=len(site.data))
    >>> task = Task(mean, {"ana": [1.0, 2.0], "bia": [6.0]}, lambda: {"mean": np.zeros(1)}, judge="loss")
    >>> run, config = Run(task.initial()), resolve(Common, {"clients": 2, "per_round": 2, "rounds": 1})
    >>> [done.row["replied"] for done in federate(LocalFleet(mean, task.population), config, task, run)]
    [2]
    >>> run.arrays["mean"]
    array([3.])
    """
    if has_groups(config):
        yield from federate_groups(fleet, config, task, run)
        return
    all_clients = fleet
    roles = ClientRoles.of(config, task.population)
    fleet, task = roles.without_new(fleet, task)
    # Updates are decoded before a simulated clock delays the replies.
    fleet = simulate(compress_of(config).at_server(fleet), config, run)
    wait = config.wait
    expect = len(task.population)
    # With simulated availability no client is waited for: real time does not pass in a simulation.
    if config.available.name != "always":
        wait = 0.0
        expect = 1
    select = build_select(config, task.classes)
    aggregate = build_aggregate(config, task)
    check_clients_per_round(config, task.population)
    check_min_clients(config, aggregate, task.population)
    privacy = build_privacy(config)
    secure = secure_of(config)
    secure.check(config, select, aggregate, len(task.population))
    select, aggregate = privacy.at_server(select, aggregate, len(task.population), config)
    filters = build_screen(config)
    interval = client_evaluation_interval(config, task)
    check_needs(task.capabilities, *Group(select, aggregate, filters=filters).parts)
    fleet = secure.at_server(fleet, task.capabilities.metrics)
    fleet, select = make_asynchronous(
        fleet, config, run, select, aggregate, len(task.population), classes=task.classes, rounds=config.rounds
    )
    # None is half of the selected clients. An asynchronous method aggregates what has arrived, be it one reply.
    min_replies = config.min_replies or None
    if min_replies is None and is_asynchronous(aggregate):
        min_replies = 1
    rounds = train(
        run,
        fleet,
        rounds=config.rounds,
        select=select,
        aggregate=aggregate,
        filters=filters,
        evaluate=task.evaluate,
        evaluate_every=config.evaluate_every,
        config=agreement_config(task.agreed),
        patience=Patience(min_replies=min_replies, wait=wait),
        expect=expect,
        size_cap=config.size_cap,
        metrics=task.update_metrics,
    )
    for done in within_budget(rounds, run, config.rounds, privacy, lambda: [(run.memory, aggregate)]):
        if roles.has_personal_models:
            if run.round % config.evaluate_every == 0 or run.round == config.rounds:
                done.row.update(roles.evaluate(all_clients, run, client_metrics(task)))
        elif interval and run.round % interval == 0:
            done.row.update(evaluate_clients(all_clients, config, task, run))
        yield done


def no_extra_disclosure(config: Any, task: Task) -> Disclosure:
    """For recipes with the ordinary flow."""
    return Disclosure()


@dataclass(frozen=True)
class Recipe:
    """A configuration class, the task it describes and the flow that solves it.

    >>> import numpy as np
    >>> import mutirao as mu
    >>> def mean(request, site):
    ...     return mu.Reply({"mean": np.array([np.mean(site.data)])}, n=len(site.data))
    >>> def means(config):
    ...     data = {"ana": [1.0, 2.0], "bia": [6.0]}
    ...     return mu.Task(mean, data, lambda: {"mean": np.zeros(1)}, lambda run: {"loss": 0.0}, judge="loss")
    >>> summary = mu.execute(mu.Recipe(mu.Common, means), {"rounds": 1, "clients": 2}, "runs/means", pictures=False)
    >>> summary["rounds"], summary["final"]
    (1, {'loss': 0.0})
    """

    config: type[Common]
    task: Callable[[Any], Task]
    flow: Callable[[Fleet, Any, Task, Run], Iterator[Round]] = federate
    heeds: frozenset[str] = frozenset()  # `FLOW_SETTINGS` that a flow of its own supports; `federate` supports all
    name: str = ""  # for recipes that are no attribute of a module
    asks: Callable[[Any, Task], Disclosure] = no_extra_disclosure  # what a flow of its own exchanges in addition

    def disclosure(self, config: Any, task: Task) -> Disclosure:
        """All requests to the task's clients with these settings, and all that leaves them besides model updates."""
        select = build_select(config, task.classes)
        aggregate = build_aggregate(config, task)
        own = self.asks(config, task) | group_disclosure(config, task)
        parts = Group(select, aggregate, filters=build_screen(config)).parts
        personal = config.personal.name != "none"
        evaluated = personal or "evaluate" in own.requests or client_evaluation_interval(config, task) > 0
        return ordinary_disclosure(task, parts, evaluated) | own

    def prepare(self, config: Any) -> Task:
        """The task as it is trained: without excluded clients, and with privacy, groups and drift in the handler."""
        if self.flow is not federate:
            for key, why in FLOW_SETTINGS.items():
                if key not in self.heeds and (name := getattr(config, key).name) != "none":
                    raise ConfigError(f"{key}={name}: the flow of this recipe {why}; use none")
        # Both refuse wrong combinations before any data are read.
        personal_of(config)
        check_groups(config)
        task = replace(self.task(config), secure=secure_of(config), compress=compress_of(config))
        if config.partition.name == "noise" and not task.noise:
            raise ConfigError("partition=noise: this recipe does not change its clients' inputs; use another partition")
        if config.schedule.name != "constant" and as_handler(task.handler).schedule in (None, Constant()):
            raise ConfigError(
                f"schedule={config.schedule.name}: this task's clients train with one learning rate; use constant"
            )
        names = [c for c in parse_names(config.exclude) if c not in task.left_out or c in task.population]
        if names:
            task = replace(task, population=PopulationWithout(task.population, names))
        task = make_grouped(make_personal(task, config), config)
        handler = as_handler(task.handler)
        task = replace(task, agreed={**handler.agreed(), **task.agreed}, check=task.check or handler.check)
        own = task.handler
        # A handler that adds the noise itself must not get it twice.
        if not handler.private:
            own = build_privacy(config).at_client(task.handler)
        return replace(task, handler=drift_with(config, add_signatures(config, own, task.handler), task))


def drift_with(config: Any, handler: AnyHandler, task: Task) -> AnyHandler:
    """The handler with the configured drift of the clients' data."""
    if config.drift.name == "none":
        return handler
    drift = build("drift", config.drift)
    context = DriftContext(task.population, config.seed, task.classes)
    check_drift(drift, context)
    return DriftHandler(handler, drift, context)


def recipe_name(recipe: Recipe) -> str:
    """The name or dotted path by which `find` returns this recipe; its own name, or none, if it is in no module."""
    if recipe.name:
        return recipe.name
    modules = {k: m for k, m in sys.modules.items() if isinstance(m, ModuleType) and k != "__main__"}
    # The module that defines the recipe is searched first: others may import it from there.
    home = recipe.task.__module__
    for module in sorted(modules, key=lambda name: name != home):
        for attribute, value in list(vars(modules[module]).items()):
            if value is recipe:
                path = f"{module}:{attribute}"
                return next((name for name, (known, _) in NAMES.items() if known == path), path)
    return ""


def find(name: str) -> Recipe:
    """The recipe of that name, or behind a dotted path `package.module:name`.

    >>> find("quickstart").config.__name__, find("quickstart").config().rounds
    ('Config', 40)
    """
    if name == PYTHON:
        right = "call mutirao.run again with the same model and data, and resume=True to continue it"
        raise ConfigError(f"a run of {name!r} was started from Python with mutirao.run; {right}")
    if ":" not in name and name not in NAMES:
        raise ConfigError(f"no recipe is called {name!r}{nearest(name, NAMES)}")
    check_module("recipe", name)
    path, _ = NAMES.get(name, (name, ""))
    recipe = load_name(path)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{name!r} is not a Recipe")
    return recipe
