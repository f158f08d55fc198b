"""Drift: the data of simulated clients change during training, all at once or one after the other.

A drift is called as `(client, data, round, context) -> data`, with the data that the client began with and the round.
It depends on nothing that happened before, so that a resumed run has the same data. `context` has what it
needs of other clients. A client's test data change with its training data; a common test set does not.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from mutirao.core.fleet import Answers, ClientId, Fleet, Request, Site, Wrapper
from mutirao.core.handler_wrapper import Forward, HandlerWrapper
from mutirao.core.parts import AnyHandler
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.randomness import rng

NOW = "now"  # the round in the configuration of a request that is not one of training


class DataChange(NamedTuple):
    """The round from which a client has other data, and the client it would get them from."""

    round: int
    other: ClientId


@dataclass(frozen=True, eq=False)
class DriftContext:
    """What a drift may use: all clients by name, the seed, and the number of classes, if there are any."""

    population: Mapping[ClientId, Any]
    seed: int
    classes: int | None = None

    @cached_property
    def names(self) -> list[ClientId]:
        """The clients, sorted."""
        return sorted(self.population)

    @cached_property
    def _changes(self) -> dict["PartialDrift", dict[ClientId, DataChange]]:
        return {}

    def changes(self, drift: "PartialDrift") -> dict[ClientId, DataChange]:
        """The clients with data that change, and when; computed once."""
        if drift not in self._changes:
            self._changes[drift] = drift.changes(self.names, self.seed)
        return self._changes[drift]


Drift = Callable[[ClientId, Any, int, DriftContext], Any]


def none(client: ClientId, data: Any, round: int, context: DriftContext) -> Any:
    """Data that do not change.

    >>> none("ana", "her data", 50, DriftContext({}, seed=0))
    'her data'
    """
    return data


@dataclass(frozen=True)
class PartialDrift:
    """A random `share` of the clients changes data at round `at`, or one by one over the `over` rounds from it.

    Of m such clients the j-th (j = 0, 1, ...) changes at round at + floor(j over / m).
    """

    at: int = 10
    share: float = 0.5
    over: int = 1

    def __post_init__(self) -> None:
        if not (self.at >= 1 and 0 <= self.share <= 1 and self.over >= 1):
            raise ValueError("at and over must be at least 1, and share between 0 and 1")

    def changes(self, names: list[ClientId], seed: int) -> dict[ClientId, DataChange]:
        """When each of these clients changes, and the next client, the first coming after the last."""
        count = round(self.share * len(names))
        sampled = [names[i] for i in rng(seed, 0, "drift").permutation(len(names))[:count]]
        changes = {}
        for j, client in enumerate(sampled):
            changes[client] = DataChange(self.at + j * self.over // count, sampled[(j + 1) % count])
        return changes

    def has_changed(self, client: ClientId, round: int, context: DriftContext) -> bool:
        """Whether the client has other data by then."""
        change = context.changes(self).get(client)
        return change is not None and round >= change.round


@dataclass(frozen=True)
class Swap(PartialDrift):
    """Clients swap data: each of the sampled clients gets the data that the next one started with.

    >>> context = DriftContext({"ana": "a", "bia": "b", "caio": "c", "davi": "d"}, seed=0)
    >>> [Swap(share=1.0, at=10)("ana", "a", round, context) for round in (9, 10)]  # from round 10 on another's data
    ['a', 'd']
    """

    def __call__(self, client: ClientId, data: Any, round: int, context: DriftContext) -> Any:
        if not self.has_changed(client, round, context):
            return data
        return context.population[context.changes(self)[client].other]


@dataclass(frozen=True)
class Rename(PartialDrift):
    """All class labels of a client are permuted, in the same way for each client: concept drift.

    >>> import torch
    >>> from mutirao import Samples
    >>> data = {"ana": Samples(torch.zeros(3, 1), torch.tensor([0, 1, 2]))}
    >>> context = DriftContext(data, seed=0, classes=3)
    >>> [Rename(share=1.0, at=10)("ana", data["ana"], round, context).y.tolist() for round in (9, 10)]
    [[0, 1, 2], [2, 0, 1]]
    """

    def __call__(self, client: ClientId, data: Any, round: int, context: DriftContext) -> Any:
        if not self.has_changed(client, round, context):
            return data
        return relabel(data, new_labels(context.classes or 0, context.seed))


NAMES: dict[str, Any] = {"none": none, "swap": Swap, "rename": Rename}


@lru_cache(maxsize=8)
def new_labels(classes: int, seed: int) -> tuple[int, ...]:
    """The label of each class after the drift: the next in a random order, so that none stays the same."""
    order = rng(seed, 0, "drift names").permutation(classes)
    out = np.empty(classes, np.int64)
    out[order] = np.roll(order, -1)
    return tuple(out.tolist())


def relabel(data: Any, names: tuple[int, ...]) -> Any:
    """Samples, or a client's training and test samples, with their classes relabelled."""
    from mutirao.training.samples import ClientData, Samples  # late: it brings torch

    if isinstance(data, ClientData):
        return replace(data, train=relabel(data.train, names), test=relabel(data.test, names))
    return Samples(data.x, relabelled(data.y, names), data.index)


@lru_cache(maxsize=8)
def relabelled(y: Any, names: tuple[int, ...]) -> Any:
    """The new labels; computed once for a storage that clients share."""
    import torch

    return torch.tensor(names)[y]


def check_drift(drift: Drift, context: DriftContext) -> None:
    """Refuse a drift that is not possible for these clients, before the first round."""
    if not isinstance(drift, Swap | Rename):
        return
    count = len(context.changes(drift))
    needed = 2 if isinstance(drift, Swap) else 1
    if count < needed:
        share = f"{drift.share:g} of {len(context.names)} clients is {count}"
        raise ConfigError(f"drift.share: {share}, and this drift needs at least {needed}")
    if isinstance(drift, Rename):
        from mutirao.training.measurements import is_classes
        from mutirao.training.samples import ClientData, Samples

        first = context.population[context.names[0]]
        if not context.classes or not isinstance(first, Samples | ClientData) or not is_classes(Samples.of(first).y):
            raise ConfigError("drift=rename: the clients of this task have no samples with classes; use swap")


class DriftHandler(HandlerWrapper):
    """A handler that gives its clients the data of the current round; their state is unchanged by drift."""

    def __init__(self, handler: AnyHandler, drift: Drift, context: DriftContext) -> None:
        super().__init__(handler)
        self.drift = drift
        self.context = context

    def rewrite(self, request: Request) -> Request:
        """The request without the round that the fleet added."""
        if NOW not in request.config:
            return request
        return replace(request, config={k: v for k, v in request.config.items() if k != NOW})

    def before(self, request: Request, site: Site) -> Forward:
        """The client with its data of this round."""
        now = int(request.config.get(NOW, request.config.get("round", 0)))
        return Forward(replace(site, data=self.drift(site.id, site.data, now, self.context)))


class DriftFleet(Wrapper):
    """A fleet that adds the current round to requests that do not have it, such as a warm-up."""

    def __init__(self, fleet: Fleet, drift: Drift, run: Run) -> None:
        super().__init__(fleet)
        if fleet.is_remote():
            raise ConfigError("drift: only simulated clients can drift, and these are remote; use drift=none")
        self.drift = drift
        self.run = run
        self.context = DriftContext(dict.fromkeys(fleet.clients()), run.seed)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask, with the current round in the requests that lack it."""
        dated: dict[int, Request] = {}
        for request in requests.values():
            if request.config.get("round", 0):
                dated[id(request)] = request
            elif id(request) not in dated:
                dated[id(request)] = replace(request, config={**request.config, NOW: self.run.round + 1})
        return self.fleet.ask({c: dated[id(r)] for c, r in requests.items()})

    def record(self, done: Round) -> None:
        """Add to the record of a round how many clients have other data than at the start."""
        if isinstance(self.drift, PartialDrift):
            changes = self.context.changes(self.drift).values()
            done.row["drifted"] = sum(change.round <= self.run.round for change in changes)
        self.fleet.record(done)


def groups_after(
    drift: Drift, truth: Mapping[ClientId, int], round: int, context: DriftContext
) -> dict[ClientId, int] | None:
    """The true group of each client in that round, given the first ones; None if the drift does not define it."""
    if drift is none:
        return dict(truth)
    if not isinstance(drift, Swap | Rename):
        return None
    changed = {c for c in truth if c in context.changes(drift) and drift.has_changed(c, round, context)}
    after = dict(truth)
    for client in changed:
        if isinstance(drift, Swap):
            after[client] = truth[context.changes(drift)[client].other]
        else:
            # With other labels a group becomes a new one, numbered after the first ones.
            after[client] = truth[client] + 1 + max(truth.values())
    return after
