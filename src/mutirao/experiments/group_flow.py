"""The flow of a task with groups: a configuration makes the plan of `mutirao.experiments.group_rounds`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mutirao.clustering.formation import NoiseRule
from mutirao.clustering.group_hyperparameters import SharedHyperparameters
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.membership import Groups
from mutirao.clustering.plan import EvaluateGroups, GroupMetrics, Plan
from mutirao.clustering.signature_handler import find_last_layer
from mutirao.clustering.signatures import noise_of
from mutirao.compression import compress_of
from mutirao.config import Part, build
from mutirao.core.agreement import agreement_config
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.parts import AnyAggregator, AnySelector, as_aggregator, check_needs
from mutirao.core.records import Row
from mutirao.core.rounds import Cohort, Evaluate, Patience, Round, Run
from mutirao.errors import ConfigError
from mutirao.experiments.async_flow import check_synchronous
from mutirao.experiments.group_references import References, compare_with_references
from mutirao.experiments.group_rounds import federate_groups
from mutirao.experiments.grouping import (
    evaluated_by_clients,
    grouper_of,
    has_references,
    reference_rounds,
    signature_of,
)
from mutirao.experiments.population_checks import check_clients_per_round
from mutirao.experiments.simulated_parts import build_aggregate, build_screen, overcommit_of, simulate
from mutirao.privacy import NextRound, Settings, build_privacy, within_budget
from mutirao.privacy.secure_aggregation.kinds import secure_of
from mutirao.randomness import rng
from mutirao.robustness.attacks import detection_rates


@dataclass(frozen=True)
class GroupOptions:
    """What a recipe of its own knows of its groups besides; as it is, what any task has."""

    model: Callable[..., Arrays] | None = None  # a fresh one with so many outputs; None: the task's first
    head: str | None = None  # the name of its last layer; None: by its arrays
    classes: int = 0  # 0: as many as the task has
    reduced_heads: bool = False
    noise: NoiseRule = "nearest"
    initial_clients: int = 0  # clients to wait for (0: all)
    stable: int = 0
    metrics: tuple[str, ...] = ()  # metrics that clients judge by; none: the task's
    true_groups: Callable[[int], Mapping[ClientId, int] | None] = lambda round: None
    malicious: frozenset[ClientId] = frozenset()
    compare: Callable[[Run, Fleet, Plan], Row] | None = None  # what is found out besides when the last round is made


DEFAULT_OPTIONS = GroupOptions()


def group_rounds(
    fleet: Fleet, config: Any, task: Any, run: Run, kind: GroupOptions = DEFAULT_OPTIONS
) -> Iterator[Round]:
    """Form groups, then make rounds of all of them at once."""
    if overcommit_of(config) > 1:
        raise ConfigError("devices.overcommit: groups are asked all at once, and the first would be of any; use 1")
    check_clients_per_round(config, task.population)
    churns, secure = config.available.name != "always", secure_of(config)
    told = kind.metrics or tuple(dict.fromkeys([task.judge, *task.metrics]))
    compress, still = compress_of(config), replace(config, devices=Part("none"), available=Part("always"))
    calm, fleet = compress.at_server(simulate(fleet, still, run)), simulate(fleet, config, run)
    fleet = compress.at_server(secure.at_server(fleet, task.provides | {f"metrics:{m}" for m in kind.metrics}))
    privacy, signature, first = build_privacy(config), signature_of(config), task.initial()
    head = find_last_layer(first) if kind.head is None else kind.head
    screen = build_screen(config, head=head)

    def parts(clients: int) -> tuple[AnySelector, AnyAggregator]:
        select = build("select", config.select, count=config.per_round, classes=task.classes, rounds=config.rounds)
        aggregate = build_aggregate(config, task, clients)
        check_synchronous(config, aggregate, "groups do")
        check_regroup(config, aggregate)
        secure.check(config, select, aggregate, len(task.population))
        return privacy.at_server(select, aggregate, clients, config)

    def inherit(before: Sequence[Arrays]) -> Arrays:
        return privacy.inherit(before, noise_of(signature)) if isinstance(privacy, Settings) else {}

    check_needs(task.provides, *Cohort(*parts(len(task.population)), filters=screen).parts)
    plan = Plan(
        model=kind.model or (lambda outputs, which=0: another(first, config.seed, which)),
        classes=kind.classes or task.classes or 1,
        parts=parts,
        cluster=build("cluster", config.cluster),
        noise=kind.noise,
        directions=signature.directions,
        signature_size=len(signature(first, first, head)) if signature.trains else 0,
        reduced_heads=kind.reduced_heads,
        filters=screen,
        head=head,
        regroup=config.regroup,
        stable=kind.stable,
        patience=Patience(min_replies=config.min_replies or None, wait=0.0 if churns else config.wait),
        true_groups=kind.true_groups,
        honest=lambda client: client not in kind.malicious,
        clients_evaluate=evaluated_by_clients(config, task),
        monitor=task.judge,
        higher_is_better=task.higher_is_better,
        reported_metrics=told,
        evaluate_on_server=task.evaluate_groups or evaluate_each_group(task.evaluate),
        clients_every=max(0, config.clients_every or config.rounds),
        inherit=inherit,
        size_cap=config.size_cap,
        allowed_metrics=task.told,
        round_config=agreement_config(task.agreed),
        hyperparameters=tuning_of(config, task, parts),
    )
    expect = kind.initial_clients or (1 if churns else len(task.population))
    judge = comparison_of(config, plan) if kind is DEFAULT_OPTIONS else kind.compare
    rounds = federate_groups(run, fleet, plan, config.rounds, config.evaluate_every, expect)
    for done in within_budget(rounds, run, config.rounds, privacy, lambda: look_ahead(run, plan)):
        if config.screen.name != "none" and kind is not DEFAULT_OPTIONS:  # a simulation that knows who lies
            done.row.update(detection_rates(done.clients, kind.malicious, run.history[:-1]))
        if judge is not None and is_over(run, config.rounds):
            done.row.update(judge(run, calm, plan))
        yield done


def comparison_of(config: Any, plan: Plan) -> Callable[[Run, Fleet, Plan], Row] | None:
    """How the groups of any task are compared with each client alone and with FedAvg fine-tuned, if they are."""
    if not plan.clients_evaluate or not has_references(config):
        return None
    spent = References(reference_rounds(config), config.epochs, 0, config.per_round, again=True)
    return partial(compare_with_references, settings=spent)


def another(first: Arrays, seed: int, which: int) -> Arrays:
    """The task's first model, or another one: the same numbers of each array, in an order drawn."""
    if not which:
        return {name: array.copy() for name, array in first.items()}
    draws = {name: rng(seed, 0, f"start {which}", name) for name in first}
    return {k: draws[k].permutation(v.ravel()).reshape(v.shape) for k, v in first.items()}


def tuning_of(
    config: Any, task: Any, parts: Callable[[int], tuple[AnySelector, AnyAggregator]]
) -> SharedHyperparameters:
    """What each group trains by, if that goes with the other settings."""
    tune: SharedHyperparameters = build("per_group", config.per_group)
    called = f"per_group={config.per_group.name}"
    if lacking := sorted(name for name in tune.names if f"config:{name}" not in task.provides):
        raise ConfigError(f"{called}: the clients of this task cannot be told {lacking[0]}; use none")
    if "lr" in tune.names and config.schedule.name != "constant":
        raise ConfigError(f"{called}: a rate of its own is one rate; use schedule=constant")
    if not tune.trials:
        return tune
    kept = any(need.startswith("config:correct=") for need in as_aggregator(parts(1)[1]).needs)
    others = [("regroup", config.regroup), ("aggregate", kept), ("secure", config.secure.name != "none")]
    others += [("cluster", grouper_of(config).moves_clients), ("evaluate_every", config.evaluate_every > 1)]
    if wrong := [name for name, is_wrong in others if is_wrong]:
        raise ConfigError(f"{called}: every candidate begins afresh and is judged, which {wrong[0]} does not allow")
    if getattr(config, "judge_by", "test") != "vali":
        right = "judge_by=vali; then give what it chose: per_group=given"
        raise ConfigError(f"{called}: candidates would be chosen by the test data; set {right}")
    if tune.trials >= config.rounds:
        raise ConfigError(f"{called}: the trials take {tune.trials} of {config.rounds} rounds; take more rounds")
    return tune


def evaluate_each_group(evaluate: Evaluate | None) -> EvaluateGroups | None:
    """The task's evaluation of each group's model; together, a group counts for as much as it has clients."""
    if evaluate is None:
        return None

    def judge(models: Mapping[str, Arrays], groups: Groups) -> GroupMetrics:
        found = {group: dict(evaluate(arrays)) for group, arrays in models.items()}
        sizes = {group: len(who) for group, who in groups.members().items()}
        total = max(1, sum(sizes.values()))
        names = dict.fromkeys(name for figures in found.values() for name in figures)
        means = {n: sum(sizes[g] * f[n] for g, f in found.items() if n in f) / total for n in names}
        return means, found

    return judge


def is_over(run: Run, rounds: int) -> bool:
    """Whether no round comes after this one."""
    state = Grouping.from_memory(run.memory)
    return run.round >= rounds or (state is not None and len(state.settled) == state.groups.count)


def look_ahead(run: Run, plan: Plan) -> NextRound:
    """What the next round adds to: the account of each group, or of those that the round is about to form."""
    state = Grouping.from_memory(run.memory)
    members = state.groups.members() if state else {}
    memories = {g: part_of(run.memory, g) for g in members}
    if state is None or (plan.regroup and run.round and run.round % plan.regroup == 0):
        return [(plan.inherit(list(memories.values())), plan.parts(1)[1])]  # at worst, a group of one
    return [(memories[g], plan.parts(len(who))[1]) for g, who in members.items()]


def check_regroup(config: Any, aggregate: AnyAggregator) -> None:
    """Refuse to form groups anew where clients keep what belongs to the model of the group they are in."""
    if config.regroup and any(need.startswith("config:correct=") for need in as_aggregator(aggregate).needs):
        raise ConfigError(
            f"aggregate={config.aggregate.name}: what clients keep for it is of the groups before; use regroup=0"
        )
