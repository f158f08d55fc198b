"""The parts of a round: how each is called, and what each may declare. A plain function is a part, too.

A part declares once what it `needs`. What clients are sent, asked for and measured by follows from that:

    metrics:NAME       a metric that clients report with their update, such as `metrics:entropy`
    extras:NAME        arrays that clients send besides it, never averaged, such as `extras:squared_errors`
    probe:NAME         a metric that clients report when they are asked before the selection
    replies:NAME       what the server finds in replies: `update_norm`, `samples`, or their `rows` as they were sent
    replies:sketch     each client's update as a short vector; `replies:bias=10`: of the bias with ten entries
    replies:staleness  how many models were made since each client began; rounds do not wait for all clients
    replies:models     such late replies as they were trained, not as if begun from the current model
    replies:memory     of earlier rounds: the filter or selector is called with the run's memory, too
    config:NAME=VALUE  a setting that clients are sent and must support, such as `config:mu=0.1`
    comes:NAME         arrays that are sent with the model, which clients must support

A handler declares what it `provides` in the same words, settings without their values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from mutirao.config import parse_value
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError

USUAL = {"loss", "accuracy"}  # reported with every update without being requested

Screened = tuple[dict[ClientId, Reply], dict[ClientId, str]]  # the replies kept, and why each other one was rejected
Many = Callable[[Mapping[ClientId, Request], Mapping[ClientId, Site]], Mapping[ClientId, Reply | Failure]]


@dataclass(frozen=True)
class Merged:
    """The next model, each client's weight in it, and what the method found about each client.

    >>> merged = Merged({"w": np.array([1.0])}, weights={"ana": 0.75, "bia": 0.25}, figures={"ana": {"risk": 0.1}})
    >>> merged.weights["ana"]  # a column of clients.csv, as are the figures
    0.75
    """

    arrays: Arrays
    weights: dict[ClientId, float]
    figures: dict[ClientId, dict[str, float]] = field(default_factory=dict)


# What users may pass as a part: anything that can be called like one.
AnyHandler = Callable[[Request, Site], Reply]
AnySelector = Callable[..., list[ClientId]]  # (roster, round, rng), and memory if it needs that
AnyAggregator = Callable[[Arrays, Mapping[ClientId, Reply], Arrays], Merged]
AnyFilter = Callable[..., Screened]  # (current, replies), and memory if it needs that


class Handler(Protocol):
    """What a client does: `(request, site) -> reply`.

    Any function of a request and a site is one. Metrics and extras that it can send are declared in `provides`:

    >>> def mean(request, site):
    ...     return Reply({"mean": np.array(site.data).mean(keepdims=True)}, metrics={"loss": 0.0}, n=len(site.data))
    >>> mean.provides = frozenset({"metrics:loss"})
    >>> mean(Request("train", {}), Site("ana", data=[1.0, 3.0])).arrays["mean"]
    array([2.])
    """

    @property
    def provides(self) -> frozenset[str]:
        """The metrics, extras and settings that it supports."""
        return frozenset()

    @property
    def many(self) -> Many | None:
        """The same answers for many clients at once, faster; None if not supported."""
        return None

    @property
    def private(self) -> bool:
        """Whether it protects its clients' privacy itself."""
        return False

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """Its learning rate by round; None if it has none."""
        return None

    def agreed(self) -> Mapping[str, str]:
        """What all clients must have in common, by name and digest: see `mutirao.core.agreement`."""
        return {}

    def agree(self, request: Request, site: Site) -> None:
        """Raise Refused if this site cannot use what was sent with a request to agree; digests are compared already."""

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """Raise ConfigError if these clients cannot train this model, before anything is done; nothing is changed."""

    def private_training(self, privacy: Any) -> AnyHandler:
        """The same handler with DP-SGD."""
        raise ConfigError("privacy=dpsgd is for tasks whose clients are a Trainer; privacy=local is for all")

    def personal_training(self, personal: Any) -> AnyHandler:
        """The same handler with personal models."""
        raise ConfigError(f"personal={personal.name} is for tasks whose clients are a Trainer; use none")

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        ...


class Selector(Protocol):
    """Selects the clients of a round: `(roster, round, rng) -> clients`, among those present.

    A selector that needs `replies:memory` also gets the memory, and writes into it as an aggregator does; it is called
    again for a round that failed, so it may write the same twice.

    Any function of these three is one; this one takes the first client by name:

    >>> def first(roster, round, rng):
    ...     return [roster.ids[i] for i in roster.here()[:1]]
    >>> roster = Roster()
    >>> roster.meet(["bia", "ana"])
    >>> first(roster, 1, np.random.default_rng(0))
    ['ana']
    """

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the clients."""
        return frozenset()

    @property
    def may_be_empty(self) -> bool:
        """Whether it may select no client, as Poisson sampling sometimes does."""
        return False

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """The clients that are asked before the selection; their answers are in the roster when it selects."""
        return []

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        """The clients selected."""
        ...


class Aggregator(Protocol):
    """Aggregates checked replies into the next model: `(current, replies, memory) -> Merged`.

    What it keeps between rounds it writes into `memory`; arrays there are replaced, never changed in place.

    Any function of these three is one; this one takes the largest value of each number:

    >>> def largest(current, replies, memory):
    ...     arrays = {name: np.max([r.arrays[name] for r in replies.values()], axis=0) for name in current}
    ...     return Merged(arrays, dict.fromkeys(replies, 1 / len(replies)))
    >>> replies = {"ana": Reply({"w": np.array([1.0, 5.0])}, n=1), "bia": Reply({"w": np.array([3.0, 2.0])}, n=1)}
    >>> largest({"w": np.zeros(2)}, replies, {}).arrays["w"]
    array([3., 5.])
    """

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the clients."""
        return frozenset()

    @property
    def mean_only(self) -> bool:
        """Whether it uses only the mean update, so that noise on the mean is enough for central privacy."""
        return False

    @property
    def fewest(self) -> int:
        """The number of clients that a round must have so that its guarantees hold."""
        return 1

    def sends(self, current: Arrays, memory: Arrays) -> Arrays:
        """The extras of a training request; they must be declared in `needs`, by `comes`."""
        return {}

    def buffer_of(self, at_once: int) -> int:
        """The number of replies that make a model while `at_once` clients are at work; for asynchronous methods."""
        return at_once

    def fault(self, reply: Reply) -> Failure | None:
        """Why this method cannot use a reply, such as an impossible error; None if it can."""
        return None

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model."""
        ...


class Filter(Protocol):
    """Rejects suspicious updates: `(current, replies) -> (kept, reasons of the others)`.

    A filter that needs `replies:memory` also gets the memory, and writes into it as an aggregator does.

    Any function of these two is one; this one drops clients with fewer than ten samples:

    >>> def enough(current, replies):
    ...     few = {c: f"has {r.n} samples" for c, r in replies.items() if r.n < 10}
    ...     return {c: r for c, r in replies.items() if c not in few}, few
    >>> enough({}, {"ana": Reply({}, n=3), "bia": Reply({}, n=50)})[1]
    {'ana': 'has 3 samples'}
    """

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the clients."""
        return frozenset()

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], *memory: Arrays) -> Screened:
        """The replies kept, and why each other one was rejected."""
        ...


Kind = TypeVar("Kind")


class WithDefaults:
    """A part with every attribute that its protocol has: its own ones, and the protocol's defaults for the rest."""

    def __init__(self, part: Any, kind: type) -> None:
        self.part = part
        for name, default in vars(kind).items():
            if not name.startswith("_"):
                usual = default.__get__(part) if isinstance(default, property) else MethodType(default, part)
                setattr(self, name, getattr(part, name, usual))

    def __call__(self, *given: Any) -> Any:
        """Call the part."""
        return self.part(*given)

    def __repr__(self) -> str:
        return repr(self.part)


def with_defaults(part: Any, kind: type[Kind]) -> Kind:
    """Any callable as a part of that protocol. This is the only place where optional attributes are looked up."""
    if not isinstance(part, WithDefaults):
        part = WithDefaults(part, kind)
    return cast("Kind", part)


def as_handler(part: AnyHandler) -> Handler:
    """A callable as a handler, with all its defaults."""
    return with_defaults(part, Handler)  # type: ignore[type-abstract]


def as_selector(part: AnySelector) -> Selector:
    """A callable as a selector, with all its defaults."""
    return with_defaults(part, Selector)  # type: ignore[type-abstract]


def as_aggregator(part: AnyAggregator) -> Aggregator:
    """A callable as an aggregator, with all its defaults."""
    return with_defaults(part, Aggregator)  # type: ignore[type-abstract]


def as_filter(part: AnyFilter) -> Filter:
    """A callable as a filter, with all its defaults."""
    return with_defaults(part, Filter)  # type: ignore[type-abstract]


def names_of(needs: Iterable[str], kind: str) -> set[str]:
    """The names of one kind among needs: `names_of({"metrics:loss"}, "metrics")` is `{"loss"}`."""
    return {need.partition(":")[2] for need in needs if need.startswith(f"{kind}:")}


def request_config(needs: Iterable[str], *kinds: str) -> dict[str, Scalar]:
    """The config of a request whose reply has what is needed: settings, and the extras of the given kinds."""
    needs = frozenset(needs)
    config: dict[str, Scalar] = {}
    for setting in sorted(names_of(needs, "config")):
        name, _, value = setting.partition("=")
        config[name] = parse_value(value)
    wanted = set().union(*(names_of(needs, kind) for kind in kinds)) - USUAL
    if wanted:
        config["extras"] = ",".join(sorted(wanted))
    return config


def find_unmet(provides: Iterable[str], needs: Iterable[str]) -> list[str]:
    """The needs that clients with these `provides` cannot meet, without the values of settings."""
    given = set(provides)
    given |= {f"probe:{name}" for name in names_of(given, "metrics")}  # a metric can also be requested in a probe
    plain = {need.partition("=")[0] for need in needs}
    lacking = sorted(need for need in plain - given if not need.startswith("replies:"))
    return sorted(lacking, key=lambda need: need.startswith("config:"))  # settings come last


def check_needs(provides: Iterable[str], *parts: Selector | Aggregator | Filter) -> None:
    """Refuse, before the first round, a part that needs what the clients do not provide."""
    for part in parts:
        for need in find_unmet(provides, part.needs):
            given = ", ".join(sorted(provides)) or "nothing"
            raise ConfigError(f"{part!r} needs {need!r} from the clients; this task provides {given}")
