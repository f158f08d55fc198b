"""A run, and the cohorts that move it on: one model and those who train it, and how they fared when they were asked."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mutirao.core.arrays import Arrays, part_of
from mutirao.core.bounds import SIZE_CAP, hold_to_bounds
from mutirao.core.fleet import Answers, ClientId, Reply, Request, Scalar
from mutirao.core.parts import (
    USUAL,
    Aggregator,
    AnyAggregator,
    AnyFilter,
    AnySelector,
    Filter,
    Screened,
    Selector,
    as_aggregator,
    as_filter,
    as_selector,
    names_of,
    request_config,
)
from mutirao.core.records import Row
from mutirao.core.roster import Roster
from mutirao.core.sparse_rows import dense_replies
from mutirao.errors import ConfigError
from mutirao.randomness import rng

# What clients are sent besides what the parts need, maybe round by round.
ClientConfig = Mapping[str, Scalar] | Callable[[int], Mapping[str, Scalar]]


@dataclass
class Run:
    """All the server remembers between rounds; saved after each, so a run can go on after any end.

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
    sites: Arrays = field(default_factory=dict)  # states of simulated sites, which reach no aggregator

    def rng(self, purpose: str, client: ClientId = "") -> np.random.Generator:
        """Randomness for the round being made, from (seed, round, purpose, client)."""
        return rng(self.seed, self.round + 1, purpose, client)


class Cohort:
    """One model and who trains it, how they are selected, and how their replies are screened and joined.

    A cohort with a `name` is a group: its model and its memory lie in the run's as `NAME/...`. `members` None is
    everybody. Clients are sent `config`, or what that gives for the round, besides what the parts need; `address` makes
    each client's own request of the common one. A client counts for at most `size_cap` times the median samples (0: for
    as many as it says). `metrics` are those that clients may tell; None: any that most of them do.

    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import AoIU
    >>> sorted(Cohort(AoIU(5), FedAvg()).needs)  # what the clients will be asked to report
    ['config:probe_samples=100', 'metrics:entropy']
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
        self.select, self.aggregate = as_selector(select), as_aggregator(aggregate)
        self.filters = [as_filter(part) for part in filters]
        self.config = config if callable(config) else dict(config or {})
        self.name, self.members, self.address = name, members, address
        self.size_cap, self.metrics = size_cap, metrics

    @property
    def parts(self) -> tuple[Selector | Aggregator | Filter, ...]:
        """Its selector, aggregator and filters."""
        return (self.select, self.aggregate, *self.filters)

    @property
    def needs(self) -> set[str]:
        """What its parts need of the clients, and what they are to send besides."""
        told = {} if callable(self.config) else self.config
        besides = {f"extras:{name}" for name in str(told.get("extras", "")).split(",") if name}
        return besides.union(*(part.needs for part in self.parts))

    def bound(self, run: Run, answers: Answers) -> tuple[Answers, dict[ClientId, int]]:
        """What its clients answered, held to what one of them may claim; and the samples of who claimed more."""
        needs = self.needs
        ours = names_of(needs, "replies") & {"staleness"}
        known = USUAL | ours | names_of(needs, "metrics") | names_of(needs, "probe") | set(self.metrics or ())
        strict = self.metrics is not None
        return hold_to_bounds(answers, run.roster, run.round + 1, self.size_cap, known, strict)

    def roster(self, roster: Roster) -> Roster:
        """What its selector sees: the roster as if nobody but its members were here."""
        if self.members is None:
            return roster
        present = np.zeros(len(roster), np.bool_)
        rows = [roster.row(c) for c in self.members if c in roster]
        present[rows] = roster.present[rows]
        return replace(roster, present=present)

    def request(self, run: Run, do: str, *kinds: str) -> Request:
        """What its clients are asked to do, with the settings that make them tell the needs of these kinds."""
        said = self.config(run.round + 1) if callable(self.config) else self.config
        if callable(self.config) and "extras" in said:
            raise ConfigError("config: what clients send besides is the same in every round; name extras in a mapping")
        told = {k: v for k, v in said.items() if k != "extras"} | request_config(self.needs, *kinds)
        config = {"seed": run.seed, "round": run.round + 1, **told}
        return Request(do, part_of(run.arrays, self.name), config)

    def requests(self, run: Run, chosen: Sequence[ClientId]) -> dict[ClientId, Request]:
        """What each client selected is asked."""
        sent = self.aggregate.sends(part_of(run.arrays, self.name), part_of(run.memory, self.name))
        common = replace(self.request(run, "train", "metrics", "extras"), extras=sent)
        asked = {c: common if self.address is None else self.address(c, common) for c in chosen}
        return {c: remind(run.roster, c, r) for c, r in asked.items()} if "correct" in common.config else asked

    def screen(self, current: Arrays, replies: dict[ClientId, Reply], memory: Arrays) -> Screened:
        """Pass the replies through each filter in turn; say whom they dropped and why."""
        rejected: dict[ClientId, str] = {}
        if self.filters or "replies:rows" not in self.aggregate.needs:
            replies = dense_replies(current, replies)
        for keep in self.filters:
            past = (memory,) if "replies:memory" in keep.needs else ()
            replies, dropped = keep(current, replies, *past)
            rejected |= dropped
        return replies, rejected


def remind(roster: Roster, client: ClientId, request: Request) -> Request:
    """The request as one gets it who was asked since its update last counted: it is told when that was.

    What a client keeps and what the server has of it must be of the same updates. A reply that was lost, late or
    screened has changed the one and not the other, and the client undoes it.
    """
    i = roster.row(client)
    if roster.last_selected[i] <= roster.last_replied[i]:
        return request
    return replace(request, config={**request.config, "counted": int(roster.last_replied[i])})


@dataclass(frozen=True)
class Attempt:
    """How a cohort fared when it was asked: whom it selected, what they answered, and which replies count."""

    cohort: Cohort
    number: int
    chosen: list[ClientId]
    answers: Answers
    replies: dict[ClientId, Reply]
    rejected: dict[ClientId, str]
    declared: dict[ClientId, int]  # the samples of those who declared more than count
    usable: int  # replies that must be left
    answered: int  # clients that must have answered: whom a filter dropped has done so all the same
    noted: Arrays  # the memory with what the filters wrote into it, which holds if a model is made

    @property
    def is_enough(self) -> bool:
        """Whether a model can be made of it."""
        return len(self.replies) >= self.usable and len(self.answers.replies) >= self.answered
