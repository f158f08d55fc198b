"""One round, from who is there to the next model. This is the file to read first.

fleet.clients -> roster -> select -> requests -> fleet.ask -> check -> filter -> aggregate -> record
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mutirao.core.arrays import Arrays, flat, is_finite, nbytes
from mutirao.core.fleet import Answers, ClientId, Fleet, Reply, Request, Scalar
from mutirao.core.roster import Roster
from mutirao.core.rows import whole, whole_replies
from mutirao.errors import ConfigError, Diverged, TooFewClients, TooFewReplies
from mutirao.filters import Filter, check, fault_of_extras, faults, without
from mutirao.randomness import rng

log = logging.getLogger("mutirao")

Row = dict[str, Any]
Selector = Callable[[Roster, int, np.random.Generator], list[ClientId]]
Evaluate = Callable[[Arrays], Mapping[str, float]]


@dataclass(frozen=True)
class Merged:
    """The next model, the weight each client had in it, and what the method found out about each client."""

    arrays: Arrays
    weights: dict[ClientId, float]
    figures: dict[ClientId, dict[str, float]] = field(default_factory=dict)


class Aggregator(Protocol):
    """Joins checked replies into the next model; what it must remember it writes into `memory`."""

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model; arrays in `memory` are replaced, never changed in place."""
        ...


@dataclass
class Run:
    """All the server remembers between rounds; saved after each, so a run can go on after any end."""

    arrays: Arrays
    seed: int = 0
    round: int = 0
    roster: Roster = field(default_factory=Roster)
    history: list[Row] = field(default_factory=list)
    memory: Arrays = field(default_factory=dict)
    sites: Arrays = field(default_factory=dict)  # states of simulated sites

    def rng(self, purpose: str, client: ClientId = "") -> np.random.Generator:
        """Randomness for the round being made, from (seed, round, purpose, client)."""
        return rng(self.seed, self.round + 1, purpose, client)


@dataclass(frozen=True)
class Round:
    """What is recorded of a round: its line of history and one line for each client selected."""

    row: Row
    clients: list[Row]


@dataclass(frozen=True)
class Patience:
    """How much trouble a run takes before it ends: replies needed, tries a round, seconds to wait for clients."""

    min_replies: int | None = None  # None: half of the selected
    tries: int = 3
    wait: float = 60.0


def step(
    run: Run,
    fleet: Fleet,
    select: Selector,
    aggregate: Aggregator,
    *,
    tell: Mapping[str, Scalar] | None = None,
    filters: Sequence[Filter] = (),
    patience: Patience | None = None,
) -> Round:
    """Make one round: `run` moves on, and what happened is returned. If it fails, model and round stay as they were."""
    patience = patience or Patience()
    started, number = time.perf_counter(), run.round + 1
    config = {"seed": run.seed, "round": number, **told(tell or {}, aggregate, select)}
    down = up = 0
    probes: Row = {}
    rows: list[Row] = []
    for attempt in range(1, patience.tries + 1):
        gather(run.roster, fleet, patience.min_replies or 1, patience)
        again = "" if attempt == 1 else f" again {attempt}"
        if hasattr(select, "probes"):
            began = time.perf_counter()
            asked, answers = probe(run, fleet, select, config, again)
            sent, got = traffic(asked, answers)
            down, up = down + sent, up + got
            if asked:
                cost = {"probed": len(asked), "probe_bytes": sent + got, "probe_seconds": time.perf_counter() - began}
                probes = {k: v + probes.get(k, 0) for k, v in cost.items()}
        chosen = chosen_by(select, run.roster, number, run.rng(f"select{again}"))
        need = replies_needed(patience, len(chosen))
        requests = dict.fromkeys(chosen, Request("train", run.arrays, config))
        answers = fleet.ask(requests) if requests else Answers({}, {})
        answers = without(answers, faults(run.arrays, answers.replies))
        as_sent = getattr(aggregate, "takes_rows", False) and not filters
        replies = answers.replies if as_sent else whole_replies(run.arrays, answers.replies)
        replies, rejected = screened(filters, run.arrays, replies)
        sent, got = traffic(requests, answers)
        down, up = down + sent, up + got
        rows += rows_of(run, attempt, chosen, answers, rejected)
        if len(replies) >= need:
            break
        log.warning("round %d, try %d: %d usable replies, %d needed", number, attempt, len(replies), need)
        run.roster.mark(number, chosen, {})  # who was asked in vain is not the first to be asked again
    else:
        if 2 * sum(f.kind == "not_finite" for f in answers.failures.values()) > len(chosen):
            raise Diverged(f"diverged at round {number}: most clients' training gives NaN or infinity")
        raise TooFewReplies(
            f"round {number} failed {patience.tries} times: "
            f"{len(replies)} usable replies, {need} needed{reasons(rows)}",
            rows,
        )

    memory = dict(run.memory)  # a copy, so that a round that fails here leaves no half-written moments behind
    merged = aggregate(run.arrays, replies, memory)
    if not is_finite(merged.arrays):
        raise Diverged(
            f"diverged at round {number}: the global model holds NaN or infinity; try a smaller learning rate"
        )
    lengths = update_norms(run.arrays, replies) if "update_norm" in getattr(select, "watches", ()) else {}
    run.arrays, run.memory, run.round = merged.arrays, memory, number
    run.roster.mark(number, chosen, {c: r.n for c, r in replies.items()})
    found = {c: reply.metrics | lengths.get(c, {}) | merged.figures.get(c, {}) for c, reply in replies.items()}
    for c, figures in found.items():
        run.roster.hear(number, c, figures)
    for row in rows:
        if row["try"] == attempt and (c := row["client"]) in replies:
            row["weight"] = merged.weights.get(c, 0.0)
            row |= {k: v for k, v in found[c].items() if k not in row}  # a client's metric never overwrites our columns
    line = {
        "round": number,
        "seconds": time.perf_counter() - started,
        "selected": len(chosen),
        "replied": len(answers.replies),
        "failed": len(answers.failures),
        "rejected": len(rejected),
        "bytes_down": down,
        "bytes_up": up,
        **probes,
    }
    return Round(line | {f"train_{k}": v for k, v in mean_metrics(replies).items()}, rows)


def train(
    run: Run,
    fleet: Fleet,
    *,
    rounds: int,
    select: Selector,
    aggregate: Aggregator,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    tell: Mapping[str, Scalar] | None = None,
    filters: Sequence[Filter] = (),
    patience: Patience | None = None,
    expect: int = 1,
) -> Iterator[Round]:
    """Make rounds until `rounds` are done, yielding each; the caller records them, or just looks on."""
    patience = patience or Patience()
    gather(run.roster, fleet, expect, patience)
    while run.round < rounds:
        done = step(run, fleet, select, aggregate, tell=tell, filters=filters, patience=patience)
        if evaluate is not None and (run.round % evaluate_every == 0 or run.round == rounds):
            done.row.update(evaluate(run.arrays))
        run.history.append(done.row)
        yield done


def gather(roster: Roster, fleet: Fleet, needed: int, patience: Patience) -> None:
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
    if declare := getattr(fleet, "declare", None):
        declare(roster)  # a fleet may know how fast its clients are


def probe(
    run: Run, fleet: Fleet, select: Any, config: Mapping[str, Scalar], again: str
) -> tuple[dict[ClientId, Request], Answers]:
    """Ask the clients a selector wants to hear from first, and write what they say into the roster."""
    number = run.round + 1
    names = present_only(select, select.probes(run.roster, number, run.rng(f"probe{again}")), run.roster)
    if not names:
        return {}, Answers({}, {})
    plain = {k: v for k, v in config.items() if k != "extras"}  # those are for training
    asked = {c: Request("probe", run.arrays, {**plain, **getattr(select, "asks", {})}) for c in names}
    answers = check(fleet.ask(asked), fault_of_extras)
    for client, failure in answers.failures.items():
        log.warning("round %d: probe of %s %s", number, client, failure)
    for client, reply in answers.replies.items():
        run.roster.hear(number, client, reply.metrics)
    run.roster.probed(number, {c: r.n for c, r in answers.replies.items()})
    return asked, answers


def told(tell: Mapping[str, Scalar], *parts: object) -> dict[str, Scalar]:
    """What clients are told with a request to train: by the caller and by each part; the extras of all are joined."""
    tables = [tell, *(getattr(part, "tells", {}) for part in parts)]
    joined = {k: v for table in tables for k, v in table.items()}
    extras = [str(table["extras"]) for table in tables if table.get("extras")]
    return joined | ({"extras": ",".join(extras)} if extras else {})


def update_norms(current: Arrays, replies: Mapping[ClientId, Reply]) -> dict[ClientId, dict[str, float]]:
    """How far each client moved the model: |x_k - x|."""
    here = flat(current)
    ends = {c: flat(whole(current, r.arrays)) for c, r in replies.items()}
    return {c: {"update_norm": float(np.linalg.norm(end - here))} for c, end in ends.items()}


def replies_needed(patience: Patience, chosen: int) -> int:
    """How many usable replies make a round: as configured, or half of those selected."""
    if patience.min_replies and patience.min_replies > chosen:
        raise ConfigError(f"min_replies is {patience.min_replies}, but only {chosen} clients are selected a round")
    return patience.min_replies or (chosen + 1) // 2  # none if nobody was selected


def rows_of(
    run: Run, attempt: int, chosen: Sequence[ClientId], answers: Answers, rejected: Mapping[ClientId, str]
) -> list[Row]:
    """One line for each client selected; who is lost is also said in the log."""
    number, replies, last = run.round + 1, answers.replies, run.roster.last_selected
    for c, why in (answers.failures | dict(rejected)).items():
        log.warning("round %d: %s %s", number, c, why)
    return [
        {
            "round": number,
            "client": c,
            "try": attempt,
            "replied": int(c in replies),
            "n": replies[c].n if c in replies else 0,
            "weight": 0.0,
            "age": number - int(last[run.roster.row(c)]),
            "failure": str(answers.failures.get(c, "")),
            "rejected": rejected.get(c, ""),
        }
        for c in sorted(chosen)
    ]


def chosen_by(select: Selector, roster: Roster, number: int, rng: np.random.Generator) -> list[ClientId]:
    """Ask the selector, and refuse a choice that cannot be: nobody, a stranger, someone absent, someone twice."""
    chosen = select(roster, number, rng)
    if not chosen and not getattr(select, "may_be_nobody", False):
        raise ConfigError(f"{select!r} selected no client in round {number}")
    return present_only(select, chosen, roster)


def present_only(select: Selector, chosen: list[ClientId], roster: Roster) -> list[ClientId]:
    """Refuse, by name, a stranger, someone absent, someone twice."""
    for client in chosen:
        if not roster.knows(client):
            raise ConfigError(f"{select!r} selected {client!r}, whom nobody knows")
        if not roster.present[roster.row(client)]:
            raise ConfigError(f"{select!r} selected {client!r}, who is absent")
    if len(set(chosen)) < len(chosen):
        twice = next(c for c in chosen if chosen.count(c) > 1)
        raise ConfigError(f"{select!r} selected {twice!r} twice")
    return chosen


def screened(
    filters: Sequence[Filter], current: Arrays, replies: dict[ClientId, Reply]
) -> tuple[dict[ClientId, Reply], dict[ClientId, str]]:
    """Pass the replies through each filter in turn; say whom they dropped and why."""
    rejected: dict[ClientId, str] = {}
    for keep in filters:
        replies, dropped = keep(current, replies)
        rejected |= dropped
    return replies, rejected


def check_needs(provides: frozenset[str], *parts: object) -> None:
    """Refuse, before the first round, a part that needs what the clients do not provide."""
    for part in parts:
        for need in sorted(getattr(part, "needs", frozenset()) - provides):
            given = ", ".join(sorted(provides)) or "nothing"
            raise ConfigError(f"{part!r} needs {need!r} from the clients; this task provides {given}")


def mean_metrics(replies: Mapping[ClientId, Reply]) -> dict[str, float]:
    """Metrics averaged over the clients that sent them, weighted by their samples."""
    names = sorted({name for r in replies.values() for name in r.metrics})
    means = {}
    for name in names:
        sent = [(r.n, r.metrics[name]) for _, r in sorted(replies.items()) if name in r.metrics]
        total = sum(n for n, _ in sent)
        means[name] = float(sum(n / total * v for n, v in sent))
    return means


def traffic(requests: Mapping[ClientId, Request], answers: Answers) -> tuple[int, int]:
    """Bytes sent down and up, as the fleet counted them or as requests and replies hold them."""
    return answers.carried or (bytes_of_requests(requests), bytes_of_replies(answers))


def bytes_of_requests(requests: Mapping[ClientId, Request]) -> int:
    """Bytes sent down; all clients of a round get the same model, so it is measured once."""
    return len(requests) * nbytes(next(iter(requests.values())).arrays) if requests else 0


def bytes_of_replies(answers: Answers) -> int:
    """Bytes sent up in arrays, extras and metrics."""
    total = 0
    for reply in answers.replies.values():
        total += 8 * (len(reply.metrics) + 1)
        for value in (*reply.arrays.values(), *reply.extras.values()):
            total += value.nbytes
    return total


def reasons(rows: Sequence[Row]) -> str:
    """The first few reasons why clients of the last try are missing."""
    last = [r for r in rows if r["try"] == rows[-1]["try"] and (r["failure"] or r["rejected"])]
    text = "; ".join(f"{r['client']} {r['failure'] or 'rejected: ' + r['rejected']}" for r in last[:3])
    return f" ({text}{'; ...' if len(last) > 3 else ''})" if last else ""
