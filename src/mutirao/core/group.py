"""A run, and the groups that move it on: one model and the clients that train it, from selection to aggregation."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import numpy as np

from mutirao.core.arrays import Arrays, as_part, is_finite, part_of
from mutirao.core.fleet import Answers, ClientId, Reply, Request, Scalar
from mutirao.core.needs import USUAL, Needs
from mutirao.core.parts import (
    Aggregator,
    AnyAggregator,
    AnyFilter,
    AnySelector,
    Filter,
    Merged,
    Screened,
    Selector,
    as_aggregator,
    as_filter,
    as_selector,
)
from mutirao.core.records import Row
from mutirao.core.roster import Roster
from mutirao.core.sparse_rows import dense_replies
from mutirao.core.update_figures import MEASURES, moves_of, vectors_of
from mutirao.core.validation import SIZE_CAP, bound_answers, fault_of_merged, faults, faults_of_length, set_aside, sift
from mutirao.errors import ConfigError, Diverged
from mutirao.randomness import rng

log = logging.getLogger("mutirao")

# What clients are sent besides what the parts need: the same in every round, or a function of the round.
ClientConfig = Mapping[str, Scalar] | Callable[[int], Mapping[str, Scalar]]


@dataclass
class Run:
    """All that the server keeps between rounds. It is saved after each round, so a run can be resumed at any point.

    >>> run = Run({"w": np.zeros(2)}, seed=7)
    >>> run.round, run.rng("mine").random() == run.rng("mine").random()
    (0, True)
    """

    arrays: Arrays
    seed: int = 0
    round: int = 0
    roster: Roster = field(default_factory=Roster)
    history: list[Row] = field(default_factory=list)
    memory: Arrays = field(default_factory=dict)
    sites: Arrays = field(default_factory=dict)  # states of simulated sites, which no aggregator sees

    def rng(self, purpose: str, client: ClientId = "") -> np.random.Generator:
        """A random generator for the current round, from (seed, round, purpose, client)."""
        return rng(self.seed, self.round + 1, purpose, client)


class Group:
    """One model and the clients that train it, with a selector, filters and an aggregator.

    `name`: stands in front of the group's arrays and memory in the run, as `NAME/...`. Empty for an ordinary run.
    `members`: the clients of the group; None stands for all.
    `config`: what clients are sent besides what the parts need, or a function of the round that returns it.
    `address`: makes each client's own request from the common one.
    `size_cap`: a client counts for at most so many times the median number of samples; 0 is no limit.
    `metrics`: the metrics that clients may report; None accepts any that most of them report.

    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import AoIU
    >>> needs = Group(AoIU(5), FedAvg()).needs
    >>> needs.metrics, needs.config  # what the clients will be asked to report, and on how many samples
    (frozenset({'entropy'}), {'probe_samples': 100})
    """

    def __init__(
        self,
        select: AnySelector,
        aggregate: AnyAggregator,
        *,
        filters: Sequence[AnyFilter] = (),
        config: ClientConfig | None = None,
        name: str = "",
        members: Collection[ClientId] | None = None,
        address: Callable[[ClientId, Request], Request] | None = None,
        size_cap: float = SIZE_CAP,
        metrics: Collection[str] | None = None,
    ) -> None:
        self.select = as_selector(select)
        self.aggregate = as_aggregator(aggregate)
        self.filters = [as_filter(part) for part in filters]
        self.config = config if callable(config) else dict(config or {})
        self.name = name
        self.members = members
        self.address = address
        self.size_cap = size_cap
        self.metrics = metrics

    @property
    def parts(self) -> tuple[Selector | Aggregator | Filter, ...]:
        """The selector, the aggregator and the filters."""
        return (self.select, self.aggregate, *self.filters)

    @property
    def needs(self) -> Needs:
        """What the parts need of the clients, and the extras that `config` requests."""
        config = {} if callable(self.config) else self.config
        extras = {name for name in str(config.get("extras", "")).split(",") if name}
        return reduce(or_, (part.needs for part in self.parts), Needs(extras=extras))

    def roster(self, roster: Roster) -> Roster:
        """The roster with only the members present, as the selector sees it."""
        if self.members is None:
            return roster
        present = np.zeros(len(roster), np.bool_)
        rows = [roster.row(c) for c in self.members if c in roster]
        present[rows] = roster.present[rows]
        return replace(roster, present=present)

    def request(self, run: Run, do: str, requested: Collection[str]) -> Request:
        """The request common to all clients, to report these metrics and extras."""
        own = self.config(run.round + 1) if callable(self.config) else self.config
        if callable(self.config) and "extras" in own:
            raise ConfigError("config: extras must be the same in every round; give them in a dict, not in a function")
        config: dict[str, Scalar] = {"seed": run.seed, "round": run.round + 1}
        config |= {k: v for k, v in own.items() if k != "extras"}
        return Request(do, part_of(run.arrays, self.name), config | self.needs.request_config(requested))

    def requests(self, run: Run, selected: Sequence[ClientId]) -> dict[ClientId, Request]:
        """The training request of each selected client."""
        extras = self.aggregate.sends(part_of(run.arrays, self.name), part_of(run.memory, self.name))
        needs = self.needs
        common = replace(self.request(run, "train", {*needs.metrics, *needs.extras}), extras=extras)
        # One request for all unless `address` differs by client: fleets recognise it by identity and pack it once.
        requests = dict.fromkeys(selected, common)
        if self.address is not None:
            requests = {c: self.address(c, common) for c in selected}
        if "correct" in common.config:
            return {c: with_last_counted(run.roster, c, r) for c, r in requests.items()}
        return requests

    def bound(self, run: Run, answers: Answers) -> tuple[Answers, dict[ClientId, int]]:
        """The answers held to what one client may claim, and the number of samples that others declared."""
        needs = self.needs
        known = {*USUAL, *needs.metrics, *needs.probes, *(self.metrics or ())}
        if "staleness" in needs.server:
            known.add("staleness")
        strict = self.metrics is not None
        return bound_answers(answers, run.roster, run.round + 1, self.size_cap, known, strict)

    def screen(self, current: Arrays, replies: dict[ClientId, Reply], memory: Arrays) -> Screened:
        """Pass the replies through each filter in turn; return those kept and why each other one was rejected."""
        rejected: dict[ClientId, str] = {}
        if self.filters or "rows" not in self.aggregate.needs.server:
            replies = dense_replies(current, replies)
        for keep in self.filters:
            past = (memory,) if "memory" in keep.needs.server else ()
            replies, dropped = keep(current, replies, *past)
            rejected |= dropped
        return replies, rejected


def with_last_counted(roster: Roster, client: ClientId, request: Request) -> Request:
    """The request of a client, with the last round in which its update counted if a later one did not.

    SCAFFOLD and FedDyn keep state at the client that must match the server's. A reply that was lost, late or filtered
    has changed the client's state alone, and the client undoes that.
    """
    i = roster.row(client)
    if roster.last_selected[i] <= roster.last_replied[i]:
        return request
    return replace(request, config={**request.config, "counted": int(roster.last_replied[i])})


@dataclass(frozen=True)
class Attempt:
    """One attempt of a group to make a model: the clients it selected, what they answered and which replies count."""

    group: Group
    number: int
    selected: list[ClientId]
    answers: Answers
    replies: dict[ClientId, Reply]
    rejected: dict[ClientId, str]
    declared: dict[ClientId, int]  # samples of the clients that declared more than count
    min_usable: int  # replies that must be left after checks and filters
    min_answers: int  # clients that must have answered, filtered or not
    memory: Arrays  # the memory with what filters wrote; it takes effect if the round succeeds

    @property
    def is_enough(self) -> bool:
        """Whether there are enough replies to make a model."""
        return len(self.replies) >= self.min_usable and len(self.answers.replies) >= self.min_answers


def purpose_of(what: str, group: Group, attempt: int) -> str:
    """The purpose of random numbers, such as `select`, `select g1` or `select again 2`."""
    name = f" {group.name}" if group.name else ""
    again = f" again {attempt}" if attempt > 1 else ""
    return what + name + again


def select_clients(run: Run, group: Group, attempt: int) -> list[ClientId]:
    """The clients that the group's selector selects."""
    memory = part_of(run.memory, group.name)
    draw = run.rng(purpose_of("select", group, attempt))
    selected = run_selector(group.select, group.roster(run.roster), run.round + 1, draw, memory)
    run.memory |= as_part(memory, group.name)
    return selected


def run_selector(
    select: Selector, roster: Roster, number: int, draw: np.random.Generator, memory: Arrays
) -> list[ClientId]:
    """Call a selector and check what it returns; it must not be empty, unless the selector says it may be."""
    past = (memory,) if "memory" in select.needs.server else ()
    selected = select(roster, number, draw, *past)
    if not selected and not select.may_be_empty:
        raise ConfigError(f"{select!r} selected no client in round {number}")
    return check_selection(select, selected, roster)


def check_selection(select: Selector, selected: list[ClientId], roster: Roster) -> list[ClientId]:
    """Refuse a client that is unknown, absent or selected twice, by name."""
    for client in selected:
        if client not in roster:
            raise ConfigError(f"{select!r} selected unknown client {client!r}")
        if not roster.present[roster.row(client)]:
            raise ConfigError(f"{select!r} selected {client!r}, who is absent")
    if len(set(selected)) < len(selected):
        twice = next(c for c in selected if selected.count(c) > 1)
        raise ConfigError(f"{select!r} selected {twice!r} twice")
    return selected


def check_answers(
    run: Run, group: Group, number: int, selected: list[ClientId], answers: Answers, min_replies: int | None
) -> Attempt:
    """Check, bound and filter the answers of one group; `min_replies` None requires half of the selected clients."""
    if group.name:
        members = set(selected)
        replies = {c: r for c, r in answers.replies.items() if c in members}
        answers = Answers(replies, {c: f for c, f in answers.failures.items() if c in members})
    current = part_of(run.arrays, group.name)
    # Names, shapes, types and finiteness first: all later checks compute with the arrays.
    answers = set_aside(answers, faults(current, answers.replies))
    answers = set_aside(answers, faults_of_length(current, answers.replies))
    answers = sift(answers, group.aggregate.fault)
    answers, declared = group.bound(run, answers)
    memory = dict(part_of(run.memory, group.name))
    kept, rejected = group.screen(current, answers.replies, memory)
    min_usable = min_replies or 1
    if min_replies and min_usable > len(selected) and not group.name:
        raise ConfigError(f"min_replies is {min_usable}, but only {len(selected)} clients are selected a round")
    min_answers = 0
    if min_replies is None:
        min_answers = (len(selected) + 1) // 2
    min_usable = min(min_usable, len(selected))
    return Attempt(group, number, selected, answers, kept, rejected, declared, min_usable, min_answers, memory)


def aggregate(run: Run, attempt: Attempt, memory: Arrays) -> Merged:
    """The group's next model; what the aggregator returns is checked as a reply is."""
    group = attempt.group
    current = part_of(run.arrays, group.name)
    own = part_of(memory, group.name)
    own |= attempt.memory
    merged = group.aggregate(current, attempt.replies, own)
    if (wrong := fault_of_merged(current, merged)) is not None:
        raise ConfigError(f"{group.aggregate!r} {wrong.reason}")
    if not is_finite(merged.arrays):
        model = f"the model of {group.name}" if group.name else "the global model"
        raise Diverged(f"diverged at round {run.round + 1}: {model} holds NaN or infinity; try a smaller learning rate")
    if group.name:
        memory |= as_part(own, group.name)
    return merged


def client_figures(run: Run, attempt: Attempt, merged: Merged) -> dict[ClientId, dict[str, float]]:
    """What is known of each client after the round: its metrics, measures of its update, the aggregator's figures."""
    current = part_of(run.arrays, attempt.group.name)
    wanted = MEASURES.keys() & attempt.group.needs.server
    figures = {c: dict(r.metrics) for c, r in attempt.replies.items()}
    if wanted and attempt.replies:
        moves = moves_of(current, attempt.replies)
        for name in sorted(wanted):
            for c, value in zip(attempt.replies, MEASURES[name](moves).tolist(), strict=True):
                figures[c][name] = value
    return {c: known | merged.figures.get(c, {}) for c, known in figures.items()}


def store_vectors(run: Run, attempt: Attempt) -> None:
    """Put into the roster the vectors of updates that the group's parts need, before the model changes."""
    current = part_of(run.arrays, attempt.group.name)
    for kind, found in vectors_of(attempt.group.needs, current, attempt.replies, run.seed).items():
        run.roster.keep(kind, found)
