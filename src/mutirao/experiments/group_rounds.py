"""Rounds of all groups in one pass: one warm-up, one question to the fleet a round, one model a group.

fleet.clients -> newcomers: warm-up, admit -> a cohort for each group -> one round of all (`core.rounds.step`) -> judge
-> record. Who is in which group is the grouper's to say (`grouper`). A group whose clients are all away keeps its
state; one that has settled sleeps.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mutirao.clustering.base import Grouper, GroupUpdates, as_grouper
from mutirao.clustering.context import GroupContext
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.late_joiners import find_shared_keys
from mutirao.clustering.membership import WAITING
from mutirao.clustering.plan import Plan as Plan
from mutirao.core.arrays import Arrays, as_part, part_of
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar, traffic
from mutirao.core.parts import Screened
from mutirao.core.records import Round, reasons
from mutirao.core.roster import Roster
from mutirao.core.rounds import Cohort, Run, start_run, step, wait_for_clients
from mutirao.core.validation import fault_of_extras, sift
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.experiments.group_evaluation import class_map_of, evaluate_groups, request_of
from mutirao.privacy.central_noise import RELEASES


def warm_up(context: GroupContext, clients: Sequence[ClientId], size: int = 0) -> dict[ClientId, Reply]:
    """The signatures of these clients, `size` numbers each, and which classes they hold if heads are cut to them."""
    run, plan, size = context.run, context.plan, size or context.plan.signature_size
    config: dict[str, Scalar] = {"seed": run.seed, "round": 0}
    if plan.reduced_heads:
        config["holdings"] = True
    common = Request("warm", plan.model(plan.classes), config)
    replies = context.ask(dict.fromkeys(clients, common), "warm-up", partial(fault_of_signature, plan, size))
    return replies if size else of_one_length(context, replies)


def fault_of_signature(plan: Plan, size: int, reply: Reply) -> Failure | None:
    """What is wrong with a reply to a warm-up, or None."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    signature, holdings = reply.extras.get("signature"), reply.extras.get("holdings")
    if signature is None or (plan.reduced_heads and holdings is None):
        return Failure("missing_key", "sent no signature, or not which classes it holds")
    if signature.dtype != np.float32 or signature.ndim != 1 or (size and len(signature) != size):
        expected = f"{size or 'a row of'} float32"
        return Failure("shape", f"sent a signature of {signature.dtype} {signature.shape}, expected {expected}")
    if plan.reduced_heads and holdings is not None and holdings.shape != (plan.classes,):
        return Failure("shape", f"sent holdings of shape {holdings.shape}, expected {plan.classes}")
    return None


def of_one_length(context: GroupContext, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """Those whose signatures are as long as most are; where nobody knows beforehand, most are believed."""
    lengths = Counter(len(reply.extras["signature"]) for reply in replies.values())
    usual = max(lengths, key=lambda length: (lengths[length], -length), default=0)
    for client, reply in replies.items():
        if (length := len(reply.extras["signature"])) != usual:
            context.note(client, failure=str(Failure("shape", f"sent a signature of {length} numbers, others {usual}")))
    return {c: r for c, r in replies.items() if len(r.extras["signature"]) == usual}


log = logging.getLogger("mutirao")

TRIES = 3  # warm-ups a client may fail before it is left alone
SHARE = 0.1  # part of a group that must hold a class for the group's head to have it


def federate_groups(
    run: Run, fleet: Fleet, plan: Plan, rounds: int, evaluate_every: int = 1, expect: int = 1
) -> Iterator[Round]:
    """Form groups unless the run has some, then make rounds until all are done or all groups have settled."""
    state, context, grouper = Grouping.from_memory(run.memory), GroupContext(run, fleet, plan), as_grouper(plan.cluster)
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
        awake = active_groups(run.roster, state)
        if not awake:
            log.warning("round %d: no group that still learns has a client here; the run ends", run.round + 1)
            return
        done, heard = make_round(context, grouper, state, awake)
        grouper.after(context, state, heard)
        evaluate_groups(context, state, done.row, run.round % evaluate_every == 0 or run.round == rounds)
        done = context.finish_round(done)
        run.memory = run.memory | state.to_memory()
        fleet.record(done)
        run.history.append(done.row)
        yield done
        if len(state.settled) == state.groups.count:
            return


def make_round(
    context: GroupContext, grouper: Grouper, state: Grouping, awake: Mapping[str, list[ClientId]]
) -> tuple[Round, dict[str, GroupUpdates]]:
    """One round of the groups that are awake, and what was heard of their clients if the grouper wants to know."""
    members, heard = state.groups.members(), dict[str, GroupUpdates]()
    plan, number = context.plan, context.run.round + 1
    cohorts = [training_group(plan, grouper, state, group, members[group], heard, number) for group in sorted(awake)]
    try:
        return step(context.run, context.fleet, cohorts, patience=context.plan.patience), heard
    except TooFewReplies as error:
        error.rows[:0] = context.rows
        raise


def training_group(
    plan: Plan,
    grouper: Grouper,
    state: Grouping,
    group: str,
    members: list[ClientId],
    heard: dict[str, GroupUpdates],
    number: int,
) -> Cohort:
    """A group as one round sees it."""
    told = plan.hyperparameters.told(group, number, state.scores, plan.higher_is_better)

    def overhear(current: Arrays, replies: dict[ClientId, Reply]) -> Screened:
        heard[group] = GroupUpdates(current, replies)
        return replies, {}

    return Cohort(
        *plan.parts(len(members)),
        filters=(*plan.filters, overhear) if grouper.needs_updates else plan.filters,
        config={**plan.round_config, **class_map_of(state, group), **told},
        name=group,
        members=members,
        size_cap=plan.size_cap,
        metrics=plan.allowed_metrics,
    )


def create_groups(context: GroupContext, grouper: Grouper, before: Sequence[Arrays] = ()) -> Grouping:
    """The groups of those who are here, each with a model of its own in the run's arrays.

    `before` is what the groups there were have remembered, if these are formed anew.
    """
    run, fleet, plan = context.run, context.fleet, context.plan
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
    state = Grouping(groups, {}, total=context.plan.classes)
    for name, members in groups.members().items():
        state.classes[name] = classes_of([replies[c] for c in members], plan)
    run.arrays = {}  # instead of the test model
    for number, (name, classes) in enumerate(state.classes.items()):
        model = plan.model(len(classes), number) if grouper.different_models and number else plan.model(len(classes))
        run.arrays = run.arrays | as_part(model, name)
        run.memory = run.memory | as_part(plan.inherit(before), name)
    state.silent = {c: TRIES if c in refused else 1 for c in fleet.clients() if c not in replies}
    return state


def reset_models(context: GroupContext, state: Grouping) -> None:
    """Give every group the first model again, and nothing to remember but what its account says."""
    run, plan = context.run, context.plan
    for name, classes in state.classes.items():
        run.arrays = run.arrays | as_part(plan.model(len(classes)), name)
        before = part_of(run.memory, name)
        run.memory = {k: v for k, v in run.memory.items() if k.partition("/")[0] != name}
        run.memory = run.memory | as_part({k: v for k, v in before.items() if k == RELEASES}, name)


def request_signatures(
    context: GroupContext, grouper: Grouper, clients: list[ClientId], size: int = 0
) -> dict[ClientId, Reply]:
    """What these clients send to be grouped: a signature, or nothing if the grouper wants none."""
    return warm_up(context, clients, size) if grouper.uses_warm_up else {c: Reply({}) for c in clients}


def regroup(context: GroupContext, grouper: Grouper, before: Grouping) -> Grouping:
    """Groups formed anew by those who are here, in case their data have changed; what was learnt is carried over.

    A new group starts from the model of the old one most of its clients come from; a head for other classes is new.
    """
    run = context.run
    models = {g: part_of(run.arrays, g) for g in before.groups.names}
    memories = [part_of(run.memory, g) for g in before.groups.names]
    run.memory = {k: v for k, v in run.memory.items() if k.partition("/")[0] not in models}
    state = create_groups(context, grouper, memories)
    for name, members in state.groups.members().items():
        origins = [g for c in members if (g := before.groups.group_of(c))]
        if origins:
            home = max(sorted(set(origins)), key=origins.count)
            same, old = before.classes[home] == state.classes[name], models[home]
            fresh = part_of(run.arrays, name)
            kept = {k: old[k] if same or not k.startswith(f"{context.plan.head}.") else v for k, v in fresh.items()}
            run.arrays = run.arrays | as_part(kept, name)
    return state


def classes_of(replies: list[Reply], plan: Plan) -> list[int]:
    """The classes a group's head has: all, or those that enough of its clients hold if they have said so."""
    held = [r.extras["holdings"] > 0 for r in replies if "holdings" in r.extras]
    if not plan.reduced_heads or not held:
        return list(range(plan.classes))
    holders = np.sum(held, axis=0)
    return [int(c) for c in np.flatnonzero(holders >= max(1.0, SHARE * len(replies)))] or list(range(plan.classes))


def refuse_sybils(context: GroupContext) -> dict[ClientId, str]:
    """Who is refused, and why: of several clients with one key all but the first; only some fleets know keys."""
    refused = find_shared_keys(context.fleet.clients(), context.fleet.keys())
    for client, why in refused.items():
        log.warning("round %d: %s is refused: it %s", context.run.round + 1, client, why)
        context.note(client, rejected=f"refused: {why}")
    return refused


def admit_late_joiners(context: GroupContext, grouper: Grouper, state: Grouping) -> None:
    """Admit the clients that no group knows yet; a group that has settled hands its model over at once."""
    known = state.groups.labelled
    new = [c for c in context.fleet.clients() if c not in known and state.silent.get(c, 0) < TRIES]
    if not new:
        return
    refused = {c: why for c, why in refuse_sybils(context).items() if c in new}
    size = state.groups.signatures.shape[1]
    replies = request_signatures(context, grouper, [c for c in new if c not in refused], size)
    for client in new:
        if client not in replies:
            state.silent[client] = TRIES if client in refused else state.silent.get(client, 0) + 1
    found = grouper.admit(context, state, replies)
    numbers = {name: i for i, name in enumerate(state.groups.names)}
    state.groups = state.groups.with_admitted({c: numbers.get(a.group, WAITING) for c, a in found.items()})
    handed = send_final_models(context, state, {c: a.group for c, a in found.items() if a.group in state.settled})
    for client, where in found.items():
        log.info("round %d: %s joins %s", context.run.round + 1, client, where.group or "nobody: " + where.quarantine)
        context.note(client, where, replies[client].n, figures=handed.get(client))


def send_final_models(
    context: GroupContext, state: Grouping, clients: Mapping[ClientId, str]
) -> dict[ClientId, dict[str, float]]:
    """Give clients the model of their group to keep; they say how it does on their own data."""
    common = {g: request_of(context.run, state, g, "take") for g in set(clients.values())}
    requests = {c: common[g] for c, g in clients.items()}
    answers = sift(context.fleet.ask(requests), fault_of_extras) if requests else Answers({}, {})
    context.down += traffic(requests, answers)[0]
    return {c: dict(r.metrics) for c, r in answers.replies.items()}


def active_groups(roster: Roster, state: Grouping) -> dict[str, list[ClientId]]:
    """The groups that still learn and have clients here, with these clients."""
    present = {roster.ids[i] for i in roster.here()}
    members = {g: [c for c in who if c in present] for g, who in state.groups.members().items()}
    return {g: who for g, who in members.items() if who and g not in state.settled}
