"""Rounds of all groups at once: one warm-up, one set of requests to the fleet a round, one model for each group.

Each round admits late joiners (after a warm-up), trains all groups in one `core.rounds.step`, evaluates and records.
The grouper decides which client is in which group (`mutirao.clustering.base`). A group without any client present
keeps its state, and a group that has settled is not trained further.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mutirao.clustering.base import Grouper, GroupUpdates, as_grouper
from mutirao.clustering.context import GroupContext
from mutirao.clustering.context import Plan as Plan
from mutirao.clustering.formation import find_shared_keys
from mutirao.clustering.group_state import WAITING, Grouping
from mutirao.core.arrays import Arrays, as_part, part_of
from mutirao.core.fleet import ClientId, Failure, Fleet, Reply, Request, Scalar, traffic
from mutirao.core.parts import Screened
from mutirao.core.records import Round, reasons
from mutirao.core.roster import Roster
from mutirao.core.rounds import Group, Run, start_run, step, wait_for_clients
from mutirao.core.validation import fault_of_extras, sift
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.experiments.group_evaluation import class_map_of, evaluate_groups, request_of
from mutirao.privacy.central_noise import RELEASES

log = logging.getLogger("mutirao")

MAX_WARM_UPS = 3  # attempts after which a client without a usable warm-up is no longer asked
CLASS_SHARE = 0.1  # share of a group's clients that must have a class for the group's output layer to have it


def train_groups(
    run: Run, fleet: Fleet, plan: Plan, rounds: int, evaluate_every: int = 1, expect: int = 1
) -> Iterator[Round]:
    """Form groups unless the run has them already, then make rounds until all are made or all groups have settled."""
    context = GroupContext(run, fleet, plan)
    grouper = as_grouper(plan.cluster)
    state = Grouping.from_memory(run.memory)
    start_run(run, fleet, 1 if state else expect, plan.patience)
    state = state or create_groups(context, grouper)
    while run.round < rounds:
        wait_for_clients(run.roster, fleet, 1, plan.patience)
        if plan.regroup and run.round and run.round % plan.regroup == 0:
            state = regroup(context, grouper, state)
        admit_late_joiners(context, grouper, state)
        grouper.before(context, state)
        if plan.hyperparameters.restarts(run.round + 1):
            reset_models(context, state)
        active = active_groups(run.roster, state)
        if not active:
            log.warning("round %d: no group that still trains has a client present; the run ends", run.round + 1)
            return
        done, updates = make_round(context, grouper, state, active)
        grouper.after(context, state, updates)
        evaluate_groups(context, state, done.row, run.round % evaluate_every == 0 or run.round == rounds)
        done = context.finish_round(done)
        run.memory = run.memory | state.to_memory()
        fleet.record(done)
        run.history.append(done.row)
        yield done
        if len(state.settled) == state.groups.count:
            return


def make_round(
    context: GroupContext, grouper: Grouper, state: Grouping, active: Mapping[str, list[ClientId]]
) -> tuple[Round, dict[str, GroupUpdates]]:
    """One round of the active groups, and their clients' updates if the grouper needs them."""
    members = state.groups.members()
    updates: dict[str, GroupUpdates] = {}
    groups = [training_group(context, grouper, state, name, members[name], updates) for name in sorted(active)]
    try:
        return step(context.run, context.fleet, groups, patience=context.plan.patience), updates
    except TooFewReplies as error:
        error.rows[:0] = context.rows
        raise


def training_group(
    context: GroupContext,
    grouper: Grouper,
    state: Grouping,
    name: str,
    members: list[ClientId],
    updates: dict[str, GroupUpdates],
) -> Group:
    """A group as `step` trains it; its clients' updates are entered into `updates`."""
    plan = context.plan
    filters = plan.filters
    own = plan.hyperparameters.config_for(name, context.run.round + 1, state.scores, plan.higher_is_better)

    def keep_updates(current: Arrays, replies: dict[ClientId, Reply]) -> Screened:
        updates[name] = GroupUpdates(current, replies)
        return replies, {}

    # The last of the filters, so that the grouper gets only updates that have passed the others.
    if grouper.needs_updates:
        filters = (*filters, keep_updates)
    return Group(
        *plan.parts(len(members)),
        filters=filters,
        config={**plan.round_config, **class_map_of(state, name), **own},
        name=name,
        members=members,
        size_cap=plan.size_cap,
        metrics=plan.allowed_metrics,
    )


def create_groups(context: GroupContext, grouper: Grouper, before: Sequence[Arrays] = ()) -> Grouping:
    """Form groups of the clients that are present, each with a model of its own in the run's arrays.

    `before` is the memory of the previous groups, if groups are formed anew.
    """
    run = context.run
    fleet = context.fleet
    plan = context.plan
    refused = refuse_sybils(context)
    replies = request_signatures(context, grouper, [c for c in fleet.clients() if c not in refused])
    if not replies:
        raise TooFewReplies(
            f"the warm-up failed: no client sent a usable signature{reasons(context.rows)}", context.rows
        )
    groups = grouper(context, replies)
    if not groups.count:
        raise ConfigError(f"{plan.cluster!r} leaves all {len(replies)} clients out; use noise=nearest or another")
    for client in groups.waiting():
        context.note(client, rejected="waits: fits no group", n=replies[client].n)
    state = Grouping(groups, {}, total=plan.classes)
    for name, members in groups.members().items():
        state.classes[name] = classes_of([replies[c] for c in members], plan)
    # The test model of the warm-up is not trained further.
    run.arrays = {}
    for number, (name, classes) in enumerate(state.classes.items()):
        arguments = [len(classes)]
        # A plan's `model` needs a second argument only for groupers with different models, such as IFCA.
        if number and grouper.different_models:
            arguments.append(number)
        model = plan.model(*arguments)
        run.arrays = run.arrays | as_part(model, name)
        run.memory = run.memory | as_part(plan.inherit(before), name)
    for client in fleet.clients():
        if client not in replies:
            state.silent[client] = MAX_WARM_UPS if client in refused else 1
    return state


def reset_models(context: GroupContext, state: Grouping) -> None:
    """Give every group the first model again, and clear its memory except for the privacy account."""
    run = context.run
    for name, classes in state.classes.items():
        run.arrays = run.arrays | as_part(context.plan.model(len(classes)), name)
        before = part_of(run.memory, name)
        run.memory = {k: v for k, v in run.memory.items() if k.partition("/")[0] != name}
        run.memory = run.memory | as_part({k: v for k, v in before.items() if k == RELEASES}, name)


def regroup(context: GroupContext, grouper: Grouper, before: Grouping) -> Grouping:
    """Form groups anew of the clients that are present, in case their data have changed, and keep what was learnt.

    A new group starts from the model of the old group that most of its clients come from. If its classes differ, its
    output layer is new.
    """
    run = context.run
    models = {g: part_of(run.arrays, g) for g in before.groups.names}
    memories = [part_of(run.memory, g) for g in before.groups.names]
    run.memory = {k: v for k, v in run.memory.items() if k.partition("/")[0] not in models}
    state = create_groups(context, grouper, memories)
    for name, members in state.groups.members().items():
        origins = [g for c in members if (g := before.groups.group_of(c))]
        if not origins:
            continue
        # Sorted before the maximum, so that among equally many the first name wins, in every run.
        origin = max(sorted(set(origins)), key=origins.count)
        same_classes = before.classes[origin] == state.classes[name]
        model = part_of(run.arrays, name)
        for k in model:
            if same_classes or not k.startswith(f"{context.plan.head}."):
                model[k] = models[origin][k]
        run.arrays = run.arrays | as_part(model, name)
    return state


def classes_of(replies: list[Reply], plan: Plan) -> list[int]:
    """The classes of a group's output layer: those that enough of its clients have if they say so, otherwise all."""
    everything = list(range(plan.classes))
    reported = [r.extras["holdings"] > 0 for r in replies if "holdings" in r.extras]
    if not plan.reduced_heads or not reported:
        return everything
    enough = max(1.0, CLASS_SHARE * len(replies))
    return [int(c) for c in np.flatnonzero(np.sum(reported, axis=0) >= enough)] or everything


def refuse_sybils(context: GroupContext) -> dict[ClientId, str]:
    """Refused clients and why: of several clients with one key all but the first. Only some fleets know keys."""
    refused = find_shared_keys(context.fleet.clients(), context.fleet.keys())
    for client, why in refused.items():
        log.warning("round %d: %s is refused: it %s", context.run.round + 1, client, why)
        context.note(client, rejected=f"refused: {why}")
    return refused


def admit_late_joiners(context: GroupContext, grouper: Grouper, state: Grouping) -> None:
    """Admit new clients to groups; a group that has settled sends them its model at once."""
    known = state.groups.labelled
    new = [c for c in context.fleet.clients() if c not in known and state.silent.get(c, 0) < MAX_WARM_UPS]
    if not new:
        return
    refused = {c: why for c, why in refuse_sybils(context).items() if c in new}
    size = state.groups.signatures.shape[1]
    replies = request_signatures(context, grouper, [c for c in new if c not in refused], size)
    for client in new:
        if client not in replies:
            state.silent[client] = MAX_WARM_UPS if client in refused else state.silent.get(client, 0) + 1
    admitted = grouper.admit(context, state, replies)
    numbers = {name: i for i, name in enumerate(state.groups.names)}
    state.groups = state.groups.with_admitted({c: numbers.get(a.group, WAITING) for c, a in admitted.items()})
    final = {c: a.group for c, a in admitted.items() if a.group in state.settled}
    metrics = send_final_models(context, state, final)
    for client, admission in admitted.items():
        where = admission.group or f"no group: {admission.quarantine}"
        log.info("round %d: %s joins %s", context.run.round + 1, client, where)
        context.note(client, admission, replies[client].n, figures=metrics.get(client))


def send_final_models(
    context: GroupContext, state: Grouping, clients: Mapping[ClientId, str]
) -> dict[ClientId, dict[str, float]]:
    """Send clients the model of their group to keep; returns its metrics on their own data."""
    if not clients:
        return {}
    by_group = {g: request_of(context.run, state, g, "take") for g in set(clients.values())}
    requests = {c: by_group[g] for c, g in clients.items()}
    answers = sift(context.fleet.ask(requests), fault_of_extras)
    context.down += traffic(requests, answers)[0]
    return {c: dict(r.metrics) for c, r in answers.replies.items()}


def active_groups(roster: Roster, state: Grouping) -> dict[str, list[ClientId]]:
    """The groups that have not settled and have clients present, with these clients."""
    present = {roster.ids[i] for i in roster.here()}
    active = {}
    for group, members in state.groups.members().items():
        here = [c for c in members if c in present]
        if here and group not in state.settled:
            active[group] = here
    return active


def request_signatures(
    context: GroupContext, grouper: Grouper, clients: list[ClientId], size: int = 0
) -> dict[ClientId, Reply]:
    """The replies to a warm-up, with a signature each; empty replies if the grouper needs no warm-up."""
    if grouper.uses_warm_up:
        return warm_up(context, clients, size)
    return {c: Reply({}) for c in clients}


def warm_up(context: GroupContext, clients: Sequence[ClientId], size: int = 0) -> dict[ClientId, Reply]:
    """Let clients train the same test model, whenever they join, and send a signature of `size` numbers.

    They do not send the model. With reduced heads they also send which classes they have.
    """
    run = context.run
    plan = context.plan
    size = size or plan.signature_size
    config: dict[str, Scalar] = {"seed": run.seed, "round": 0}
    if plan.reduced_heads:
        config["holdings"] = True
    common = Request("warm", plan.model(plan.classes), config)
    replies = context.ask(dict.fromkeys(clients, common), "warm-up", partial(fault_of_signature, plan, size))
    if size:
        return replies
    return of_one_length(context, replies)


def fault_of_signature(plan: Plan, size: int, reply: Reply) -> Failure | None:
    """The fault of a reply to a warm-up, or None."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    signature = reply.extras.get("signature")
    holdings = reply.extras.get("holdings")
    if signature is None or (plan.reduced_heads and holdings is None):
        return Failure("missing_key", "sent no signature, or not which classes it holds")
    if signature.dtype != np.float32 or signature.ndim != 1 or (size and len(signature) != size):
        expected = f"{size or 'a row of'} float32"
        return Failure("shape", f"sent a signature of {signature.dtype} {signature.shape}, expected {expected}")
    if plan.reduced_heads and holdings is not None and holdings.shape != (plan.classes,):
        return Failure("shape", f"sent holdings of shape {holdings.shape}, expected {plan.classes}")
    return None


def of_one_length(context: GroupContext, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """The replies with signatures of the most common length, where the length is not known beforehand."""
    lengths = Counter(len(reply.extras["signature"]) for reply in replies.values())
    # Of lengths that are equally common the shorter one is taken, whatever the order of replies.
    usual = max(lengths, key=lambda length: (lengths[length], -length), default=0)
    for client, reply in replies.items():
        if (length := len(reply.extras["signature"])) != usual:
            context.note(client, failure=str(Failure("shape", f"sent a signature of {length} numbers, others {usual}")))
    return {c: r for c, r in replies.items() if len(r.extras["signature"]) == usual}
