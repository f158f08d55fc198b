"""Asynchronous rounds: the server aggregates the replies that have arrived, and the other clients go on training.

A reply's `staleness` is the number of models made since its client began. For methods that aggregate updates it is
rebased to the current model, x + (x_k - x_start), so that any aggregator and any filter can treat it as a fresh one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mutirao.core.arrays import Array, Arrays, cast_to
from mutirao.core.fleet import Answers, ClientId, Fleet, Reply, Request, Wrapper
from mutirao.core.parts import AnySelector, Selector, as_selector
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run
from mutirao.core.sparse_rows import to_dense
from mutirao.core.validation import fault
from mutirao.randomness import rng

PREFIX = "staggered."
BEGAN = PREFIX + "began"
STALENESS = "staleness"


class AsynchronousFleet(Wrapper):
    """A fleet with rounds that end with the first `buffer` replies of the `at_once` clients that are training.

    Clients that are training cannot be selected. With `rebases` False replies stay the models they are. The models that
    clients began with are kept in the run's memory if `keeps`: a simulation resumes with them, but remote clients of a
    resumed run are asked again.
    """

    def __init__(
        self, fleet: Fleet, run: Run, buffer: int, at_once: int, *, rebases: bool = True, keeps: bool = True
    ) -> None:
        super().__init__(fleet)
        self.run = run
        self.buffer = buffer
        self.at_once = at_once
        self.rebases = rebases
        self.keeps = keeps
        fleet.stagger(buffer, at_once)
        awaited = fleet.awaited()
        self._began = {c: n for c, n in read_began(run.memory).items() if c in awaited}  # the model each began with
        self._models = {n: read_model(run.memory, n) for n in set(self._began.values())}
        self._seen: tuple[list[ClientId], frozenset[ClientId]] = [], frozenset()
        self._all: list[ClientId] = []

    def clients(self) -> list[ClientId]:
        """All clients that are present or training; a new list whenever either changed."""
        here = self.fleet.clients()
        awaited = self.fleet.awaited()
        if here is not self._seen[0] or awaited != self._seen[1]:
            self._seen = here, awaited
            self._all = sorted({*here, *awaited})
        return self._all

    def declare(self, roster: Roster) -> None:
        """Mark the clients that are training as absent, so that they are not selected."""
        self.fleet.declare(roster)
        roster.present[[roster.row(c) for c in self.fleet.awaited()]] = False

    def room(self) -> int:
        """How many clients may be selected: those that begin at once, and those that follow the first replies.

        The last reply of a round completes a model; the client that follows it begins in the next round, with that.
        """
        return max(0, self.at_once - len(self.fleet.awaited())) + self.buffer - 1

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Let clients begin in a random order, and return the replies that arrive next, each with its staleness."""
        if any(request.do != "train" for request in requests.values()):
            return self.fleet.ask(requests)
        now = self.run.round
        names = sorted(requests)
        # In the order of names the same clients would always begin first, and reply first.
        order = rng(self.run.seed, now + 1, "turns").permutation(len(names))
        self._began |= dict.fromkeys(names, now)
        if requests:
            self._models[now] = next(iter(requests.values())).arrays
        answers = self.fleet.ask({names[i]: requests[names[i]] for i in order})
        replies = {c: self._dated(c, reply) for c, reply in answers.replies.items()}
        awaited = self.fleet.awaited()
        self._began = {c: n for c, n in self._began.items() if c in awaited}
        self._models = {n: model for n, model in self._models.items() if n in self._began.values()}
        if self.keeps:
            others = {k: v for k, v in self.run.memory.items() if not k.startswith(PREFIX)}
            self.run.memory = others | write_began(self._began, self._models)
        return replace(answers, replies=replies)

    def _dated(self, client: ClientId, reply: Reply) -> Reply:
        """A reply with its staleness, rebased to the current model; an invalid one is left for validation to reject."""
        began = self._began.get(client, self.run.round)
        start = self._models.get(began, self.run.arrays)
        staleness = self.run.round - began
        if fault(start, reply) is not None:
            return reply
        arrays = reply.arrays
        if staleness and self.rebases:
            arrays = rebase(start, reply.arrays, self.run.arrays)
        return replace(reply, arrays=arrays, metrics={**reply.metrics, STALENESS: float(staleness)})


class RefillingSelector:
    """Selects as many clients as there is room for, with the selector that `make(count)` builds."""

    may_be_empty = True

    def __init__(self, make: Callable[[int], AnySelector], fleet: AsynchronousFleet) -> None:
        self.make = make
        self.fleet = fleet
        self.needs = as_selector(make(1)).needs

    def __repr__(self) -> str:
        return repr(self.make(self.fleet.at_once))

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """The clients that the selector wants probed first, if there is room for any."""
        chosen = self._selector(roster)
        if chosen is not None:
            return chosen.probes(roster, round, rng)
        return []

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        """The clients that begin in this round."""
        chosen = self._selector(roster)
        if chosen is not None:
            return chosen(roster, round, rng, *memory)
        return []

    def _selector(self, roster: Roster) -> Selector | None:
        room = self.fleet.room()
        if room and roster.present.any():
            return as_selector(self.make(room))
        return None


def rebase(start: Arrays, end: Arrays, current: Arrays) -> Arrays:
    """x + (x_k - x_start) name by name in float64; integers are added up, and booleans are taken as they are."""
    end = to_dense(start, end)

    def move(name: str, x: Array) -> Array:
        kind = x.dtype.kind
        theirs = np.asarray(end[name])
        if kind == "b":
            return theirs
        # Exact: float64 cannot hold every integer of 64 bits.
        if kind in "iu":
            return np.asarray(x + (theirs - start[name]), x.dtype)
        wide = np.complex128 if kind == "c" else np.float64
        return cast_to(x + (theirs.astype(wide) - start[name]), x.dtype)

    return {name: move(name, x) for name, x in current.items()}


def write_began(began: Mapping[ClientId, int], models: Mapping[int, Arrays]) -> Arrays:
    """The number of the model each client began with, and these models, as arrays for the run's memory."""
    out = {f"{PREFIX}{n}.{k}": v for n, model in models.items() for k, v in model.items()}
    return out | {BEGAN: np.frombuffer(json.dumps(dict(began)).encode(), np.uint8)}


def read_began(memory: Arrays) -> dict[ClientId, int]:
    """The number of the model each client began with, as `write_began` stored it."""
    if BEGAN in memory:
        return dict(json.loads(memory[BEGAN].tobytes()))
    return {}


def read_model(memory: Arrays, number: int) -> Arrays:
    """The model of that number."""
    prefix = f"{PREFIX}{number}."
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
