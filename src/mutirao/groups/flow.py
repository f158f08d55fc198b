"""Rounds of all groups in one pass: one warm-up, one question to the fleet a round, one model a group.

fleet.clients -> newcomers: warm-up, admit -> select in each group -> fleet.ask, once -> check, filter and aggregate in
each group -> judge -> record. A group whose clients are all away keeps its state; one that has settled sleeps.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays, is_finite, nbytes
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar
from mutirao.core.roster import Roster
from mutirao.core.rounds import (
    Aggregator,
    Merged,
    Patience,
    Round,
    Row,
    Run,
    Selector,
    bytes_of_replies,
    chosen_by,
    gather,
    mean_metrics,
    probe,
    reasons,
    rows_of,
    screened,
    told,
)
from mutirao.core.rows import whole_replies
from mutirao.errors import ConfigError, Diverged, TooFewReplies
from mutirao.filters import Filter, check, fault, fault_of_extras
from mutirao.groups.admit import Admission, admit, one_a_key
from mutirao.groups.form import WAITS, NoiseRule, form, quality
from mutirao.groups.state import State, as_part, part_of

log = logging.getLogger("mutirao")

TRIES = 3  # warm-ups a client may fail before it is left alone
SHARE = 0.1  # part of a group that must hold a class for the group's head to have it


@dataclass(frozen=True)
class Plan:
    """How groups are formed and trained; `model(outputs)` gives a fresh model with a head of that size."""

    model: Callable[[int], Arrays]
    classes: int
    select: Selector
    aggregate: Aggregator
    cluster: Any = None
    noise: NoiseRule = "nearest"
    directions: bool = False
    size: int = 0  # numbers in a signature (0: any)
    reduced: bool = False  # whether heads have only the classes a group holds
    filters: tuple[Filter, ...] = ()
    head: str = ""  # the name of the model's last layer
    regroup: int = 0  # rounds after which groups are formed anew (0: never)
    stable: int = 0  # judgements without gain after which a group has settled (0: never)
    tolerance: float = 0.002  # what counts as gain
    patience: Patience = field(default_factory=Patience)
    truth: Mapping[ClientId, int] | None = None  # the true partition, in simulation
    honest: Callable[[ClientId], bool] = lambda client: True  # whose judgement counts, in simulation


def federate_groups(
    run: Run, fleet: Fleet, plan: Plan, rounds: int, evaluate_every: int = 1, expect: int = 1
) -> Iterator[Round]:
    """Form groups unless the run has some, then make rounds until all are done or all groups have settled."""
    state, news = State.from_memory(run.memory), News()
    if state is None:
        gather(run.roster, fleet, expect, plan.patience)
        state = founded(run, fleet, plan, news)
    while run.round < rounds:
        gather(run.roster, fleet, 1, plan.patience)
        if plan.regroup and run.round and run.round % plan.regroup == 0:
            state = regrouped(run, fleet, plan, state, news)
        welcome(run, fleet, plan, state, news)
        awake = live(run.roster, state)
        if not awake:
            log.warning("round %d: no group that still learns has a client here; the run ends", run.round + 1)
            return
        done = step(run, fleet, plan, state, awake, news)
        if run.round % evaluate_every == 0 or run.round == rounds:
            done.row.update(judged(run, fleet, plan, state))
        run.memory = run.memory | state.to_memory()
        run.history.append(done.row)
        news = News()
        yield done
        if len(state.settled) == state.groups.count:
            return


@dataclass
class News:
    """What happened besides training, to be recorded with the next round: rows of clients, and bytes."""

    rows: list[Row] = field(default_factory=list)
    down: int = 0
    up: int = 0


def founded(run: Run, fleet: Fleet, plan: Plan, news: News) -> State:
    """The groups of those who are here, each with a model of its own in the run's arrays."""
    refused = swarms(run, fleet, news)
    replies = warm_up(run, fleet, plan, [c for c in fleet.clients() if c not in refused], news)
    if not replies:
        raise TooFewReplies(f"the warm-up failed: no client sent a usable signature{reasons(news.rows)}", news.rows)
    signatures = {c: r.extras["signature"] for c, r in replies.items()}
    groups = form(signatures, plan.cluster, plan.noise, plan.directions, run.seed)
    if not groups.count:
        raise ConfigError(f"{plan.cluster!r} leaves all {len(signatures)} clients out; use noise=nearest or another")
    for client in groups.waiting():
        news.rows.append(row_of(run, client, rejected="waits: fits no group", n=replies[client].n))
    state = State(groups, {})
    for name, members in groups.members().items():
        state.classes[name] = classes_of([replies[c] for c in members], plan)
    run.arrays = {  # instead of the test model
        k: v for g, names in state.classes.items() for k, v in as_part(plan.model(len(names)), g).items()
    }
    state.silent = {c: TRIES if c in refused else 1 for c in fleet.clients() if c not in replies}
    return state


def regrouped(run: Run, fleet: Fleet, plan: Plan, before: State, news: News) -> State:
    """Groups formed anew by those who are here, in case their data have changed; what was learnt is carried over.

    A new group starts from the model of the old one most of its clients come from; a head for other classes is new.
    """
    models = {g: part_of(run.arrays, g) for g in before.groups.names}
    state = founded(run, fleet, plan, news)
    for name, members in state.groups.members().items():
        origins = [g for c in members if (g := before.groups.group_of(c))]
        if origins:
            home = max(sorted(set(origins)), key=origins.count)
            same, old = before.classes[home] == state.classes[name], models[home]
            fresh = part_of(run.arrays, name)
            kept = {k: old[k] if same or not k.startswith(f"{plan.head}.") else v for k, v in fresh.items()}
            run.arrays = run.arrays | as_part(kept, name)
    stale = {f"{g}/" for g in before.groups.names}
    run.memory = {k: v for k, v in run.memory.items() if not any(k.startswith(s) for s in stale)}
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
    requests = {c: Request("warm", test, config) for c in clients}
    answers = check(fleet.ask(requests), partial(fault_of_signature, plan)) if requests else Answers({}, {})
    news.down, news.up = news.down + len(requests) * nbytes(test), news.up + bytes_of_replies(answers)
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


def swarms(run: Run, fleet: Fleet, news: News) -> dict[ClientId, str]:
    """Who is refused, and why: of several clients with one key all but the first; only some fleets know keys."""
    keys = getattr(fleet, "keys", None) or getattr(getattr(fleet, "fleet", None), "keys", None)
    refused = one_a_key(fleet.clients(), keys()) if keys else {}
    for client, why in refused.items():
        log.warning("round %d: %s is refused: it %s", run.round + 1, client, why)
        news.rows.append(row_of(run, client, rejected=f"refused: {why}"))
    return refused


def welcome(run: Run, fleet: Fleet, plan: Plan, state: State, news: News) -> None:
    """Admit the clients that no group knows yet; a group that has settled hands its model over at once."""
    known = state.groups.labelled
    new = [c for c in fleet.clients() if c not in known and state.silent.get(c, 0) < TRIES]
    if not new:
        return
    refused = {c: why for c, why in swarms(run, fleet, news).items() if c in new}
    replies = warm_up(run, fleet, plan, [c for c in new if c not in refused], news)
    for client in new:
        if client not in replies:
            state.silent[client] = TRIES if client in refused else state.silent.get(client, 0) + 1
    found = admit(state.groups, {c: r.extras["signature"] for c, r in replies.items()})
    numbers = {name: i for i, name in enumerate(state.groups.names)}
    state.groups = state.groups.with_later({c: numbers.get(a.group, WAITS) for c, a in found.items()})
    handed = hand_over(run, fleet, state, {c: a.group for c, a in found.items() if a.group in state.settled}, news)
    for client, where in found.items():
        log.info("round %d: %s joins %s", run.round + 1, client, where.group or "nobody: " + where.quarantine)
        news.rows.append(row_of(run, client, admission=where, n=replies[client].n) | handed.get(client, {}))


def hand_over(
    run: Run, fleet: Fleet, state: State, clients: Mapping[ClientId, str], news: News
) -> dict[ClientId, dict[str, float]]:
    """Give clients the model of their group to keep; they say how it does on their own data."""
    models = {g: part_of(run.arrays, g) for g in set(clients.values())}
    requests = {c: Request("take", models[g], told_of(run, state, g, run.round)) for c, g in clients.items()}
    answers = check(fleet.ask(requests), fault_of_extras) if requests else Answers({}, {})
    news.down += sum(nbytes(models[g]) for g in clients.values())
    return {c: dict(r.metrics) for c, r in answers.replies.items()}


def told_of(run: Run, state: State, group: str, number: int) -> dict[str, Scalar]:
    """What a request says besides the model; the class map only where it is not plain."""
    names = state.classes[group]
    config: dict[str, Scalar] = {"seed": run.seed, "round": number}
    if names != list(range(len(names))):
        config["classes"] = ",".join(map(str, names))
    return config


def live(roster: Roster, state: State) -> dict[str, list[ClientId]]:
    """The groups that still learn and have clients here, with these clients."""
    present = {roster.ids[i] for i in roster.here()}
    members = {g: [c for c in who if c in present] for g, who in state.groups.members().items()}
    return {g: who for g, who in members.items() if who and g not in state.settled}


def step(run: Run, fleet: Fleet, plan: Plan, state: State, awake: Mapping[str, list[ClientId]], news: News) -> Round:
    """One round of all groups that are awake; a group that gets too few replies keeps its model this time."""
    started, number = time.perf_counter(), run.round + 1
    models = {g: part_of(run.arrays, g) for g in awake}
    rows, down, up = list(news.rows), news.down, news.up
    merged: dict[str, Merged] = {}
    made: dict[str, int] = {}  # at which try
    kept: dict[ClientId, Reply] = {}
    asked = replied = failed = lost = 0
    memory, pending, last = dict(run.memory), sorted(awake), Answers({}, {})
    for attempt in range(1, plan.patience.tries + 1):
        chosen = {g: select_in(run, fleet, plan, state, g, awake[g], models[g], attempt) for g in pending}
        requests = {
            c: Request("train", models[g], told_of(run, state, g, number) | told({}, plan.aggregate, plan.select))
            for g, who in chosen.items()
            for c in who
        }
        last = fleet.ask(requests)
        down, up = down + sum(nbytes(r.arrays) for r in requests.values()), up + bytes_of_replies(last)
        for g, who in chosen.items():
            some = [{c: r for c, r in table.items() if c in who} for table in (last.replies, last.failures)]
            answers = check(Answers(*some), partial(fault, models[g]))  # type: ignore[arg-type]
            replies, rejected = screened(plan.filters, models[g], whole_replies(models[g], answers.replies))
            rows += [{**row, "group": g} for row in rows_of(run, attempt, who, answers, rejected)]
            asked, replied = asked + len(who), replied + len(answers.replies)
            failed, lost = failed + len(answers.failures), lost + len(rejected)
            run.roster.mark(number, who, {c: r.n for c, r in replies.items()})
            need = min(len(who), plan.patience.min_replies or (len(who) + 1) // 2)
            if len(answers.replies) < need or not replies:  # whom a filter dropped has answered all the same
                continue
            own = part_of(memory, g)
            merged[g], made[g] = plan.aggregate(models[g], replies, own), attempt
            if not is_finite(merged[g].arrays):
                raise Diverged(f"diverged at round {number}: the model of {g} holds NaN; try a smaller learning rate")
            memory |= as_part(own, g)
            kept |= replies
        pending = [g for g in pending if g not in merged]
        if not pending:
            break
        log.warning("round %d, try %d: too few usable replies in %s", number, attempt, ", ".join(pending))
    if not merged:
        if 2 * sum(row.get("failure", "").startswith("not_finite") for row in rows) > asked:
            raise Diverged(f"diverged at round {number}: most clients' training gives NaN or infinity")
        raise TooFewReplies(f"round {number} failed {plan.patience.tries} times in every group{reasons(rows)}", rows)

    for g, result in merged.items():
        run.arrays = run.arrays | as_part(result.arrays, g)
    run.memory, run.round = memory, number
    weights = {c: w for result in merged.values() for c, w in result.weights.items()}
    figures = {c: f for result in merged.values() for c, f in result.figures.items()}
    for row in rows:
        if (c := row["client"]) in kept and row["try"] == made.get(row.get("group", ""), -1):
            row["weight"] = weights.get(c, 0.0)
            found = kept[c].metrics | figures.get(c, {})
            row |= {k: v for k, v in found.items() if k not in row}
            run.roster.hear(number, c, found)
    line = {"round": number, "seconds": time.perf_counter() - started, "selected": asked, "replied": replied}
    line |= {"failed": failed, "rejected": lost, "bytes_down": down, "bytes_up": up}
    return Round(line | {f"train_{k}": v for k, v in mean_metrics(kept).items()}, rows)


def select_in(
    run: Run, fleet: Fleet, plan: Plan, state: State, group: str, members: list[ClientId], model: Arrays, attempt: int
) -> list[ClientId]:
    """Whom the selector picks among the members of a group; it sees the roster as if nobody else were here."""
    present = np.zeros(len(run.roster), np.bool_)
    present[[run.roster.row(c) for c in members]] = True
    roster = replace(run.roster, present=present)
    again = "" if attempt == 1 else f" again {attempt}"
    if hasattr(plan.select, "probes"):
        inner = replace(run, arrays=model, roster=roster)
        probe(inner, fleet, plan.select, told_of(run, state, group, run.round + 1), f" {group}{again}")
        run.roster.figures |= roster.figures
    return chosen_by(plan.select, roster, run.round + 1, run.rng(f"select {group}{again}"))


def judged(run: Run, fleet: Fleet, plan: Plan, state: State) -> Row:
    """How the models do on their clients' own test data: means over clients, each counting the same."""
    here = set(fleet.clients())
    requests: dict[ClientId, Request] = {}
    for g, who in state.groups.members().items():
        model, config = part_of(run.arrays, g), told_of(run, state, g, run.round)
        requests |= {c: Request("evaluate", model, config) for c in who if c in here and plan.honest(c)}
    replies = check(fleet.ask(requests), fault_of_extras).replies if requests else {}
    row: Row = {}
    for name in ("accuracy", "accuracy_known", "loss"):
        values = [r.metrics[name] for r in replies.values() if name in r.metrics]
        if values:
            row[name] = float(np.mean(values))
    for c, reply in replies.items():
        run.roster.note(c, {f"own_{k}": v for k, v in reply.metrics.items() if k in row})
    for g, who in state.groups.members().items():
        own = [replies[c].metrics["accuracy"] for c in who if c in replies and "accuracy" in replies[c].metrics]
        if own:
            state.scores.setdefault(g, []).append((run.round, float(np.mean(own))))
            settle(state, g, plan)
    found = quality(state.groups, plan.truth)
    return row | {k: found[k] for k in ("groups", "rand") if k in found}


def settle(state: State, group: str, plan: Plan) -> None:
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
