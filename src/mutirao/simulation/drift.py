"""Drift: clients of a simulation whose data change while training goes on, all at once or one after the other.

A drift is called as `(client, data, round, around) -> data`, with the data that the client began with and the number of
the round, so that it depends on nothing that happened before: a run that is resumed meets the same data. What it needs
of the others is in `around`. The test data of a client change with those it trains on; a common test set does not.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Site, Wrapper
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.randomness import rng

NOW = "now"  # under which a request tells the round, where it is not one of training


class DataChange(NamedTuple):
    """From which round a client has other data, and whose they would be."""

    round: int
    other: ClientId


@dataclass(frozen=True, eq=False)
class DriftContext:
    """What a drift may look at: all clients by name, the seed, and how many classes there are, if there are any."""

    population: Mapping[ClientId, Any]
    seed: int
    classes: int | None = None

    @cached_property
    def names(self) -> list[ClientId]:
        """The clients, sorted."""
        return sorted(self.population)

    @cached_property
    def _turns(self) -> dict["PartialDrift", dict[ClientId, DataChange]]:
        return {}

    def turns(self, drift: "PartialDrift") -> dict[ClientId, DataChange]:
        """Whose data change, and when: found once."""
        if drift not in self._turns:
            self._turns[drift] = drift.turns(self.names, self.seed)
        return self._turns[drift]


Drift = Callable[[ClientId, Any, int, DriftContext], Any]


def none(client: ClientId, data: Any, round: int, around: DriftContext) -> Any:
    """Data that do not change.

    >>> none("ana", "her data", 50, DriftContext({}, seed=0))
    'her data'
    """
    return data


@dataclass(frozen=True)
class PartialDrift:
    """A `share` of the clients, drawn, whose data change at round `at`, or one by one over the `over` rounds from it.

    Of m such clients the j-th (j = 0, 1, ...) changes at round at + floor(j over / m).
    """

    at: int = 10
    share: float = 0.5
    over: int = 1

    def __post_init__(self) -> None:
        if not (self.at >= 1 and 0 <= self.share <= 1 and self.over >= 1):
            raise ValueError("at and over must be at least 1, and share between 0 and 1")

    def turns(self, names: list[ClientId], seed: int) -> dict[ClientId, DataChange]:
        """When each of those clients changes, and who comes after it: the first after the last."""
        many = round(self.share * len(names))
        who = [names[i] for i in rng(seed, 0, "drift").permutation(len(names))[:many]]
        return {c: DataChange(self.at + j * self.over // many, who[(j + 1) % many]) for j, c in enumerate(who)}

    def has_turned(self, client: ClientId, round: int, around: DriftContext) -> bool:
        """Whether the client has other data by then."""
        turn = around.turns(self).get(client)
        return turn is not None and round >= turn.round


@dataclass(frozen=True)
class Swap(PartialDrift):
    """Clients get each other's data: each of the drawn clients gets what the next one started with.

    >>> around = DriftContext({"ana": "a", "bia": "b", "caio": "c", "davi": "d"}, seed=0)
    >>> [Swap(share=1.0, at=10)("ana", "a", round, around) for round in (9, 10)]  # from round 10 on another's data
    ['a', 'd']
    """

    def __call__(self, client: ClientId, data: Any, round: int, around: DriftContext) -> Any:
        if not self.has_turned(client, round, around):
            return data
        return around.population[around.turns(self)[client].other]


@dataclass(frozen=True)
class Rename(PartialDrift):
    """All class labels of a client are permuted, for each client in the same way: concept drift.

    >>> import torch
    >>> from mutirao import Samples
    >>> data = {"ana": Samples(torch.zeros(3, 1), torch.tensor([0, 1, 2]))}
    >>> around = DriftContext(data, seed=0, classes=3)
    >>> [Rename(share=1.0, at=10)("ana", data["ana"], round, around).y.tolist() for round in (9, 10)]
    [[0, 1, 2], [2, 0, 1]]
    """

    def __call__(self, client: ClientId, data: Any, round: int, around: DriftContext) -> Any:
        if not self.has_turned(client, round, around):
            return data
        return relabel(data, new_labels(around.classes or 0, around.seed))


NAMES: dict[str, Any] = {"none": none, "swap": Swap, "rename": Rename}


@lru_cache(maxsize=8)
def new_labels(classes: int, seed: int) -> tuple[int, ...]:
    """What each class is called after the drift: the next in an order drawn, so that none keeps its name."""
    order = rng(seed, 0, "drift names").permutation(classes)
    out = np.empty(classes, np.int64)
    out[order] = np.roll(order, -1)
    return tuple(out.tolist())


def relabel(data: Any, names: tuple[int, ...]) -> Any:
    """Samples, or those a client trains on and judges by, with their classes renamed."""
    from mutirao.training.samples import ClientData, Samples  # late: it brings torch

    if isinstance(data, ClientData):
        return replace(data, train=relabel(data.train, names), test=relabel(data.test, names))
    return Samples(data.x, relabelled(data.y, names), data.index)


@lru_cache(maxsize=8)
def relabelled(y: Any, names: tuple[int, ...]) -> Any:
    """Labels by their new names; made once for a storage that clients share."""
    import torch

    return torch.tensor(names)[y]


def check_drift(drift: Drift, around: DriftContext) -> None:
    """Refuse a drift that these clients cannot have, before the first round."""
    if not isinstance(drift, Swap | Rename):
        return
    if len(turns := around.turns(drift)) < (2 if isinstance(drift, Swap) else 1):
        least = "two have to change places" if isinstance(drift, Swap) else "nobody would change"
        raise ConfigError(f"drift.share: {drift.share:g} of {len(around.names)} clients is {len(turns)}; {least}")
    if isinstance(drift, Rename):
        from mutirao.training.measurements import is_classes
        from mutirao.training.samples import ClientData, Samples

        first = around.population[around.names[0]]
        if not around.classes or not isinstance(first, Samples | ClientData) or not is_classes(Samples.of(first).y):
            raise ConfigError("drift=rename: the clients of this task have no samples with classes; use swap")


class DriftHandler:
    """A handler whose clients have the data of the round that they are asked in."""

    def __init__(self, handler: AnyHandler, drift: Drift, around: DriftContext) -> None:
        self.handler, self.drift, self.around = as_handler(handler), drift, around
        self.provides, self.private, self.check = self.handler.provides, self.handler.private, self.handler.check
        self.schedule, self.agreed, self.agree = self.handler.schedule, self.handler.agreed, self.handler.agree
        self.many = None if self.handler.many is None else self._many

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer with the data of that round; what the client keeps is kept."""
        return self.handler(undated(request), self._site(request, site))

    def _many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        many = self.handler.many
        assert many is not None
        plain: dict[int, Request] = {}  # most clients of a round have one request, and so it stays
        for request in requests.values():
            plain.setdefault(id(request), undated(request))
        own = {c: self._site(requests[c], sites[c]) for c in requests}
        out: dict[ClientId, Reply | Failure] = dict(many({c: plain[id(r)] for c, r in requests.items()}, own))
        return out

    def _site(self, request: Request, site: Site) -> Site:
        now = int(request.config.get(NOW, request.config.get("round", 0)))
        return replace(site, data=self.drift(site.id, site.data, now, self.around))  # the very same state


def undated(request: Request) -> Request:
    """The request as the handler inside knows it."""
    if NOW not in request.config:
        return request
    return replace(request, config={k: v for k, v in request.config.items() if k != NOW})


class DriftFleet(Wrapper):
    """A fleet whose clients are told the round also where a request is not of one, such as a warm-up."""

    def __init__(self, fleet: Fleet, drift: Drift, run: Run) -> None:
        super().__init__(fleet)
        if fleet.is_remote():
            raise ConfigError("drift: it is a simulation's, and these clients are other parties with data of their own")
        self.drift, self.run = drift, run
        self.around = DriftContext(dict.fromkeys(fleet.clients()), run.seed)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask with the round being made told to those whose request does not say it."""
        dated: dict[int, Request] = {}
        for request in requests.values():
            if id(request) not in dated:
                says = bool(request.config.get("round", 0))
                config = {**request.config, **({} if says else {NOW: self.run.round + 1})}
                dated[id(request)] = request if says else replace(request, config=config)
        return self.fleet.ask({c: dated[id(r)] for c, r in requests.items()})

    def record(self, done: Round) -> None:
        """Add to the record of a round how many clients have other data than they began with."""
        if isinstance(self.drift, PartialDrift):
            turns = self.around.turns(self.drift).values()
            done.row["drifted"] = sum(turn.round <= self.run.round for turn in turns)
        self.fleet.record(done)


def groups_after(
    drift: Drift, truth: Mapping[ClientId, int], round: int, around: DriftContext
) -> dict[ClientId, int] | None:
    """Which clients are alike by then, given who was at first; None if the drift does not tell."""
    if drift is none:
        return dict(truth)
    if not isinstance(drift, Swap | Rename):
        return None
    turned = {c for c in truth if c in around.turns(drift) and drift.has_turned(c, round, around)}
    if isinstance(drift, Swap):
        return {c: truth[around.turns(drift)[c].other if c in turned else c] for c in truth}
    return {c: g + (1 + max(truth.values()) if c in turned else 0) for c, g in truth.items()}
