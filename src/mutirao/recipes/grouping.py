"""Groups for any task: whoever trains together is found by a warm-up, and each group has a model of its own.

A task with groups is the task with a handler that signs (`mutirao.groups.signing`), and its flow is that of groups
(`mutirao.groups.flow`). A group's model is judged by its clients on test data of their own, by the task's metrics; where
they have none, or may not tell, the task's own evaluation judges the model of each group, and a group counts for as
much as it has clients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mutirao.attacks import verdicts
from mutirao.compression import compress_of
from mutirao.config import Part, build, complete
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.agreement import tell_agreed
from mutirao.core.parts import AnyAggregator, AnyHandler, AnySelector, as_aggregator, as_handler, check_needs
from mutirao.core.rounds import Cohort, Evaluate, Patience, Round, Run
from mutirao.errors import ConfigError
from mutirao.groups.flow import EvaluateGroups, Judged, Plan, federate_groups
from mutirao.groups.form import NoiseRule
from mutirao.groups.record import FILES, plane_of, scan_of, summarise_groups
from mutirao.groups.signature import noise_of
from mutirao.groups.signing import SIGNS, WARM, Signing, head_of
from mutirao.groups.state import Grouping
from mutirao.privacy import Outlook, Settings, build_privacy, within_budget
from mutirao.recipes.building import build_aggregate, build_screen, simulate
from mutirao.recipes.exchange import Exchange
from mutirao.recipes.exhibits import Picture
from mutirao.recipes.personal import OF_ONE_MODEL, own_figures
from mutirao.recipes.staggering import check_waits
from mutirao.secure.kinds import secure_of

T = TypeVar("T")  # a Task, which is made of this
Opinions = Callable[[Run, Any], Mapping[str, npt.NDArray[np.float64]]]
OF_GROUPS = ("signature", "warm_epochs", "regroup")  # settings that say nothing where there are no groups


def has_groups(config: Any) -> bool:
    """Whether a configuration asks for groups."""
    return bool(config.cluster.name != "none")


def has_one_model(config: Any) -> bool:
    """Whether all clients have the run's one model: no personal ones, and no groups."""
    return bool(config.personal.name == "none" and not has_groups(config))


def check_groups(config: Any) -> None:
    """Refuse what cannot be right with groups, and settings of groups where there are none, before anything is read."""
    if not has_groups(config):
        for name in OF_GROUPS:
            usual = type(config).__dataclass_fields__[name].default
            if getattr(config, name) not in (usual, complete(name, usual) if isinstance(usual, Part) else usual):
                raise ConfigError(f"{name}: it is of groups, and there are none; set cluster=auto")
        return
    if config.centralised:
        raise ConfigError("centralised: groups have no pooled reference; cluster=one trains a single model")
    if config.secure.name != "none" and config.regroup:
        raise ConfigError(f"secure={config.secure.name}: regroup asks for signatures again and again; use 0")
    if config.personal.settings.get("new"):
        raise ConfigError("personal.new: in groups whoever is new is admitted to one; use 0")
    check_privacy(config)


def check_privacy(config: Any) -> None:
    """Refuse privacy that covers the models alone, while the warm-up tells of clients what it likes."""
    if config.privacy.name == "none":
        return
    signature, privacy = build("signature", config.signature), build_privacy(config)
    if config.privacy.settings.get("epsilon"):
        raise ConfigError(
            "privacy.epsilon: how large groups will be is not known beforehand, nor then the noise that they need; "
            "set privacy.noise and privacy.budget"
        )
    if signature.repeatable and not privacy.repeatable:
        raise ConfigError("signature.repeatable: the account counts on noise that nobody knows; use false")
    if not signature.epsilon:
        raise ConfigError(
            f"privacy={config.privacy.name}: the warm-up's signatures have no noise; set signature.epsilon"
        )


def check_regroup(config: Any, aggregate: AnyAggregator) -> None:
    """Refuse to form groups anew where clients keep what belongs to the model of the group they are in."""
    if config.regroup and any(need.startswith("config:correct=") for need in as_aggregator(aggregate).needs):
        raise ConfigError(
            f"aggregate={config.aggregate.name}: what clients keep for it is of the groups before; use regroup=0"
        )


def sign_with(config: Any, own: AnyHandler, plain: AnyHandler) -> AnyHandler:
    """The handler `own` of a task with groups, which signs; `plain` is the same without privacy."""
    provides = as_handler(plain).provides
    if not has_groups(config) or SIGNS in provides:
        return own
    can = {name for name in ("lr", "epochs") if f"config:{name}" in provides}
    usual = type(config).__dataclass_fields__["warm_epochs"].default
    if "epochs" not in can and config.warm_epochs != usual:
        raise ConfigError("warm_epochs: the clients of this task warm up as they train in a round; leave it out")
    told = {"lr": config.lr, "epochs": config.warm_epochs}
    signature, privacy = build("signature", config.signature), build_privacy(config)
    return Signing(own, plain, signature, {name: told[name] for name in sorted(can)}, privacy)


def clients_judge(config: Any, task: Any) -> bool:
    """Whether clients judge the model of their group on test data of their own."""
    from mutirao.training.samples import can_judge  # late: it brings torch

    has = "evaluate" in task.provides or can_judge(task.population, surely=not getattr(config, "sites", False))
    return bool(has and config.privacy.name in ("none", "central"))  # else nothing but noised updates leaves a client


def make_grouped(given: T, config: Any) -> T:
    """The task with groups, if the configuration asks for any: how its models are judged, and what a run leaves."""
    task = cast(Any, given)
    if not has_groups(config) or SIGNS in task.provides:
        return given
    show = task.exhibits
    pictures = {"groups.png": Picture("groups", plane_of), "eps_scan.png": Picture("eps_scan", scan_of)}
    findings = show.findings or (lambda run: {})
    show = replace(
        show,
        pictures={k: v for k, v in show.pictures.items() if k not in OF_ONE_MODEL} | pictures,
        files={k: v for k, v in show.files.items() if k not in OF_ONE_MODEL} | FILES,
        findings=lambda run: {**findings(run), **summarise_groups(run)},
        constant=show.constant | {"groups", "rand"},
    )
    task = replace(task, exhibits=show, opinions=task.opinions or opinions_by(task))
    if not clients_judge(config, task):
        if task.evaluate is None and config.privacy.name in ("none", "central"):
            raise ConfigError(f"cluster={config.cluster.name}: nobody could judge the models of groups: clients hold no "
                              "test data of their own, and the server has none")
        return cast(T, task)
    judge, metrics = own_figures(task, task.handler, summed=config.secure.name != "none")
    return cast(T, replace(task, evaluate=None, judge=judge, metrics=metrics))


def opinions_by(task: Any) -> Opinions | None:
    """What the models of groups say of samples, if the task's clients are a Trainer of classes."""
    from mutirao.groups.member import outputs_of  # late: it brings torch
    from mutirao.training.trainer import Trainer

    trainer = task.handler
    if not task.classes or not isinstance(trainer, Trainer):
        return None

    def say(run: Run, samples: Any) -> dict[str, npt.NDArray[np.float64]]:
        state, out = Grouping.from_memory(run.memory), {}
        for group in state.groups.names if state else ():
            model = trainer.fill(part_of(run.arrays, group)).eval()  # one module for all: asked before the next fills it
            out[group] = outputs_of(model, samples)[0].double().softmax(1).numpy()
        return out

    return say


@dataclass(frozen=True)
class Kind:
    """What a recipe of its own knows of its groups besides; as it is, what any task has."""

    model: Callable[..., Arrays] | None = None  # a fresh one with so many outputs; None: the task's first
    head: str | None = None  # the name of its last layer; None: by its arrays
    classes: int = 1
    reduced: bool = False
    noise: NoiseRule = "nearest"
    founders: int = 0  # clients to wait for (0: all)
    stable: int = 0
    tolerance: float = 0.002
    told: tuple[str, ...] = ()  # metrics that clients judge by; none: the task's
    truth: Callable[[int], Mapping[ClientId, int] | None] = lambda round: None
    liars: frozenset[ClientId] = frozenset()


def group_rounds(fleet: Fleet, config: Any, task: Any, run: Run, kind: Kind = Kind()) -> Iterator[Round]:
    """Form groups, then make rounds of all of them at once."""
    churns, secure = config.available.name != "always", secure_of(config)
    told = kind.told or tuple(dict.fromkeys([task.judge, *task.metrics]))
    fleet = simulate(fleet, config, run)
    fleet = compress_of(config).at_server(secure.at_server(fleet, task.provides | {f"metrics:{m}" for m in kind.told}))
    privacy, signature = build_privacy(config), build("signature", config.signature)
    first = task.initial()
    head = head_of(first) if kind.head is None else kind.head
    screen = build_screen(config, head=head)

    def parts(clients: int) -> tuple[AnySelector, AnyAggregator]:
        select = build("select", config.select, count=config.per_round, classes=task.classes)
        aggregate = build_aggregate(config, task, clients)
        check_waits(config, aggregate, "groups do")
        check_regroup(config, aggregate)
        secure.check(config, select, aggregate, len(task.population))
        return privacy.at_server(select, aggregate, clients, config)

    def inherit(before: Sequence[Arrays]) -> Arrays:
        return privacy.inherit(before, noise_of(signature)) if isinstance(privacy, Settings) else {}

    check_needs(task.provides, *Cohort(*parts(len(task.population)), filters=screen).parts)
    plan = Plan(
        model=kind.model or (lambda outputs: task.initial()),
        classes=kind.classes,
        parts=parts,
        cluster=build("cluster", config.cluster),
        noise=kind.noise,
        directions=signature.directions,
        size=len(signature(first, first, head)),
        reduced=kind.reduced,
        filters=screen,
        head=head,
        regroup=config.regroup,
        stable=kind.stable,
        tolerance=kind.tolerance,
        patience=Patience(min_replies=config.min_replies or None, wait=0.0 if churns else config.wait),
        truth=kind.truth,
        honest=lambda client: client not in kind.liars,
        judged=clients_judge(config, task),
        judge=task.judge,
        higher=task.higher_is_better,
        told=told,
        evaluate=task.evaluate_groups or by_itself(task.evaluate),
        clients_every=max(0, config.clients_every or config.rounds),
        inherit=inherit,
        size_cap=config.size_cap,
        metrics=task.told,
        tell=tell_agreed(task.agreed),
    )
    expect = kind.founders or (1 if churns else len(task.population))
    rounds = federate_groups(run, fleet, plan, config.rounds, config.evaluate_every, expect)
    for done in within_budget(rounds, run, config.rounds, privacy, lambda: look_ahead(run, plan)):
        if config.screen.name != "none" and kind.liars:
            done.row.update(verdicts(done.clients, kind.liars, run.history[:-1]))
        yield done


def by_itself(evaluate: Evaluate | None) -> EvaluateGroups | None:
    """The task's evaluation of each group's model; together, a group counts for as much as it has clients."""
    if evaluate is None:
        return None

    def judge(models: Mapping[str, Arrays], members: Mapping[str, Sequence[ClientId]]) -> Judged:
        found = {group: dict(evaluate(arrays)) for group, arrays in models.items()}
        sizes = {group: len(members[group]) for group in models}
        total = max(1, sum(sizes.values()))
        names = dict.fromkeys(name for figures in found.values() for name in figures)
        means = {n: sum(sizes[g] * f[n] for g, f in found.items() if n in f) / total for n in names}
        return means, found

    return judge


def look_ahead(run: Run, plan: Plan) -> Outlook:
    """What the next round adds to: the account of each group, or of those that the round is about to form."""
    state = Grouping.from_memory(run.memory)
    members = state.groups.members() if state else {}
    memories = {g: part_of(run.memory, g) for g in members}
    if state is None or (plan.regroup and run.round and run.round % plan.regroup == 0):
        return [(plan.inherit(list(memories.values())), plan.parts(1)[1])]  # at worst, a group of one
    return [(memories[g], plan.parts(len(who))[1]) for g, who in members.items()]


def asks_of_groups(config: Any, task: Any) -> Exchange:
    """What leaves clients for the sake of groups: the signature of a warm-up, and how their model does."""
    if not has_groups(config):
        return Exchange()
    warm = Exchange((WARM,), extras=("signature",))
    return warm | Exchange(("evaluate",), metrics=(task.judge,)) if clients_judge(config, task) else warm
