"""Rounds of all groups in one pass: one warm-up, one question to the fleet a round, one model a group.

fleet.clients -> newcomers: warm-up, admit -> a cohort for each group -> one round of all (`core.rounds.step`) -> judge
-> record. A group whose clients are all away keeps its state; one that has settled sleeps.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays, as_part, part_of
from mutirao.core.bounds import SIZE_CAP
from mutirao.core.checks import fault_of_extras, sift
from mutirao.core.evaluation import summarise
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar, traffic
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector
from mutirao.core.record import Round, Row, reasons
from mutirao.core.roster import Roster
from mutirao.core.rounds import Cohort, Patience, Run, begin, gather, step
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.groups.admit import Admission, admit, one_a_key
from mutirao.groups.form import NoiseRule, form, quality
from mutirao.groups.membership import WAITS
from mutirao.groups.state import Grouping

log = logging.getLogger("mutirao")

TRIES = 3  # warm-ups a client may fail before it is left alone
SHARE = 0.1  # part of a group that must hold a class for the group's head to have it


@dataclass(frozen=True)
class Plan:
    """How groups are formed and trained; `model(outputs)` gives a fresh model with a head of that size."""

    model: Callable[[int], Arrays]
    classes: int
    parts: Callable[[int], tuple[AnySelector, AnyAggregator]]  # of a group with so many clients
    cluster: Any = None
    noise: NoiseRule = "nearest"
    directions: bool = False
    size: int = 0  # numbers in a signature (0: any)
    reduced: bool = False  # whether heads have only the classes a group holds
    filters: tuple[AnyFilter, ...] = ()
    head: str = ""  # the name of the model's last layer
    regroup: int = 0  # rounds after which groups are formed anew (0: never)
    stable: int = 0  # judgements without gain after which a group has settled (0: never)
    tolerance: float = 0.002  # what counts as gain
    patience: Patience = field(default_factory=Patience)
    truth: Callable[[int], Mapping[ClientId, int] | None] = lambda round: None  # who is alike by then, in simulation
    honest: Callable[[ClientId], bool] = lambda client: True  # whose judgement counts, in simulation
    judged: bool = True  # whether clients say how the models do on their own test data
    clients_every: int = 0  # rounds between judgements by every client, worst and all (0: never)
    # With what the memory of a new group begins after a warm-up, given those of the groups before.
    inherit: Callable[[Sequence[Arrays]], Arrays] = lambda before: {}
    size_cap: float = SIZE_CAP  # times the median samples that a client counts for at most (0: any number)
    metrics: Collection[str] | None = None  # that clients may tell with an update (None: any that most of them do)


def federate_groups(
    run: Run, fleet: Fleet, plan: Plan, rounds: int, evaluate_every: int = 1, expect: int = 1
) -> Iterator[Round]:
    """Form groups unless the run has some, then make rounds until all are done or all groups have settled."""
    state, news = Grouping.from_memory(run.memory), News()
    begin(run, fleet, 1 if state else expect, plan.patience)
    state = state or found_groups(run, fleet, plan, news)
    while run.round < rounds:
        gather(run.roster, fleet, 1, plan.patience)
        if plan.regroup and run.round and run.round % plan.regroup == 0:
            state = regroup(run, fleet, plan, state, news)
        welcome(run, fleet, plan, state, news)
        awake = live(run.roster, state)
        if not awake:
            log.warning("round %d: no group that still learns has a client here; the run ends", run.round + 1)
            return
        done = make_round(run, fleet, plan, state, awake, news)
        judge(run, fleet, plan, state, done.row, run.round % evaluate_every == 0 or run.round == rounds)
        run.memory = run.memory | state.to_memory()
        fleet.record(done)
        run.history.append(done.row)
        news = News()
        yield done
        if len(state.settled) == state.groups.count:
            return


def make_round(
    run: Run, fleet: Fleet, plan: Plan, state: Grouping, awake: Mapping[str, list[ClientId]], news: "News"
) -> Round:
    """One round of the groups that are awake, with what happened before it in its record."""
    members = state.groups.members()
    cohorts = [cohort_of(plan, state, group, members[group]) for group in sorted(awake)]
    try:
        done = step(run, fleet, cohorts, patience=plan.patience)
    except TooFewReplies as error:
        error.rows[:0] = news.rows
        raise
    done.row["bytes_down"] += news.down
    done.row["bytes_up"] += news.up
    return Round(done.row, news.rows + done.clients)


def cohort_of(plan: Plan, state: Grouping, group: str, members: list[ClientId]) -> Cohort:
    """A group as one round sees it."""
    return Cohort(
        *plan.parts(len(members)),
        filters=plan.filters,
        tell=class_map_of(plan, state, group),
        name=group,
        members=members,
        size_cap=plan.size_cap,
        metrics=plan.metrics,
    )


@dataclass
class News:
    """What happened besides training, to be recorded with the next round: rows of clients, and bytes."""

    rows: list[Row] = field(default_factory=list)
    down: int = 0
    up: int = 0

    def count(self, requests: Mapping[ClientId, Request], answers: Answers) -> None:
        """Add what was carried."""
        down, up = traffic(requests, answers)
        self.down, self.up = self.down + down, self.up + up


def found_groups(run: Run, fleet: Fleet, plan: Plan, news: News, before: Sequence[Arrays] = ()) -> Grouping:
    """The groups of those who are here, each with a model of its own in the run's arrays.

    `before` is what the groups there were have remembered, if these are formed anew.
    """
    refused = refuse_swarms(run, fleet, news)
    replies = warm_up(run, fleet, plan, [c for c in fleet.clients() if c not in refused], news)
    if not replies:
        raise TooFewReplies(f"the warm-up failed: no client sent a usable signature{reasons(news.rows)}", news.rows)
    signatures = {c: r.extras["signature"] for c, r in replies.items()}
    groups = form(signatures, plan.cluster, plan.noise, plan.directions, run.seed)
    if not groups.count:
        raise ConfigError(f"{plan.cluster!r} leaves all {len(signatures)} clients out; use noise=nearest or another")
    for client in groups.waiting():
        news.rows.append(row_of(run, client, rejected="waits: fits no group", n=replies[client].n))
    state = Grouping(groups, {})
    for name, members in groups.members().items():
        state.classes[name] = classes_of([replies[c] for c in members], plan)
    run.arrays = {  # instead of the test model
        k: v for g, names in state.classes.items() for k, v in as_part(plan.model(len(names)), g).items()
    }
    for name in groups.names:
        run.memory = run.memory | as_part(plan.inherit(before), name)
    state.silent = {c: TRIES if c in refused else 1 for c in fleet.clients() if c not in replies}
    return state


def regroup(run: Run, fleet: Fleet, plan: Plan, before: Grouping, news: News) -> Grouping:
    """Groups formed anew by those who are here, in case their data have changed; what was learnt is carried over.

    A new group starts from the model of the old one most of its clients come from; a head for other classes is new.
    """
    models = {g: part_of(run.arrays, g) for g in before.groups.names}
    memories = [part_of(run.memory, g) for g in before.groups.names]
    run.memory = {k: v for k, v in run.memory.items() if k.partition("/")[0] not in models}
    state = found_groups(run, fleet, plan, news, memories)
    for name, members in state.groups.members().items():
        origins = [g for c in members if (g := before.groups.group_of(c))]
        if origins:
            home = max(sorted(set(origins)), key=origins.count)
            same, old = before.classes[home] == state.classes[name], models[home]
            fresh = part_of(run.arrays, name)
            kept = {k: old[k] if same or not k.startswith(f"{plan.head}.") else v for k, v in fresh.items()}
            run.arrays = run.arrays | as_part(kept, name)
    return state


def classes_of(replies: list[Reply], plan: Plan) -> list[int]:
    """The classes a group's head has: all, or those that enough of its clients hold."""
    if not plan.reduced:
        return list(range(plan.classes))
    holders = np.sum([r.extras["holdings"] > 0 for r in replies], axis=0)
    return [int(c) for c in np.flatnonzero(holders >= max(1.0, SHARE * len(replies)))] or list(range(plan.classes))


def warm_up(run: Run, fleet: Fleet, plan: Plan, clients: list[ClientId], news: News) -> dict[ClientId, Reply]:
    """The signatures of these clients: all train the same test model, whenever they come."""
    config: dict[str, Scalar] = {"seed": run.seed, "round": 0}
    if plan.reduced:
        config["holdings"] = True
    test = plan.model(plan.classes)
    common = Request("warm", test, config)
    requests = dict.fromkeys(clients, common)
    answers = sift(fleet.ask(requests), partial(fault_of_signature, plan)) if requests else Answers({}, {})
    news.count(requests, answers)
    for client, failure in answers.failures.items():
        log.warning("round %d: warm-up of %s %s", run.round + 1, client, failure)
        news.rows.append(row_of(run, client, failure=str(failure)))
    return answers.replies


def fault_of_signature(plan: Plan, reply: Reply) -> Failure | None:
    """What is wrong with a reply to a warm-up, or None."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    signature, holdings = reply.extras.get("signature"), reply.extras.get("holdings")
    if signature is None or (plan.reduced and holdings is None):
        return Failure("missing_key", "sent no signature, or not which classes it holds")
    if signature.dtype != np.float32 or signature.ndim != 1 or (plan.size and len(signature) != plan.size):
        return Failure(
            "shape", f"sent a signature of {signature.dtype} {signature.shape}, expected {plan.size} float32"
        )
    if plan.reduced and holdings is not None and holdings.shape != (plan.classes,):
        return Failure("shape", f"sent holdings of shape {holdings.shape}, expected {plan.classes}")
    return None


def refuse_swarms(run: Run, fleet: Fleet, news: News) -> dict[ClientId, str]:
    """Who is refused, and why: of several clients with one key all but the first; only some fleets know keys."""
    refused = one_a_key(fleet.clients(), fleet.keys())
    for client, why in refused.items():
        log.warning("round %d: %s is refused: it %s", run.round + 1, client, why)
        news.rows.append(row_of(run, client, rejected=f"refused: {why}"))
    return refused


def welcome(run: Run, fleet: Fleet, plan: Plan, state: Grouping, news: News) -> None:
    """Admit the clients that no group knows yet; a group that has settled hands its model over at once."""
    known = state.groups.labelled
    new = [c for c in fleet.clients() if c not in known and state.silent.get(c, 0) < TRIES]
    if not new:
        return
    refused = {c: why for c, why in refuse_swarms(run, fleet, news).items() if c in new}
    replies = warm_up(run, fleet, plan, [c for c in new if c not in refused], news)
    for client in new:
        if client not in replies:
            state.silent[client] = TRIES if client in refused else state.silent.get(client, 0) + 1
    found = admit(state.groups, {c: r.extras["signature"] for c, r in replies.items()})
    numbers = {name: i for i, name in enumerate(state.groups.names)}
    state.groups = state.groups.with_later({c: numbers.get(a.group, WAITS) for c, a in found.items()})
    settled = {c: a.group for c, a in found.items() if a.group in state.settled}
    handed = hand_over(run, fleet, plan, state, settled, news)
    for client, where in found.items():
        log.info("round %d: %s joins %s", run.round + 1, client, where.group or "nobody: " + where.quarantine)
        news.rows.append(row_of(run, client, admission=where, n=replies[client].n) | handed.get(client, {}))


def hand_over(
    run: Run, fleet: Fleet, plan: Plan, state: Grouping, clients: Mapping[ClientId, str], news: News
) -> dict[ClientId, dict[str, float]]:
    """Give clients the model of their group to keep; they say how it does on their own data."""
    common = {g: request_of(run, plan, state, g, "take") for g in set(clients.values())}
    requests = {c: common[g] for c, g in clients.items()}
    answers = sift(fleet.ask(requests), fault_of_extras) if requests else Answers({}, {})
    news.down += traffic(requests, answers)[0]
    return {c: dict(r.metrics) for c, r in answers.replies.items()}


def request_of(run: Run, plan: Plan, state: Grouping, group: str, do: str) -> Request:
    """What a client is asked of its group's model as it is now."""
    config = {"seed": run.seed, "round": run.round, **class_map_of(plan, state, group)}
    return Request(do, part_of(run.arrays, group), config)


def class_map_of(plan: Plan, state: Grouping, group: str) -> dict[str, Scalar]:
    """Which class each output of a group's head stands for, where it has not all of them in order."""
    names = state.classes[group]
    return {} if names == list(range(plan.classes)) else {"classes": ",".join(map(str, names))}


def live(roster: Roster, state: Grouping) -> dict[str, list[ClientId]]:
    """The groups that still learn and have clients here, with these clients."""
    present = {roster.ids[i] for i in roster.here()}
    members = {g: [c for c in who if c in present] for g, who in state.groups.members().items()}
    return {g: who for g, who in members.items() if who and g not in state.settled}


def judge(run: Run, fleet: Fleet, plan: Plan, state: Grouping, row: Row, due: bool) -> None:
    """Enter how the models do on their clients' own test data: means over clients, each counting the same."""
    every = bool(plan.clients_every) and run.round % plan.clients_every == 0
    replies, members = ask_to_judge(run, fleet, plan, state) if plan.judged and (due or every) else ({}, {})
    if due:
        for name in ("accuracy", "accuracy_known", "loss"):
            if values := [r.metrics[name] for r in replies.values() if name in r.metrics]:
                row[name] = float(np.mean(values))
        for c, reply in replies.items():
            run.roster.note(c, {f"own_{k}": v for k, v in reply.metrics.items() if k in row})
        for g, who in members.items():
            own = [replies[c].metrics["accuracy"] for c in who if c in replies and "accuracy" in replies[c].metrics]
            if own:
                state.scores.setdefault(g, []).append((run.round, float(np.mean(own))))
                settle(state, g, plan)
        found = quality(state.groups, plan.truth(run.round))
        row.update({k: found[k] for k in ("groups", "rand") if k in found})
    if every:
        row.update(summarise("accuracy", [r.metrics["accuracy"] for r in replies.values() if "accuracy" in r.metrics]))


def ask_to_judge(
    run: Run, fleet: Fleet, plan: Plan, state: Grouping
) -> tuple[dict[ClientId, Reply], dict[str, list[ClientId]]]:
    """What the clients that are here say of their group's model, and who they are by group."""
    here = set(fleet.clients())
    common = {g: request_of(run, plan, state, g, "evaluate") for g in state.groups.names}
    members = {g: [c for c in who if c in here and plan.honest(c)] for g, who in state.groups.members().items()}
    requests = {c: common[g] for g, who in members.items() for c in who}
    return sift(fleet.ask(requests), fault_of_judgement).replies if requests else {}, members


def fault_of_judgement(reply: Reply) -> Failure | None:
    """What is wrong with what a client says of its group's model, or None: one lie must not become the group's mean."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    odd = [k for k, v in reply.metrics.items() if k.startswith("accuracy") and not 0 <= v <= 1]
    return Failure("too_large", f"tells an {odd[0]} that is no share") if odd else None


def settle(state: Grouping, group: str, plan: Plan) -> None:
    """A group has settled if its last `stable` judgements brought no gain over the best before them."""
    values = [v for _, v in state.scores[group]]
    if not plan.stable or group in state.settled or len(values) <= plan.stable:
        return
    if max(values[-plan.stable :]) <= max(values[: -plan.stable]) + plan.tolerance:
        state.settled[group] = state.scores[group][-1][0]


def row_of(
    run: Run,
    client: ClientId,
    admission: Admission | None = None,
    n: int = 0,
    failure: str = "",
    rejected: str = "",
) -> Row:
    """A line on a client that was not asked to train: a warm-up, an admission, a refusal."""
    row: Row = {"round": run.round + 1, "client": client, "try": 0, "replied": int(n > 0), "n": n, "weight": 0.0}
    row |= {"age": 0, "failure": failure, "rejected": rejected}
    if admission is not None:
        row |= {"group": admission.group, "distance": admission.distance, "confidence": admission.confidence}
        row["rejected"] = admission.quarantine and f"quarantine: {admission.quarantine}"
    return row
