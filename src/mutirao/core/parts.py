"""The parts of a round: what each is called as, and what it may say of itself. A plain function is a part, too.

A part says once what it `needs`, and what clients are told, asked and watched for follows from that:

    metrics:NAME       a number that clients tell with their update, such as `metrics:entropy`
    extras:NAME        arrays that clients send beside it, never averaged, such as `extras:squared_errors`
    probe:NAME         a number that clients tell when they are asked before the selection
    replies:NAME       what the server finds in the replies: `update_norm`, `samples`, or their `rows` as they were sent
    replies:sketch     each client's update as a short vector; `replies:bias=10`: of the bias with ten entries
    replies:staleness  how many models were made since each client began; no round then waits for all of its clients
    replies:models     such late replies as they were trained, not as if begun from the current model
    replies:memory     of earlier rounds: a filter or selector that needs it is called with the run's memory, too
    config:NAME=VALUE  a setting that clients are told and must know, such as `config:mu=0.1`
    comes:NAME         arrays that go down with the model, of which clients must know what to do with them

A handler says what it `provides` in the same words, a setting without its value.
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

USUAL = {"loss", "accuracy"}  # told with every update, so that nobody has to ask for them

Screened = tuple[dict[ClientId, Reply], dict[ClientId, str]]  # the replies kept, and why each of the others was not
Many = Callable[[Mapping[ClientId, Request], Mapping[ClientId, Site]], Mapping[ClientId, Reply | Failure]]


@dataclass(frozen=True)
class Merged:
    """The next model, the weight each client had in it, and what the method found out about each client.

    >>> merged = Merged({"w": np.array([1.0])}, weights={"ana": 0.75, "bia": 0.25}, figures={"ana": {"risk": 0.1}})
    >>> merged.weights["ana"]  # it stands in clients.csv, and so do the figures
    0.75
    """

    arrays: Arrays
    weights: dict[ClientId, float]
    figures: dict[ClientId, dict[str, float]] = field(default_factory=dict)


# What may be given as a part: anything that can be called like one.
AnyHandler = Callable[[Request, Site], Reply]
AnySelector = Callable[..., list[ClientId]]  # (roster, round, rng), and memory if it needs that
AnyAggregator = Callable[[Arrays, Mapping[ClientId, Reply], Arrays], Merged]
AnyFilter = Callable[..., Screened]  # (current, replies), and memory if it needs that


class Handler(Protocol):
    """What a client does: `(request, site) -> reply`.

    Any function of a request and a site is one. What it can tell besides its update it says in `provides`:

    >>> def mean(request, site):
    ...     return Reply({"mean": np.array(site.data).mean(keepdims=True)}, metrics={"loss": 0.0}, n=len(site.data))
    >>> mean.provides = frozenset({"metrics:loss"})
    >>> mean(Request("train", {}), Site("ana", data=[1.0, 3.0])).arrays["mean"]
    array([2.])
    """

    @property
    def provides(self) -> frozenset[str]:
        """What it can tell, send and be told."""
        return frozenset()

    @property
    def many(self) -> Many | None:
        """The same answers for many clients at once, faster; None if it has no such way."""
        return None

    @property
    def private(self) -> bool:
        """Whether it sees to its clients' privacy by itself."""
        return False

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """How its learning rate goes from round to round; None if it has no such thing."""
        return None

    def agreed(self) -> Mapping[str, str]:
        """What all clients must have in common, by name and digest: see `mutirao.core.agreement`."""
        return {}

    def agree(self, request: Request, site: Site) -> None:
        """Refused if this site cannot keep to what came with a request to agree; digests are compared already."""

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """ConfigError if these clients cannot work on this model, before anything is done; it changes nothing."""

    def private_training(self, privacy: Any) -> AnyHandler:
        """The same with private gradients (DP-SGD)."""
        raise ConfigError("privacy=dpsgd is for tasks whose clients are a Trainer; privacy=local is for all")

    def personal_training(self, personal: Any) -> AnyHandler:
        """The same with a model of each client's own."""
        raise ConfigError(f"personal={personal.name} is for tasks whose clients are a Trainer; use none")

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        ...


class Selector(Protocol):
    """Who takes part in a round: `(roster, round, rng) -> clients`, of those present.

    One that needs `replies:memory` is given that as well, and writes into it as an aggregator does; a round that failed
    is selected for again, so that it may write the same twice.

    Any function of these three is one; this one takes whoever comes first by name:

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
        """Whether it may select no client at all, as Poisson sampling does now and then."""
        return False

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """Who is asked before the selection; the answers are in the roster when it selects."""
        return []

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        """The clients selected."""
        ...


class Aggregator(Protocol):
    """Joins checked replies into the next model: `(current, replies, memory) -> Merged`.

    What it must remember it writes into `memory`; arrays there are replaced, never changed in place.

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
        """Whether it looks at nothing but the mean update, so that noise on the mean covers all it gives away."""
        return False

    @property
    def fewest(self) -> int:
        """How many clients a round must ask so that what it promises can hold."""
        return 1

    def sends(self, current: Arrays, memory: Arrays) -> Arrays:
        """What goes down with the model besides it, as the extras of a request; it `needs` to say so, by `comes`."""
        return {}

    def buffer_of(self, at_once: int) -> int:
        """After how many replies a model is made while so many clients are at work; for what needs staleness."""
        return at_once

    def fault(self, reply: Reply) -> Failure | None:
        """What is wrong with a reply as far as only this method can tell, such as an error that cannot be."""
        return None

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model."""
        ...


class Filter(Protocol):
    """Keeps odd updates out: `(current, replies) -> (kept, reasons of the others)`.

    One that needs `replies:memory` is given that as well, and writes into it as an aggregator does.

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
        """The replies kept, and why each of the others was not."""
        ...


Kind = TypeVar("Kind")


class WithDefaults:
    """A part with all that its kind may say of itself: its own words, and the kind's defaults for the rest."""

    def __init__(self, part: Any, kind: type) -> None:
        self.part = part
        for name, default in vars(kind).items():
            if not name.startswith("_"):
                usual = default.__get__(part) if isinstance(default, property) else MethodType(default, part)
                setattr(self, name, getattr(part, name, usual))

    def __call__(self, *given: Any) -> Any:
        """What the part gives."""
        return self.part(*given)

    def __repr__(self) -> str:
        return repr(self.part)


def with_defaults(part: Any, kind: type[Kind]) -> Kind:
    """Anything that can be called like a part of that kind, as one: the only place where hooks are looked for."""
    return cast("Kind", part if isinstance(part, WithDefaults) else WithDefaults(part, kind))


def as_handler(part: AnyHandler) -> Handler:
    """A handler with all a fleet may want of it."""
    return with_defaults(part, Handler)  # type: ignore[type-abstract]


def as_selector(part: AnySelector) -> Selector:
    """A selector with all a round may want of it."""
    return with_defaults(part, Selector)  # type: ignore[type-abstract]


def as_aggregator(part: AnyAggregator) -> Aggregator:
    """An aggregator with all a round may want of it."""
    return with_defaults(part, Aggregator)  # type: ignore[type-abstract]


def as_filter(part: AnyFilter) -> Filter:
    """A filter with all a round may want of it."""
    return with_defaults(part, Filter)  # type: ignore[type-abstract]


def names_of(needs: Iterable[str], kind: str) -> set[str]:
    """The names of one kind among needs: `names_of({"metrics:loss"}, "metrics")` is `{"loss"}`."""
    return {need.partition(":")[2] for need in needs if need.startswith(f"{kind}:")}


def request_config(needs: Iterable[str], *kinds: str) -> dict[str, Scalar]:
    """What a request says so that its reply holds what is needed: settings, and the names of the given kinds."""
    needs = frozenset(needs)
    config: dict[str, Scalar] = {}
    for setting in sorted(names_of(needs, "config")):
        name, _, value = setting.partition("=")
        config[name] = parse_value(value)
    wanted = set().union(*(names_of(needs, kind) for kind in kinds)) - USUAL
    return config | ({"extras": ",".join(sorted(wanted))} if wanted else {})


def find_unmet(provides: Iterable[str], needs: Iterable[str]) -> list[str]:
    """The needs that clients who provide this cannot meet, without the values of settings."""
    given = set(provides)
    given |= {f"probe:{name}" for name in names_of(given, "metrics")}  # who tells it can be asked for it
    plain = {need.partition("=")[0] for need in needs}
    lacking = sorted(need for need in plain - given if not need.startswith("replies:"))
    return sorted(lacking, key=lambda need: need.startswith("config:"))  # what is told matters more than how


def check_needs(provides: Iterable[str], *parts: Selector | Aggregator | Filter) -> None:
    """Refuse, before the first round, a part that needs what the clients do not provide."""
    for part in parts:
        for need in find_unmet(provides, part.needs):
            given = ", ".join(sorted(provides)) or "nothing"
            raise ConfigError(f"{part!r} needs {need!r} from the clients; this task provides {given}")
