"""The flow of a task with groups: builds the plan of `mutirao.experiments.group_rounds` from a configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mutirao.clustering.context import EvaluateGroups, GroupMetrics, Plan
from mutirao.clustering.formation import NoiseRule
from mutirao.clustering.group_hyperparameters import SharedHyperparameters
from mutirao.clustering.group_state import Grouping, Groups
from mutirao.clustering.signature_handler import find_last_layer
from mutirao.clustering.signatures import noise_of
from mutirao.compression import compress_of
from mutirao.config import Part, build
from mutirao.core.agreement import agreement_config
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.parts import AnyAggregator, AnySelector, as_aggregator, check_needs
from mutirao.core.records import Row
from mutirao.core.rounds import Evaluate, Group, Patience, Round, Run
from mutirao.errors import ConfigError
from mutirao.experiments.group_evaluation import References, compare_with_references
from mutirao.experiments.group_rounds import train_groups
from mutirao.experiments.grouping import (
    evaluated_by_clients,
    grouper_of,
    has_references,
    reference_rounds,
    signature_of,
)
from mutirao.experiments.simulated_parts import (
    build_aggregate,
    build_screen,
    check_clients_per_round,
    check_synchronous,
    overcommit_of,
    simulate,
)
from mutirao.privacy import NextRound, Settings, build_privacy, within_budget
from mutirao.privacy.secure_aggregation.kinds import secure_of
from mutirao.randomness import rng
from mutirao.robustness.attacks import detection_rates


@dataclass(frozen=True)
class GroupOptions:
    """What a recipe sets about its groups beyond the configuration; the defaults fit any task."""

    model: Callable[..., Arrays] | None = None  # a fresh model with that many outputs; None: the task's initial model
    head: str | None = None  # the name of its last layer; None: found by its arrays
    classes: int = 0  # 0: the task's
    reduced_heads: bool = False
    noise: NoiseRule = "nearest"
    initial_clients: int = 0  # clients to wait for (0: all)
    stable: int = 0
    metrics: tuple[str, ...] = ()  # metrics that clients report; none: the task's
    true_groups: Callable[[int], Mapping[ClientId, int] | None] = lambda round: None
    malicious: frozenset[ClientId] = frozenset()
    compare: Callable[[Run, Fleet, Plan], Row] | None = None  # comparisons after the last round


DEFAULT_OPTIONS = GroupOptions()


def federate_groups(
    fleet: Fleet, config: Any, task: Any, run: Run, options: GroupOptions = DEFAULT_OPTIONS
) -> Iterator[Round]:
    """Form groups, then make rounds of all of them at once."""
    if overcommit_of(config) > 1:
        raise ConfigError("devices.overcommit: the first replies could all be of one group; use 1 with groups")
    check_clients_per_round(config, task.population)
    secure = secure_of(config)
    compress = compress_of(config)
    # References are trained without delays or absences, so that they show what the methods can do at best.
    undelayed = replace(config, devices=Part("none"), available=Part("always"))
    reference_fleet = compress.at_server(simulate(fleet, undelayed, run))
    fleet = simulate(fleet, config, run)
    fleet = compress.at_server(secure.at_server(fleet, {*task.capabilities.metrics, *options.metrics}))
    plan = plan_groups(config, task, options)
    expect = options.initial_clients or len(task.population)
    # With simulated availability no client is waited for: real time does not pass in a simulation.
    if config.available.name != "always":
        expect = options.initial_clients or 1
    compare = options.compare
    if options is DEFAULT_OPTIONS:
        compare = comparison_of(config, plan)
    rounds = train_groups(run, fleet, plan, config.rounds, config.evaluate_every, expect)
    for done in within_budget(rounds, run, config.rounds, build_privacy(config), lambda: look_ahead(run, plan)):
        # Only the recipe with simulated attacks can say which clients are malicious.
        if config.screen.name != "none" and options is not DEFAULT_OPTIONS:
            done.row.update(detection_rates(done.clients, options.malicious, run.history[:-1]))
        if compare is not None and is_over(run, config.rounds):
            done.row.update(compare(run, reference_fleet, plan))
        yield done


def plan_groups(config: Any, task: Any, options: GroupOptions) -> Plan:
    """The plan of forming and training groups; ConfigError for settings that cannot be combined."""
    secure = secure_of(config)
    privacy = build_privacy(config)
    signature = signature_of(config)
    first = task.initial()
    head = find_last_layer(first) if options.head is None else options.head
    filters = build_screen(config, head=head)
    churns = config.available.name != "always"

    def parts(clients: int) -> tuple[AnySelector, AnyAggregator]:
        select = build("select", config.select, count=config.per_round, classes=task.classes, rounds=config.rounds)
        aggregate = build_aggregate(config, task, clients)
        check_synchronous(config, aggregate, "groups do")
        check_regroup(config, aggregate)
        secure.check(config, select, aggregate, len(task.population))
        return privacy.at_server(select, aggregate, clients, config)

    def inherit(before: Sequence[Arrays]) -> Arrays:
        if isinstance(privacy, Settings):
            return privacy.inherit(before, noise_of(signature))
        return {}

    check_needs(task.capabilities, *Group(*parts(len(task.population)), filters=filters).parts)
    return Plan(
        model=options.model or (lambda outputs, which=0: initial_model(first, config.seed, which)),
        classes=options.classes or task.classes or 1,
        parts=parts,
        cluster=build("cluster", config.cluster),
        noise=options.noise,
        directions=signature.directions,
        signature_size=len(signature(first, first, head)) if signature.trains else 0,
        reduced_heads=options.reduced_heads,
        filters=filters,
        head=head,
        regroup=config.regroup,
        stable=options.stable,
        patience=Patience(min_replies=config.min_replies or None, wait=0.0 if churns else config.wait),
        true_groups=options.true_groups,
        honest=lambda client: client not in options.malicious,
        clients_evaluate=evaluated_by_clients(config, task),
        monitor=task.judge,
        higher_is_better=task.higher_is_better,
        reported_metrics=options.metrics or tuple(dict.fromkeys([task.judge, *task.metrics])),
        evaluate_on_server=task.evaluate_groups or evaluate_each_group(task.evaluate),
        clients_every=max(0, config.clients_every or config.rounds),
        inherit=inherit,
        size_cap=config.size_cap,
        allowed_metrics=task.update_metrics,
        round_config=agreement_config(task.agreed),
        hyperparameters=group_hyperparameters_of(config, task, parts),
    )


def comparison_of(config: Any, plan: Plan) -> Callable[[Run, Fleet, Plan], Row] | None:
    """The comparison of groups with clients alone and with fine-tuned FedAvg for any task, if there is one."""
    if not plan.clients_evaluate or not has_references(config):
        return None
    spent = References(reference_rounds(config), config.epochs, 0, config.per_round, repeats_rounds=True)
    return partial(compare_with_references, settings=spent)


def initial_model(first: Arrays, seed: int, which: int) -> Arrays:
    """The task's initial model, or another one: the same numbers of each array, in a random order."""
    if not which:
        return {name: array.copy() for name, array in first.items()}
    shuffled = {}
    for name, array in first.items():
        draw = rng(seed, 0, f"start {which}", name)
        shuffled[name] = draw.permutation(array.ravel()).reshape(array.shape)
    return shuffled


def group_hyperparameters_of(
    config: Any, task: Any, parts: Callable[[int], tuple[AnySelector, AnyAggregator]]
) -> SharedHyperparameters:
    """The hyperparameters of each group; ConfigError if they cannot be combined with other settings."""
    tune: SharedHyperparameters = build("per_group", config.per_group)
    called = f"per_group={config.per_group.name}"
    lacking = sorted(name for name in tune.names if name not in task.capabilities.config)
    if lacking:
        raise ConfigError(f"{called}: the clients of this task do not support {lacking[0]} in requests; use none")
    if "lr" in tune.names and config.schedule.name != "constant":
        raise ConfigError(f"{called}: a group's own learning rate is constant; use schedule=constant")
    if not tune.trials:
        return tune
    kept = "correct" in as_aggregator(parts(1)[1]).needs.config
    others = [("regroup", config.regroup), ("aggregate", kept), ("secure", config.secure.name != "none")]
    others += [("cluster", grouper_of(config).moves_clients), ("evaluate_every", config.evaluate_every > 1)]
    wrong = [name for name, is_wrong in others if is_wrong]
    if wrong:
        raise ConfigError(
            f"{called}: every candidate starts from the first model and is evaluated, which {wrong[0]} does not allow"
        )
    if getattr(config, "judge_by", "test") != "vali":
        right = "judge_by=vali, then run the choice with per_group=given"
        raise ConfigError(f"{called}: candidates would be chosen on test data; set {right}")
    if tune.trials >= config.rounds:
        raise ConfigError(f"{called}: the trials take {tune.trials} of {config.rounds} rounds; take more rounds")
    return tune


def evaluate_each_group(evaluate: Evaluate | None) -> EvaluateGroups | None:
    """The task's evaluation of each group's model; the mean weights groups by their number of clients."""
    if evaluate is None:
        return None

    def evaluate_models(models: Mapping[str, Arrays], groups: Groups) -> GroupMetrics:
        metrics = {group: dict(evaluate(arrays)) for group, arrays in models.items()}
        sizes = {group: len(members) for group, members in groups.members().items()}
        total = max(1, sum(sizes.values()))
        sums: dict[str, float] = {}
        for group, values in metrics.items():
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + sizes[group] * value
        return {name: value / total for name, value in sums.items()}, metrics

    return evaluate_models


def is_over(run: Run, rounds: int) -> bool:
    """Whether this is the last round."""
    state = Grouping.from_memory(run.memory)
    return run.round >= rounds or (state is not None and len(state.settled) == state.groups.count)


def look_ahead(run: Run, plan: Plan) -> NextRound:
    """Memory and aggregator of each group in the next round, to compute the privacy budget that it would spend."""
    state = Grouping.from_memory(run.memory)
    members = state.groups.members() if state else {}
    memories = {g: part_of(run.memory, g) for g in members}
    # Groups that are formed anew have no size yet; the worst case is a group of one.
    if state is None or (plan.regroup and run.round and run.round % plan.regroup == 0):
        return [(plan.inherit(list(memories.values())), plan.parts(1)[1])]
    return [(memories[g], plan.parts(len(who))[1]) for g, who in members.items()]


def check_regroup(config: Any, aggregate: AnyAggregator) -> None:
    """Refuse to form groups anew where clients keep a state that belongs to the model of their group."""
    if config.regroup and "correct" in as_aggregator(aggregate).needs.config:
        raise ConfigError(
            f"aggregate={config.aggregate.name}: clients keep a state that belongs to their old group; use regroup=0"
        )
