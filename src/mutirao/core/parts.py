"""The parts of a round: how each is called, and what each may declare. A plain function is a part, too.

What a part needs of clients, and what a handler can do, is declared in the terms of `mutirao.core.needs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site
from mutirao.core.needs import Capabilities, Needs, as_needs, former_capabilities
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError

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

    Any function of a request and a site is one. Metrics and extras that it can send are its `capabilities`:

    >>> def mean(request, site):
    ...     return Reply({"mean": np.array(site.data).mean(keepdims=True)}, metrics={"loss": 0.0}, n=len(site.data))
    >>> mean.capabilities = Capabilities(metrics={"loss"})
    >>> mean(Request("train", {}), Site("ana", data=[1.0, 3.0])).arrays["mean"]
    array([2.])
    """

    @property
    def capabilities(self) -> Capabilities:
        """The metrics, extras and hyperparameters that it supports."""
        return former_capabilities(self)

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

    A selector that needs `Needs(server={"memory"})` also gets the memory, and writes into it as an aggregator does; it
    is called again for a round that failed, so it may write the same twice.

    Any function of these three is one; this one takes the first client by name:

    >>> def first(roster, round, rng):
    ...     return [roster.ids[i] for i in roster.here()[:1]]
    >>> roster = Roster()
    >>> roster.meet(["bia", "ana"])
    >>> first(roster, 1, np.random.default_rng(0))
    ['ana']
    """

    @property
    def needs(self) -> Needs:
        """What it needs of the clients."""
        return Needs()

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
    def needs(self) -> Needs:
        """What it needs of the clients."""
        return Needs()

    @property
    def mean_only(self) -> bool:
        """Whether it uses only the mean update, so that noise on the mean is enough for central privacy."""
        return False

    @property
    def fewest(self) -> int:
        """The number of clients that a round must have so that its guarantees hold."""
        return 1

    def sends(self, current: Arrays, memory: Arrays) -> Arrays:
        """The extras of a training request; they must be declared in `needs.request_extras`."""
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

    A filter that needs `Needs(server={"memory"})` also gets the memory, and writes into it as an aggregator does.

    Any function of these two is one; this one drops clients with fewer than ten samples:

    >>> def enough(current, replies):
    ...     few = {c: f"has {r.n} samples" for c, r in replies.items() if r.n < 10}
    ...     return {c: r for c, r in replies.items() if c not in few}, few
    >>> enough({}, {"ana": Reply({}, n=3), "bia": Reply({}, n=50)})[1]
    {'ana': 'has 3 samples'}
    """

    @property
    def needs(self) -> Needs:
        """What it needs of the clients."""
        return Needs()

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
                own: Any = getattr(part, name, usual)
                setattr(self, name, as_needs(own) if name == "needs" else own)

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


def check_needs(capabilities: Capabilities, *parts: Selector | Aggregator | Filter) -> None:
    """Refuse, before the first round, a part that needs what the clients are not capable of."""
    for part in parts:
        for need in capabilities.unmet(part.needs):
            raise ConfigError(
                f"{part!r} needs {need}, which the clients of this task do not support (they support {capabilities}); "
                "choose another method, or declare it in the capabilities of the handler"
            )
