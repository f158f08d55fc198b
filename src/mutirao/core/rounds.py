"""One round, from who is there to the next model. This is the file to read first.

fleet.clients -> roster -> select -> requests -> fleet.ask -> check -> filter -> aggregate -> record

A cohort is one model and those who train it: one cohort with everybody, as a rule, or one for each group of clients.
All cohorts of a round are asked at once.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mutirao.core.arrays import Arrays, as_part, is_finite, part_of
from mutirao.core.bounds import SIZE_CAP, faults_of_length
from mutirao.core.fleet import Answers, ClientId, Fleet, Reply, Request, traffic
from mutirao.core.group import Attempt, ClientConfig
from mutirao.core.group import Cohort as Cohort
from mutirao.core.group import Run as Run
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector, Merged, Selector, names_of
from mutirao.core.records import Round as Round
from mutirao.core.records import Row, reasons, who_is_lost
from mutirao.core.roster import Roster
from mutirao.core.update_figures import MEASURES, check_vectors, moves_of, vectors_of
from mutirao.core.validation import fault_of_extras, fault_of_merged, faults, set_aside, sift
from mutirao.errors import ConfigError, Diverged, TooFewClients, TooFewReplies

log = logging.getLogger("mutirao")

Evaluate = Callable[[Arrays], Mapping[str, float]]


@dataclass(frozen=True)
class Patience:
    """How much trouble a run takes before it ends: replies needed, tries a round, seconds to wait for clients."""

    min_replies: int | None = None  # None: half of the selected
    tries: int = 3
    wait: float = 60.0


def step(run: Run, fleet: Fleet, cohorts: Sequence[Cohort], *, patience: Patience | None = None) -> Round:
    """Make one round: `run` moves on, and what happened is returned. If it fails, model and round stay as they were.

    Of several cohorts, one that gets too few replies keeps its model this time.

    >>> import numpy as np
    >>> from mutirao import Cohort, LocalFleet, Reply
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import everyone
    >>> def mean(request, site):
    ...     return Reply({"mean": np.array([np.mean(site.data)])}, n=len(site.data))
    >>> run = Run({"mean": np.zeros(1)})
    >>> done = step(run, LocalFleet(mean, {"ana": [1.0, 2.0], "bia": [6.0]}), [Cohort(everyone, FedAvg())])
    >>> run.round, run.arrays["mean"]
    (1, array([3.]))
    """
    patience = patience or Patience()
    started, number = time.perf_counter(), run.round + 1
    down = up = 0
    probes: Row = {}
    rows: list[Row] = []
    tries: dict[str, Attempt] = {}  # the last of each cohort
    pending = list(cohorts)
    for attempt in range(1, patience.tries + 1):
        wait_for_clients(run.roster, fleet, patience.min_replies or 1 if len(cohorts) == 1 else 1, patience)
        pending = [cohort for cohort in pending if not cohort.name or cohort.roster(run.roster).present.any()]
        cost, sent, got = probe(run, fleet, pending, attempt)
        probes = {k: v + probes.get(k, 0) for k, v in cost.items()} or probes
        down, up = down + sent, up + got
        chosen = {cohort.name: choose(run, cohort, attempt) for cohort in pending}
        requests = {c: r for cohort in pending for c, r in cohort.requests(run, chosen[cohort.name]).items()}
        answers = fleet.ask(requests) if requests or fleet.awaited() else Answers({}, {})
        run.roster.sent(number, requests)
        sent, got = traffic(requests, answers)
        down, up = down + sent, up + got
        for cohort in pending:
            heard = who_came(chosen[cohort.name], answers, fleet.awaited()) if not cohort.name else chosen[cohort.name]
            tries[cohort.name] = made = sort_out(run, cohort, attempt, heard, answers, patience)
            rows += rows_of(run, made, alone=len(cohorts) == 1)
        pending = [cohort for cohort in pending if not tries[cohort.name].is_enough]
        if not pending:
            break
        for short in (tries[cohort.name] for cohort in pending):
            run.roster.mark(number, short.chosen, {})  # who was asked in vain is not the first to be asked again
            where = f"{short.cohort.name}: " if short.cohort.name else ""
            usable, need = len(short.replies), max(short.usable, short.answered)
            log.warning("round %d, try %d: %s%d usable replies, %d needed", number, attempt, where, usable, need)
    enough = [made for made in tries.values() if made.is_enough]
    if not enough:
        raise trouble(number, patience, list(tries.values()), rows)

    memory = dict(run.memory)  # a copy, so that a round that fails here leaves no half-written moments behind
    merged = {made.cohort.name: merge(run, made, memory) for made in enough}
    found = {c: figures for made in enough for c, figures in findings(run, made, merged[made.cohort.name]).items()}
    for made in enough:
        run.roster.mark(number, made.chosen, {c: r.n for c, r in made.replies.items()})
    run.roster.hear_all(number, found)
    for made in enough:
        keep_vectors(run, made)
    for name, result in merged.items():
        run.arrays = run.arrays | as_part(result.arrays, name) if name else result.arrays
    run.memory, run.round, run.sites = memory, number, fleet.snapshot()
    weights = {c: w for result in merged.values() for c, w in result.weights.items()}
    counted = {(c, made.number) for made in enough for c in made.replies}
    for row in rows:
        if (c := row["client"], row["try"]) in counted:
            row["weight"] = weights.get(c, 0.0)
            row |= {k: v for k, v in found[c].items() if k not in row}  # a client's metric never overwrites our columns
    last = tries.values()
    line = {
        "round": number,
        "seconds": time.perf_counter() - started,
        "selected": sum(len(made.chosen) for made in last),
        "replied": sum(len(made.answers.replies) for made in last),
        "failed": sum(len(made.answers.failures) for made in last),
        "rejected": sum(len(made.rejected) for made in last),
        "bytes_down": down,
        "bytes_up": up,
        **probes,
    }
    means = mean_metrics({c: r for made in enough for c, r in made.replies.items()})
    return Round(line | {f"train_{k}": v for k, v in means.items()}, rows)


def train(
    run: Run,
    fleet: Fleet,
    *,
    rounds: int,
    select: AnySelector,
    aggregate: AnyAggregator,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    config: ClientConfig | None = None,
    filters: Sequence[AnyFilter] = (),
    patience: Patience | None = None,
    expect: int = 1,
    size_cap: float = SIZE_CAP,
    metrics: Collection[str] | None = None,
) -> Iterator[Round]:
    """Make rounds until `rounds` are done, yielding each; the caller records them, or just looks on.

    Clients are sent `config`, such as {"lr": 0.01}, or what that gives for the round.

    >>> import numpy as np
    >>> from mutirao import LocalFleet, Reply
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import everyone
    >>> def halfway(request, site):  # from the model received towards the client's own number
    ...     return Reply({"w": (request.arrays["w"] + site.data) / 2}, n=1)
    >>> run = Run({"w": np.zeros(1)})
    >>> fleet = LocalFleet(halfway, {"ana": 2.0, "bia": 6.0})
    >>> [float(run.arrays["w"][0]) for _ in train(run, fleet, rounds=3, select=everyone, aggregate=FedAvg())]
    [2.0, 3.0, 3.5]
    """
    patience = patience or Patience()
    everybody = Cohort(select, aggregate, filters=filters, config=config, size_cap=size_cap, metrics=metrics)
    check_vectors(everybody.needs, run.arrays)
    start_run(run, fleet, expect, patience)
    while run.round < rounds:
        done = step(run, fleet, [everybody], patience=patience)
        if evaluate is not None and (run.round % evaluate_every == 0 or run.round == rounds):
            done.row.update(evaluate(run.arrays))
        fleet.record(done)
        run.history.append(done.row)
        yield done


def start_run(run: Run, fleet: Fleet, expect: int, patience: Patience) -> None:
    """Give simulated sites back the states that were saved with the run, and wait for the clients."""
    if run.sites:
        fleet.restore(run.sites)
    wait_for_clients(run.roster, fleet, expect, patience)


def wait_for_clients(roster: Roster, fleet: Fleet, needed: int, patience: Patience) -> None:
    """Bring the roster up to date, waiting a bounded time until `needed` clients are present."""
    deadline, said = time.monotonic() + patience.wait, False
    while len(here := fleet.clients()) < needed:
        if time.monotonic() >= deadline:
            names = ", ".join(here[:10]) or "nobody"
            raise TooFewClients(
                f"waited {patience.wait:g} s for {needed} clients, {len(here)} came: {names}; "
                f"start more clients or lower min_replies"
            )
        if not said:
            log.warning("waiting up to %g s for %d clients; %d so far", patience.wait, needed, len(here))
            said = True
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    roster.meet(here)
    fleet.declare(roster)


def purpose(what: str, cohort: Cohort, attempt: int) -> str:
    """What randomness is for: `select`, `select g1`, `select again 2`."""
    return what + (f" {cohort.name}" if cohort.name else "") + (f" again {attempt}" if attempt > 1 else "")


def probe(run: Run, fleet: Fleet, cohorts: Sequence[Cohort], attempt: int) -> tuple[Row, int, int]:
    """Ask the clients the selectors want to hear from first, and write what they say into the roster.

    What it cost, for the record, and how many bytes it took down and up.
    """
    started, number = time.perf_counter(), run.round + 1
    asked: dict[ClientId, Request] = {}
    for cohort in cohorts:
        roster, draw = cohort.roster(run.roster), run.rng(purpose("probe", cohort, attempt))
        names = check_choice(cohort.select, cohort.select.probes(roster, number, draw), roster)
        asked |= dict.fromkeys(names, cohort.request(run, "probe", "probe")) if names else {}
    if not asked:
        return {}, 0, 0
    answers, _ = cohorts[0].bound(run, sift(fleet.ask(asked), fault_of_extras))
    for client, failure in answers.failures.items():
        log.warning("round %d: probe of %s %s", number, client, failure)
    for client, reply in answers.replies.items():
        run.roster.hear(number, client, reply.metrics)
    run.roster.probed(number, {c: r.n for c, r in answers.replies.items()})
    down, up = traffic(asked, answers)
    seconds = time.perf_counter() - started
    return {"probed": len(asked), "probe_bytes": down + up, "probe_seconds": seconds}, down, up


def choose(run: Run, cohort: Cohort, attempt: int) -> list[ClientId]:
    """Whom the cohort's selector picks."""
    draw, own = run.rng(purpose("select", cohort, attempt)), part_of(run.memory, cohort.name)
    chosen = select_from(cohort.select, cohort.roster(run.roster), run.round + 1, draw, own)
    run.memory |= as_part(own, cohort.name)
    return chosen


def select_from(
    select: Selector, roster: Roster, number: int, draw: np.random.Generator, memory: Arrays
) -> list[ClientId]:
    """Ask a selector, and refuse a choice that cannot be: nobody, a stranger, someone absent, someone twice."""
    past = (memory,) if "replies:memory" in select.needs else ()
    chosen = select(roster, number, draw, *past)
    if not chosen and not select.may_be_empty:
        raise ConfigError(f"{select!r} selected no client in round {number}")
    return check_choice(select, chosen, roster)


def check_choice(select: Selector, chosen: list[ClientId], roster: Roster) -> list[ClientId]:
    """Refuse, by name, a stranger, someone absent, someone twice."""
    for client in chosen:
        if client not in roster:
            raise ConfigError(f"{select!r} selected {client!r}, whom nobody knows")
        if not roster.present[roster.row(client)]:
            raise ConfigError(f"{select!r} selected {client!r}, who is absent")
    if len(set(chosen)) < len(chosen):
        twice = next(c for c in chosen if chosen.count(c) > 1)
        raise ConfigError(f"{select!r} selected {twice!r} twice")
    return chosen


def who_came(chosen: list[ClientId], answers: Answers, awaited: Collection[ClientId]) -> list[ClientId]:
    """Those whose turn it was: all who were chosen, unless the fleet does not wait for all; then whoever was heard of.

    A client takes part in the round that its answer comes in, whenever it began.
    """
    earlier = sorted((answers.replies.keys() | answers.failures.keys()) - set(chosen))
    return [*(c for c in chosen if c not in awaited), *earlier]


def sort_out(
    run: Run, cohort: Cohort, attempt: int, chosen: list[ClientId], answers: Answers, patience: Patience
) -> Attempt:
    """Check and screen what the clients of one cohort have answered."""
    if cohort.name:
        mine = set(chosen)
        replies = {c: r for c, r in answers.replies.items() if c in mine}
        answers = Answers(replies, {c: f for c, f in answers.failures.items() if c in mine})
    current = part_of(run.arrays, cohort.name)
    answers = set_aside(answers, faults(current, answers.replies))
    answers = sift(set_aside(answers, faults_of_length(current, answers.replies)), cohort.aggregate.fault)
    answers, declared = cohort.bound(run, answers)
    noted = dict(part_of(run.memory, cohort.name))
    kept, rejected = cohort.screen(current, answers.replies, noted)
    usable = patience.min_replies or 1
    if patience.min_replies and usable > len(chosen) and not cohort.name:
        raise ConfigError(f"min_replies is {usable}, but only {len(chosen)} clients are selected a round")
    half = (len(chosen) + 1) // 2 if patience.min_replies is None else 0  # none if nobody was selected
    return Attempt(cohort, attempt, chosen, answers, kept, rejected, declared, min(usable, len(chosen)), half, noted)


def trouble(number: int, patience: Patience, tries: Sequence[Attempt], rows: list[Row]) -> Exception:
    """Why no model could be made in this round."""
    lost = [failure for made in tries for failure in made.answers.failures.values()]
    if 2 * sum(f.kind == "not_finite" for f in lost) > sum(len(made.chosen) for made in tries):
        return Diverged(
            f"diverged at round {number}: most clients' training gives NaN or infinity; try a smaller learning rate"
        )
    usable, need = sum(len(t.replies) for t in tries), sum(max(t.usable, t.answered) for t in tries)
    where = "" if len(tries) == 1 else " in every group"
    return TooFewReplies(
        f"round {number} failed {patience.tries} times{where}: {usable} usable replies, {need} needed{reasons(rows)}",
        rows,
    )


def merge(run: Run, made: Attempt, memory: Arrays) -> Merged:
    """Join the replies of a cohort; what the aggregator gives is checked as a reply is, and it is named."""
    cohort, current = made.cohort, part_of(run.arrays, made.cohort.name)
    own = part_of(memory, cohort.name)
    own |= made.noted
    merged = cohort.aggregate(current, made.replies, own)
    if (wrong := fault_of_merged(current, merged)) is not None:
        raise ConfigError(f"{cohort.aggregate!r} {wrong.reason}")
    if not is_finite(merged.arrays):
        whose = f"the model of {cohort.name}" if cohort.name else "the global model"
        raise Diverged(f"diverged at round {run.round + 1}: {whose} holds NaN or infinity; try a smaller learning rate")
    if cohort.name:
        memory |= as_part(own, cohort.name)
    return merged


def findings(run: Run, made: Attempt, merged: Merged) -> dict[ClientId, dict[str, float]]:
    """What is known of each client after the round: what it told, what the replies show and what the method found."""
    current, wanted = part_of(run.arrays, made.cohort.name), names_of(made.cohort.needs, "replies") & MEASURES.keys()
    seen = {c: dict[str, float]() for c in made.replies}
    if wanted and made.replies:
        moves = moves_of(current, made.replies)
        for name in sorted(wanted):
            for c, value in zip(made.replies, MEASURES[name](moves).tolist(), strict=True):
                seen[c][name] = value
    return {c: r.metrics | seen[c] | merged.figures.get(c, {}) for c, r in made.replies.items()}


def keep_vectors(run: Run, made: Attempt) -> None:
    """Put into the roster the vectors that the cohort's parts go by; before the model moves on."""
    current = part_of(run.arrays, made.cohort.name)
    for kind, found in vectors_of(made.cohort.needs, current, made.replies, run.seed).items():
        run.roster.keep(kind, found)


def rows_of(run: Run, made: Attempt, alone: bool) -> list[Row]:
    """One line for each client selected; who is lost is also said in the log."""
    number, replies, last = run.round + 1, made.answers.replies, run.roster.last_selected
    for line in who_is_lost(made.answers.failures | dict(made.rejected)):
        log.warning("round %d: %s", number, line)
    group = {"group": made.cohort.name} if made.cohort.name or not alone else {}
    return [
        {
            "round": number,
            "client": c,
            "try": made.number,
            "replied": int(c in replies),
            "n": replies[c].n if c in replies else 0,
            "weight": 0.0,
            "age": number - int(last[run.roster.row(c)]),
            "failure": str(made.answers.failures.get(c, "")),
            "rejected": made.rejected.get(c, ""),
            **group,
            **({"n_declared": made.declared[c]} if c in made.declared else {}),
        }
        for c in sorted(made.chosen)
    ]


def mean_metrics(replies: Mapping[ClientId, Reply]) -> dict[str, float]:
    """Metrics averaged over the clients that sent them, weighted by their samples."""
    names = sorted({name for r in replies.values() for name in r.metrics})
    means = {}
    for name in names:
        sent = [(r.n, r.metrics[name]) for _, r in sorted(replies.items()) if name in r.metrics]
        total = sum(n for n, _ in sent)
        means[name] = float(sum(n / total * v for n, v in sent))
    return means
