"""One round of federated learning, from the clients that are present to the next model. Start reading here.

    wait_for_clients    which clients are present?
    attempt             probe, select, ask, check and filter
    apply               aggregate the replies into the next model
    summarize           the record of the round

`train` repeats `step`, which calls these four. A group is one model and the clients that train it (`core/group.py`).
An ordinary run has one group with all clients; a clustered run has several, and requests go to all of them at once.
"""

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mutirao.core.arrays import Arrays, as_part
from mutirao.core.fleet import Answers, ClientId, Fleet, Reply, Request, traffic
from mutirao.core.group import (
    Attempt,
    ClientConfig,
    aggregate,
    check_answers,
    check_selection,
    client_figures,
    purpose_of,
    select_clients,
    store_vectors,
)
from mutirao.core.group import Group as Group
from mutirao.core.group import Run as Run
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector, Merged
from mutirao.core.records import Round as Round
from mutirao.core.records import Row, group_by_reason, reasons
from mutirao.core.roster import Roster
from mutirao.core.update_figures import check_vectors
from mutirao.core.validation import SIZE_CAP, fault_of_extras, sift
from mutirao.deprecation import REMOVED_IN
from mutirao.errors import Diverged, TooFewClients, TooFewReplies

log = logging.getLogger("mutirao")

Evaluate = Callable[[Arrays], Mapping[str, float]]


@dataclass(frozen=True)
class Patience:
    """When a run gives up: replies needed in a round, attempts a round, seconds to wait for clients."""

    min_replies: int | None = None  # None: half of the selected clients
    tries: int = 3
    wait: float = 60.0


@dataclass
class Progress:
    """What has happened in a round so far."""

    is_single: bool  # one group alone, as in an ordinary run
    started: float = field(default_factory=time.perf_counter)
    bytes_down: int = 0
    bytes_up: int = 0
    probes: Row = field(default_factory=dict)  # columns of the history: what probing has cost
    rows: list[Row] = field(default_factory=list)  # one for each selected client and attempt
    attempts: dict[str, Attempt] = field(default_factory=dict)  # the last attempt of each group, by the group's name


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
    tell: ClientConfig | None = None,  # the former name of `config`
) -> Iterator[Round]:
    """Train until `rounds` rounds are done, and yield the record of each.

    `config` is sent to clients with every request, such as {"lr": 0.01}; it may be a function of the round.

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
    if tell is not None:
        warnings.warn(
            f"train(tell=) is called config= now; it goes with {REMOVED_IN}", DeprecationWarning, stacklevel=2
        )
        config = tell
    group = Group(select, aggregate, filters=filters, config=config, size_cap=size_cap, metrics=metrics)
    check_vectors(group.needs, run.arrays)
    start_run(run, fleet, expect, patience)
    while run.round < rounds:
        done = step(run, fleet, [group], patience=patience)
        if evaluate is not None and (run.round % evaluate_every == 0 or run.round == rounds):
            done.row.update(evaluate(run.arrays))
        fleet.record(done)
        run.history.append(done.row)
        yield done


def step(run: Run, fleet: Fleet, groups: Sequence[Group], *, patience: Patience | None = None) -> Round:
    """Make one round: `run` gets the next model, and the record of the round is returned.

    If the round fails, the model and the round number stay as they were. Of several groups, one with too few replies
    keeps its model in this round.

    >>> import numpy as np
    >>> from mutirao import Group, LocalFleet, Reply
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import everyone
    >>> def mean(request, site):
    ...     return Reply({"mean": np.array([np.mean(site.data)])}, n=len(site.data))
    >>> run = Run({"mean": np.zeros(1)})
    >>> done = step(run, LocalFleet(mean, {"ana": [1.0, 2.0], "bia": [6.0]}), [Group(everyone, FedAvg())])
    >>> run.round, run.arrays["mean"]
    (1, array([3.]))
    """
    patience = patience or Patience()
    progress = Progress(is_single=len(groups) == 1)
    pending = list(groups)
    for number in range(1, patience.tries + 1):
        needed = 1
        if progress.is_single:
            needed = patience.min_replies or 1
        wait_for_clients(run.roster, fleet, needed, patience)
        pending = attempt(run, fleet, pending, number, patience, progress)
        if not pending:
            break
    successful = [made for made in progress.attempts.values() if made.is_enough]
    if not successful:
        raise round_failure(run.round + 1, patience, list(progress.attempts.values()), progress.rows)
    merged, figures = apply(run, fleet, successful)
    return summarize(run, progress, successful, merged, figures)


def attempt(
    run: Run,
    fleet: Fleet,
    groups: Sequence[Group],
    number: int,
    patience: Patience,
    progress: Progress,
) -> list[Group]:
    """Probe, select, ask, check and filter, for all these groups at once; return the groups with too few replies."""
    groups = [group for group in groups if not group.name or group.roster(run.roster).present.any()]
    probe(run, fleet, groups, number, progress)
    selected = {group.name: select_clients(run, group, number) for group in groups}
    requests: dict[ClientId, Request] = {}
    for group in groups:
        requests |= group.requests(run, selected[group.name])
    answers = Answers({}, {})
    if requests or fleet.awaited():
        answers = fleet.ask(requests)
    run.roster.sent(run.round + 1, requests)
    down, up = traffic(requests, answers)
    progress.bytes_down += down
    progress.bytes_up += up

    failed = []
    for group in groups:
        clients = selected[group.name]
        if not group.name:
            clients = clients_of_round(clients, answers, fleet.awaited())
        made = check_answers(run, group, number, clients, answers, patience.min_replies)
        progress.attempts[group.name] = made
        progress.rows += client_rows(run, made, progress.is_single)
        if not made.is_enough:
            failed.append(made)
    for made in failed:
        # Clients asked in vain count as selected, so that the next attempt does not prefer them for their age.
        run.roster.mark(run.round + 1, made.selected, {})
        where = f"{made.group.name}: " if made.group.name else ""
        usable = len(made.replies)
        needed = max(made.min_usable, made.min_answers)
        log.warning("round %d, try %d: %s%d usable replies, %d needed", run.round + 1, number, where, usable, needed)
    return [made.group for made in failed]


def apply(
    run: Run, fleet: Fleet, attempts: Sequence[Attempt]
) -> tuple[dict[str, Merged], dict[ClientId, dict[str, float]]]:
    """Aggregate the replies of each group and move the run on; return the results by group and figures by client."""
    number = run.round + 1
    # A copy, and arrays in it are never changed in place: a round that fails here leaves no half-written moments.
    memory = dict(run.memory)
    merged = {made.group.name: aggregate(run, made, memory) for made in attempts}
    figures: dict[ClientId, dict[str, float]] = {}
    for made in attempts:
        figures |= client_figures(run, made, merged[made.group.name])
    for made in attempts:
        run.roster.mark(number, made.selected, {c: r.n for c, r in made.replies.items()})
    run.roster.hear_all(number, figures)
    # Vectors are differences to the model that clients were sent, so they are taken before it is replaced.
    for made in attempts:
        store_vectors(run, made)
    for name, result in merged.items():
        if name:
            run.arrays = run.arrays | as_part(result.arrays, name)
        else:
            run.arrays = result.arrays
    run.memory = memory
    run.round = number
    run.sites = fleet.snapshot()
    return merged, figures


def summarize(
    run: Run,
    progress: Progress,
    successful: Sequence[Attempt],
    merged: Mapping[str, Merged],
    figures: Mapping[ClientId, Mapping[str, float]],
) -> Round:
    """The record of the round that was just made: a line of history and a row for each selected client."""
    weights: dict[ClientId, float] = {}
    for result in merged.values():
        weights |= result.weights
    replies: dict[ClientId, Reply] = {}
    attempt_of: dict[ClientId, int] = {}
    for made in successful:
        replies |= made.replies
        attempt_of |= dict.fromkeys(made.replies, made.number)
    for row in progress.rows:
        client = row["client"]
        if attempt_of.get(client) == row["try"]:
            row["weight"] = weights.get(client, 0.0)
            # A client's metric never overwrites a column of ours.
            row |= {k: v for k, v in figures[client].items() if k not in row}
    last = progress.attempts.values()
    line = {
        "round": run.round,
        "seconds": time.perf_counter() - progress.started,
        "selected": sum(len(made.selected) for made in last),
        "replied": sum(len(made.answers.replies) for made in last),
        "failed": sum(len(made.answers.failures) for made in last),
        "rejected": sum(len(made.rejected) for made in last),
        "bytes_down": progress.bytes_down,
        "bytes_up": progress.bytes_up,
        **progress.probes,
    }
    line |= {f"train_{k}": v for k, v in mean_metrics(replies).items()}
    return Round(line, progress.rows)


def start_run(run: Run, fleet: Fleet, expect: int, patience: Patience) -> None:
    """Restore the states of simulated sites that were saved with the run, and wait for `expect` clients."""
    if run.sites:
        fleet.restore(run.sites)
    wait_for_clients(run.roster, fleet, expect, patience)


def wait_for_clients(roster: Roster, fleet: Fleet, needed: int, patience: Patience) -> None:
    """Update the roster, after waiting at most `patience.wait` seconds until `needed` clients are present."""
    deadline = time.monotonic() + patience.wait
    is_announced = False
    while len(present := fleet.clients()) < needed:
        if time.monotonic() >= deadline:
            names = ", ".join(present[:10]) or "none"
            raise TooFewClients(
                f"waited {patience.wait:g} s for {needed} clients, {len(present)} came: {names}; "
                f"start more clients or lower min_replies"
            )
        if not is_announced:
            log.warning("waiting up to %g s for %d clients; %d so far", patience.wait, needed, len(present))
            is_announced = True
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    roster.meet(present)
    fleet.declare(roster)


def probe(run: Run, fleet: Fleet, groups: Sequence[Group], number: int, progress: Progress) -> None:
    """Ask the clients from which selectors need metrics first, and write their answers into the roster."""
    started = time.perf_counter()
    requests: dict[ClientId, Request] = {}
    for group in groups:
        roster = group.roster(run.roster)
        draw = run.rng(purpose_of("probe", group, number))
        clients = check_selection(group.select, group.select.probes(roster, run.round + 1, draw), roster)
        if clients:
            requests |= dict.fromkeys(clients, group.request(run, "probe", group.needs.probes))
    if not requests:
        return
    answers, _ = groups[0].bound(run, sift(fleet.ask(requests), fault_of_extras))
    for client, failure in answers.failures.items():
        log.warning("round %d: probe of %s %s", run.round + 1, client, failure)
    for client, reply in answers.replies.items():
        run.roster.hear(run.round + 1, client, reply.metrics)
    run.roster.probed(run.round + 1, {c: r.n for c, r in answers.replies.items()})
    down, up = traffic(requests, answers)
    progress.bytes_down += down
    progress.bytes_up += up
    cost = {"probed": len(requests), "probe_bytes": down + up, "probe_seconds": time.perf_counter() - started}
    for name, value in cost.items():
        progress.probes[name] = value + progress.probes.get(name, 0)


def clients_of_round(selected: list[ClientId], answers: Answers, awaited: Collection[ClientId]) -> list[ClientId]:
    """The clients that take part in this round: in an asynchronous run those with an answer that has arrived.

    A client takes part in the round in which its answer arrives, whenever it began. If the fleet waits for all, these
    are the selected clients.
    """
    earlier = sorted((answers.replies.keys() | answers.failures.keys()) - set(selected))
    return [*(c for c in selected if c not in awaited), *earlier]


def round_failure(
    number: int, patience: Patience, attempts: Sequence[Attempt], rows: list[Row]
) -> Diverged | TooFewReplies:
    """The error that says why no model could be made in this round."""
    not_finite = 0
    for made in attempts:
        not_finite += sum(failure.kind == "not_finite" for failure in made.answers.failures.values())
    if 2 * not_finite > sum(len(made.selected) for made in attempts):
        return Diverged(
            f"diverged at round {number}: most clients' training gives NaN or infinity; try a smaller learning rate"
        )
    usable = sum(len(made.replies) for made in attempts)
    needed = sum(max(made.min_usable, made.min_answers) for made in attempts)
    where = "" if len(attempts) == 1 else " in every group"
    return TooFewReplies(
        f"round {number} failed {patience.tries} times{where}: {usable} usable replies, {needed} needed{reasons(rows)}",
        rows,
    )


def client_rows(run: Run, made: Attempt, is_single: bool) -> list[Row]:
    """One row for each selected client; clients without a usable reply are also logged."""
    number = run.round + 1
    failures = made.answers.failures
    replies = made.answers.replies
    for line in group_by_reason(failures | dict(made.rejected)):
        log.warning("round %d: %s", number, line)
    rows = []
    for client in sorted(made.selected):
        row: Row = {
            "round": number,
            "client": client,
            "try": made.number,
            "replied": int(client in replies),
            "n": replies[client].n if client in replies else 0,
            "weight": 0.0,
            "age": number - int(run.roster.last_selected[run.roster.row(client)]),
            "failure": str(failures.get(client, "")),
            "rejected": made.rejected.get(client, ""),
        }
        if made.group.name or not is_single:
            row["group"] = made.group.name
        if client in made.declared:
            row["n_declared"] = made.declared[client]
        rows.append(row)
    return rows


def mean_metrics(replies: Mapping[ClientId, Reply]) -> dict[str, float]:
    """The mean of each metric over the clients that reported it, weighted by their numbers of samples."""
    names: set[str] = set()
    for reply in replies.values():
        names |= reply.metrics.keys()
    means = {}
    # Clients by name: replies arrive in any order, and the last bits of a sum depend on it.
    for name in sorted(names):
        sent = [(r.n, r.metrics[name]) for _, r in sorted(replies.items()) if name in r.metrics]
        total = sum(n for n, _ in sent)
        means[name] = float(sum(n / total * value for n, value in sent))
    return means
