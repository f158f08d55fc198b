"""A recipe is a configuration, a task and a flow; the systems of this project are recipes by name."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from mutirao.clustering.plan import EvaluateGroups
from mutirao.compression import Compression, NoCompression, compress_of
from mutirao.config import Common, build, load_name, nearest
from mutirao.core.agreement import agreement_config
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import across_clients
from mutirao.core.exclusion import PopulationWithout, parse_names
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.parts import AnyHandler, as_handler, check_needs, names_of
from mutirao.core.rounds import Cohort, Evaluate, Patience, Round, Run, train
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits
from mutirao.experiments.async_flow import is_asynchronous, make_asynchronous
from mutirao.experiments.disclosure import Disclosure, is_private, ordinary_disclosure
from mutirao.experiments.early_stopping import EarlyStopping
from mutirao.experiments.group_flow import group_rounds
from mutirao.experiments.grouping import (
    Predictions,
    add_signatures,
    check_groups,
    group_disclosure,
    has_groups,
    make_grouped,
)
from mutirao.experiments.personal_models import ClientRoles, make_personal, personal_of
from mutirao.experiments.population_checks import check_clients_per_round, check_min_clients
from mutirao.experiments.simulated_parts import build_aggregate, build_screen, build_select, simulate
from mutirao.metrics import direction_of
from mutirao.privacy import build_privacy, within_budget
from mutirao.privacy.secure_aggregation import NoSecureAggregation, Secure
from mutirao.privacy.secure_aggregation.kinds import secure_of
from mutirao.registry import check_module
from mutirao.simulation.drift import DriftContext, DriftHandler, check_drift
from mutirao.training.lr_schedules import Constant

log = logging.getLogger("mutirao")

# Settings that a flow must know of, and why one that does not cannot go with them.
FLOW_SETTINGS = {
    "privacy": "does not keep to it",
    "secure": "looks at single clients",
    "compress": "takes whole updates",
    "drift": "does not model it",
    "personal": "has its own models",
    "cluster": "has one model for all",
}
MAX_EVALUATING_CLIENTS = 10_000  # clients that all judge the model at the end, if nobody says how often they are to
PYTHON = "python"  # what a run is called whose model and data were handed over as objects
# Where each recipe is and what it does, said here so that listing them imports none of them.
NAMES = {
    "quickstart": ("mutirao.systems.quickstart:recipe", "handwritten digits over 50 non-IID clients, in seconds"),
    "ranking": ("mutirao.systems.ranking.recipe:recipe", "learning to rank with FedRisk, on LETOR or generated data"),
    "online": (
        "mutirao.systems.ranking.online.recipe:recipe",
        "online learning to rank from clicks: FPDGD, users being the clients",
    ),
    "selection": ("mutirao.systems.selection_lab:recipe", "who takes part in a round: AoI-U and its rivals, on digits"),
    "groups": (
        "mutirao.systems.groups_lab.recipe:recipe",
        "who is alike: one model for each group of clients, liars kept out",
    ),
    "recsys": (
        "mutirao.systems.recsys.recipe:recipe",
        "recommendation with FedRecon: users' vectors are rebuilt, never kept",
    ),
    "cytology": (
        "mutirao.systems.cytology.recipe:recipe",
        "cervical screening: hospitals train a head on their own slides",
    ),
    "tabular": (
        "mutirao.systems.tabular.recipe:recipe",
        "any table, by a column that says whose a row is or a file a site",
    ),
    "images": (
        "mutirao.systems.images.recipe:recipe",
        "pictures of any kind in folders by class, over clients or sites",
    ),
    "cifar10": ("mutirao.systems.cifar10:recipe", "CIFAR-10, or a synthetic stand-in, over 100 non-IID clients"),
}


@dataclass(frozen=True)
class Task:
    """What the parties work on: what a client does, what each holds, how the model begins and is judged.

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
    judge: str = "accuracy"  # the metric that names the best round
    ending: EarlyStopping = (
        EarlyStopping()
    )  # whether the run may end before its last round, and what is then said of its best model
    metrics: tuple[str, ...] = ()  # all that `evaluate` gives, if that is known beforehand
    directions: Mapping[str, str] = field(default_factory=dict)  # metric -> "higher" or "lower", of less known ones
    classes: int | None = None  # how many the model tells apart, if it does
    noise: tuple[float, ...] = ()  # its deviation on each client's inputs, where the partition asks for that
    secure: Secure = NoSecureAggregation()  # what clients do so that the server sees sums alone
    compress: Compression = NoCompression()  # how updates are made shorter before they leave
    agreed: Mapping[str, str] = field(default_factory=dict)  # what clients must have in common, by digest
    basis: Callable[[], Mapping[str, str]] = dict  # more of that, which no handler sees: a set that is dealt, features
    evaluate_groups: EvaluateGroups | None = None  # if a group's model is not to be judged by all test data
    opinions: Predictions | None = None  # what the models of groups say of samples, as probabilities
    check: Callable[[Arrays, Mapping[ClientId, Any]], None] | None = None  # ConfigError if clients cannot begin with it
    knows: Any = None  # what the recipe's own flow has to know besides
    left_out: Mapping[ClientId, str] = field(default_factory=dict)  # who withdrew from what comes before the rounds
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the run's record keeps of it, and must stay the same
    exhibits: Exhibits = Exhibits()  # what a run leaves for people besides its record

    @property
    def higher_is_better(self) -> bool:
        """Which way `judge` is better; ConfigError if neither the task nor anybody else says."""
        way = direction_of(self.judge, self.directions)
        if way is None:
            right = f"give the Task directions={{{self.judge!r}: 'higher'}}, or 'lower'"
            raise ConfigError(f"judge: which way {self.judge!r} is better is not declared; {right}")
        return way == "higher"

    @property
    def provides(self) -> frozenset[str]:
        """What the clients send besides arrays, such as `metrics:loss`."""
        return as_handler(self.handler).provides

    @property
    def worker(self) -> AnyHandler:
        """The handler as a client runs it: what leaves goes into a sum, or is compressed."""
        return self.compress.at_client(self.secure.at_client(self.handler))

    @property
    def told(self) -> set[str] | None:
        """The metrics that clients may tell with an update; None if the handler does not say, and any will do."""
        return names_of(self.provides, "metrics") or None


def client_evaluation_interval(config: Any, task: "Task") -> int:
    """After how many rounds all clients judge the model on their own test data (0: never).

    If nobody says, it is done once, at the end, of simulated clients that have such data and may tell of it. Refused is
    to judge clients on what they were trained on, before the first round.
    """
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    asked, rounds = int(config.clients_every), int(config.rounds)
    if asked > 0 and "evaluate" not in task.provides and not can_evaluate(task.population):
        raise ConfigError("clients_every: the clients of this task hold no test data of their own to judge by; use 0")
    if asked:
        return max(0, asked)
    others = config.centralised or getattr(config, "sites", False) or len(task.population) > MAX_EVALUATING_CLIENTS
    told = f"{task.judge}_worst_decile" in task.metrics  # the task sees to it by itself
    can = f"metrics:{task.judge}" in task.provides and not told and can_evaluate(task.population, surely=True)
    return rounds if can and not others and not is_private(config) else 0


def client_metrics(task: Task, all_of_it: bool = True) -> tuple[str, bool, dict[str, bool]]:
    """What clients are asked of the model: the metric that judges it, and all others that the task has."""
    names = [*task.metrics, *(["accuracy"] if "metrics:accuracy" in task.provides else [])] if all_of_it else []
    ways = {metric: direction_of(metric, task.directions) for metric in names}
    return task.judge, task.higher_is_better, {metric: way == "higher" for metric, way in ways.items() if way}


def evaluate_clients(fleet: Fleet, config: Any, task: Task, run: Run) -> dict[str, float]:
    """How the model does at all clients, the worst one, too; that nobody says so ends only a run that asks for it."""
    asked = client_metrics(task, all_of_it=bool(config.clients_every))
    try:
        return across_clients(fleet, run, None, *asked)
    except ConfigError as error:
        if config.clients_every:
            raise
        log.info("how single clients fare is not known: %s", error)
        return {}


def federate(fleet: Fleet, config: Any, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow: rounds of select, train, aggregate, evaluate; of all groups at once if there are any.

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
        yield from group_rounds(fleet, config, task, run)
        return
    everyone, roll = fleet, ClientRoles.of(config, task.population)
    fleet, task = roll.trained(fleet, task)
    fleet = simulate(compress_of(config).at_server(fleet), config, run)  # decoded before a clock holds replies back
    churns = config.available.name != "always"  # then nobody is waited for: time does not pass in a simulation
    select = build_select(config, task.classes)
    aggregate = build_aggregate(config, task)
    check_clients_per_round(config, task.population)
    check_min_clients(config, aggregate, task.population)
    privacy = build_privacy(config)
    secure = secure_of(config)
    secure.check(config, select, aggregate, len(task.population))
    select, aggregate = privacy.at_server(select, aggregate, len(task.population), config)
    filters = build_screen(config)
    every = client_evaluation_interval(config, task)
    check_needs(task.provides, *Cohort(select, aggregate, filters=filters).parts)
    fleet = secure.at_server(fleet, task.provides)
    fleet, select = make_asynchronous(
        fleet, config, run, select, aggregate, len(task.population), classes=task.classes, rounds=config.rounds
    )
    few = config.min_replies or (1 if is_asynchronous(aggregate) else None)  # None: half of the selected
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
        patience=Patience(min_replies=few, wait=0.0 if churns else config.wait),
        expect=1 if churns else len(task.population),
        size_cap=config.size_cap,
        metrics=task.told,
    )
    for done in within_budget(rounds, run, config.rounds, privacy, lambda: [(run.memory, aggregate)]):
        if roll.personal:
            if run.round % config.evaluate_every == 0 or run.round == config.rounds:
                done.row.update(roll.judge(everyone, run, client_metrics(task)))
        elif every and run.round % every == 0:
            done.row.update(evaluate_clients(everyone, config, task, run))
        yield done


def no_extra_disclosure(config: Any, task: Task) -> Disclosure:
    """Of recipes with the ordinary flow."""
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
    heeds: frozenset[str] = (
        frozenset()
    )  # the settings of `FLOW_SETTINGS` that a flow of its own keeps to; `federate` does to all
    name: str = ""  # what a recipe is called that is no attribute of a module
    asks: Callable[[Any, Task], Disclosure] = (
        no_extra_disclosure  # what a flow of its own asks, besides the ordinary one's
    )

    def disclosure(self, config: Any, task: Task) -> Disclosure:
        """All that a task's clients may be asked, and all that leaves them besides the model, with these settings."""
        select = build_select(config, task.classes)
        aggregate = build_aggregate(config, task)
        own = self.asks(config, task) | group_disclosure(config, task)
        parts = Cohort(select, aggregate, filters=build_screen(config)).parts
        judged = (
            client_evaluation_interval(config, task) > 0 or config.personal.name != "none" or "evaluate" in own.requests
        )
        return ordinary_disclosure(task, parts, judged) | own

    def prepare(self, config: Any) -> Task:
        """The task as the parties work on it: without those who are excluded, clients seeing to their privacy."""
        for key, why in FLOW_SETTINGS.items():
            if (asked := getattr(config, key).name) != "none" and self.flow is not federate and key not in self.heeds:
                raise ConfigError(f"{key}={asked}: the flow of this recipe {why}; use none")
        personal_of(config)  # refuses what it does not go with before anything is read
        check_groups(config)
        task = replace(self.task(config), secure=secure_of(config), compress=compress_of(config))
        if config.partition.name == "noise" and not task.noise:
            raise ConfigError("partition=noise: this recipe does not change its clients' inputs; use another partition")
        if config.schedule.name != "constant" and as_handler(task.handler).schedule in (None, Constant()):
            raise ConfigError(f"schedule={config.schedule.name}: this task's clients keep to one rate; use constant")
        if names := [c for c in parse_names(config.exclude) if c not in task.left_out or c in task.population]:
            task = replace(task, population=PopulationWithout(task.population, names))
        task = make_grouped(make_personal(task, config), config)
        handler = as_handler(task.handler)
        task = replace(task, agreed={**handler.agreed(), **task.agreed}, check=task.check or handler.check)
        own = task.handler if handler.private else build_privacy(config).at_client(task.handler)
        return replace(task, handler=drift_with(config, add_signatures(config, own, task.handler), task))


def drift_with(config: Any, handler: AnyHandler, task: Task) -> AnyHandler:
    """The handler, with the data of clients changing as the configuration says."""
    if config.drift.name == "none":
        return handler
    drift, around = build("drift", config.drift), DriftContext(task.population, config.seed, task.classes)
    check_drift(drift, around)
    return DriftHandler(handler, drift, around)


def recipe_name(recipe: Recipe) -> str:
    """The name or dotted path by which `find` gives this very recipe; its own, or none, if it is in no module."""
    if recipe.name:
        return recipe.name
    modules = {k: m for k, m in sys.modules.items() if isinstance(m, ModuleType) and k != "__main__"}
    home = recipe.task.__module__  # before those that only import it from there
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
        right = "call mutirao.run there again, with the same model and data, and resume=True to go on with it"
        raise ConfigError(f"a run of {name!r} was started from Python with mutirao.run; {right}")
    if ":" not in name and name not in NAMES:
        raise ConfigError(f"no recipe is called {name!r}{nearest(name, NAMES)}")
    check_module("recipe", name)
    recipe = load_name(NAMES[name][0] if name in NAMES else name)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{name!r} is not a Recipe")
    return recipe
