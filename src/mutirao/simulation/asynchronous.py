"""Clients that answer when they can: a round is made of the replies that are in, and the others go on.

A reply is `staleness` models old: so many were made since its client began. For methods that join updates it is carried
over to the current model, x + (x_k - x_start), so that any of them, and any filter, takes it for one of this round.
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
    """A fleet that makes no round wait for all: of `at_once` clients at work it takes the first `buffer` replies.

    Who is at work cannot be selected. With `rebases` False replies stay the models they are. What clients began with is
    kept in the run's memory if `keeps`: a simulation goes on in the middle, other parties are asked anew.
    """

    def __init__(
        self, fleet: Fleet, run: Run, buffer: int, at_once: int, *, rebases: bool = True, keeps: bool = True
    ) -> None:
        super().__init__(fleet)
        self.run, self.buffer, self.at_once, self.rebases, self.keeps = run, buffer, at_once, rebases, keeps
        fleet.stagger(buffer, at_once)
        awaited = fleet.awaited()
        self._began = {c: n for c, n in read_began(run.memory).items() if c in awaited}  # with which model each did
        self._models = {n: read_model(run.memory, n) for n in set(self._began.values())}
        self._seen: tuple[list[ClientId], frozenset[ClientId]] = [], frozenset()
        self._all: list[ClientId] = []

    def clients(self) -> list[ClientId]:
        """Who is there or at work; `declare` says who is at work. A new list whenever either changed."""
        here, awaited = self.fleet.clients(), self.fleet.awaited()
        if here is not self._seen[0] or awaited != self._seen[1]:
            self._seen, self._all = (here, awaited), sorted({*here, *awaited})
        return self._all

    def declare(self, roster: Roster) -> None:
        """Nobody who is at work is there to be selected."""
        self.fleet.declare(roster)
        roster.present[[roster.row(c) for c in self.fleet.awaited()]] = False

    def room(self) -> int:
        """How many clients a round may set to work: those who begin at once, and those who follow the first replies.

        When the last reply of the round is in, a model is made, and the next one begins with that.
        """
        return max(0, self.at_once - len(self.fleet.awaited())) + self.buffer - 1

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Set clients to work, in an order by lot, and return what is in next, each reply with its staleness."""
        if any(request.do != "train" for request in requests.values()):
            return self.fleet.ask(requests)
        now, names = self.run.round, sorted(requests)
        turns = rng(self.run.seed, now + 1, "turns").permutation(len(names))
        self._began |= dict.fromkeys(names, now)
        self._models |= {now: next(iter(requests.values())).arrays} if requests else {}
        answers = self.fleet.ask({names[i]: requests[names[i]] for i in turns})
        replies = {c: self._dated(c, reply) for c, reply in answers.replies.items()}
        awaited = self.fleet.awaited()
        self._began = {c: n for c, n in self._began.items() if c in awaited}
        self._models = {n: model for n, model in self._models.items() if n in self._began.values()}
        if self.keeps:
            others = {k: v for k, v in self.run.memory.items() if not k.startswith(PREFIX)}
            self.run.memory = others | write_began(self._began, self._models)
        return replace(answers, replies=replies)

    def _dated(self, client: ClientId, reply: Reply) -> Reply:
        """A reply with its staleness, carried over to the current model; what is wrong with it is for others to say."""
        began = self._began.get(client, self.run.round)
        start, staleness = self._models.get(began, self.run.arrays), self.run.round - began
        if fault(start, reply) is not None:
            return reply
        arrays = rebase(start, reply.arrays, self.run.arrays) if staleness and self.rebases else reply.arrays
        return replace(reply, arrays=arrays, metrics={**reply.metrics, STALENESS: float(staleness)})


class RefillingSelector:
    """So many clients as there is room for, chosen as the selector that `make` gives for that number does."""

    may_be_empty = True

    def __init__(self, make: Callable[[int], AnySelector], fleet: AsynchronousFleet) -> None:
        self.make, self.fleet = make, fleet
        self.needs = as_selector(make(1)).needs

    def __repr__(self) -> str:
        return repr(self.make(self.fleet.at_once))

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """Whom the selector wants to hear of first, if anybody can begin at all."""
        chosen = self._selector(roster)
        return chosen.probes(roster, round, rng) if chosen is not None else []

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        """Who begins in this round."""
        chosen = self._selector(roster)
        return chosen(roster, round, rng, *memory) if chosen is not None else []

    def _selector(self, roster: Roster) -> Selector | None:
        room = self.fleet.room()
        return as_selector(self.make(room)) if room and roster.present.any() else None


def rebase(start: Arrays, end: Arrays, current: Arrays) -> Arrays:
    """x + (x_k - x_start) name by name in float64; whole numbers are counted on, and what is true or false is taken."""
    end = to_dense(start, end)

    def move(name: str, x: Array) -> Array:
        kind, theirs = x.dtype.kind, np.asarray(end[name])
        if kind == "b":
            return theirs
        if kind in "iu":
            return np.asarray(x + (theirs - start[name]), x.dtype)
        wide = np.complex128 if kind == "c" else np.float64
        return cast_to(x + (theirs.astype(wide) - start[name]), x.dtype)

    return {name: move(name, x) for name, x in current.items()}


def write_began(began: Mapping[ClientId, int], models: Mapping[int, Arrays]) -> Arrays:
    """Who began with which model, and these models, as arrays for the run's memory."""
    out = {f"{PREFIX}{n}.{k}": v for n, model in models.items() for k, v in model.items()}
    return out | {BEGAN: np.frombuffer(json.dumps(dict(began)).encode(), np.uint8)}


def read_began(memory: Arrays) -> dict[ClientId, int]:
    """Who began with which model, as `write_began` put it there."""
    return dict(json.loads(memory[BEGAN].tobytes())) if BEGAN in memory else {}


def read_model(memory: Arrays, number: int) -> Arrays:
    """The model of that number."""
    prefix = f"{PREFIX}{number}."
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
