"""The in-process fleet: thousands of virtual clients on one machine."""

import copy
import json
import logging
import queue
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.cpu_threads import one_thread
from mutirao.core.fleet import FLEETING, Answers, ClientId, Failure, Fleet, Reply, Request, Site, collect, failure_of
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.errors import Damaged
from mutirao.simulation.client_states import ClientStates

log = logging.getLogger("mutirao")

ANSWER = (Reply, Failure)  # made once, because every client of every round is checked
Outcome = tuple[Reply | Failure, Arrays]  # the outcome of a request, and the site's state after it


class LocalFleet(Fleet):
    """Clients are calls of `handler` on the data of `population`; a handler with `.many` gets them all at once.

    `population` maps names to data and may create the data on access. With `timeout`, clients are asked one by one, and
    one that takes longer than so many seconds is late: the round goes on without it. A site keeps its state only if
    its reply arrived, as over a network. Handlers run with one torch thread.
    Without `copies` a client gets the arrays of its request themselves: for requests that no other client shares.

    >>> fleet = LocalFleet(lambda request, site: Reply({}, n=site.data), {"bia": 20, "ana": 10})
    >>> fleet.clients(), fleet.ask({"bia": Request("train", {})}).replies["bia"].n
    (['ana', 'bia'], 20)
    """

    def __init__(
        self,
        handler: AnyHandler,
        population: Mapping[ClientId, Any],
        timeout: float | None = None,
        *,
        copies: bool = True,
    ) -> None:
        self.handler = as_handler(handler)
        self.population = population
        self.timeout = timeout
        self.copies = copies
        self.states: MutableMapping[ClientId, Arrays] = {}  # only of clients that keep one
        self._clients = sorted(population)

    def is_remote(self) -> bool:
        """No: they have the code and the settings of this process."""
        return False

    def clients(self) -> list[ClientId]:
        return self._clients

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        outcomes = self._together(requests)
        if outcomes is None:
            outcomes = {c: self._alone(c, requests[c]) for c in sorted(requests)}
        for client, (outcome, state) in outcomes.items():
            if (state or client in self.states) and isinstance(outcome, Reply):
                self.states[client] = state
        return collect(requests, ((c, outcome) for c, (outcome, _) in outcomes.items()))

    def use_state_store(self, states: MutableMapping[ClientId, Arrays]) -> None:
        """Keep the sites' states there; those that it has already are the right ones."""
        for client, state in self.states.items():
            states.setdefault(client, state)
        self.states = states

    def snapshot(self) -> Arrays:
        """All sites' states in one dict, for a checkpoint of the simulation; no aggregator gets them.

        There are none in it if they are many: then they stay in the files of their state store.
        """
        if isinstance(self.states, ClientStates) and self.states.many:
            return {}
        return {
            json.dumps([client, name]): value
            for client, state in self.states.items()
            for name, value in state.items()
            if not name.startswith(FLEETING)
        }

    def restore(self, arrays: Arrays) -> None:
        """Bring back what `snapshot` gave."""
        states: dict[ClientId, Arrays] = {}
        for key, value in arrays.items():
            client, name = json.loads(key)
            states.setdefault(client, {})[name] = value
        self.states.clear()
        self.states.update(states)

    def _state(self, client: ClientId) -> Arrays:
        """A copy of the client's state: a request that fails must leave no trace."""
        kept = self.states.get(client)
        if kept:
            return {k: copy.copy(v) for k, v in kept.items()}
        return {}

    def _together(self, requests: Mapping[ClientId, Request]) -> dict[ClientId, Outcome] | None:
        """All outcomes from the handler's `.many`, or None if clients must be asked one by one."""
        many = self.handler.many
        if many is None or self.timeout is not None:
            return None
        try:
            sites = {c: Site(c, self.population[c], self._state(c)) for c in sorted(requests)}
            with one_thread():
                replies: Mapping[ClientId, Any] = many(requests, sites)
            return {c: (_sound(r), sites[c].state) for c, r in replies.items() if c in sites}
        except Damaged:
            # A stored state was altered: that is no client's fault, and the run must not go on from it.
            raise
        except Exception as error:
            # The clients are asked one by one instead, and only the one that caused this fails.
            log.warning("%d clients could not be asked at once: %s", len(requests), failure_of(error))
            return None

    def _alone(self, client: ClientId, request: Request) -> Outcome:
        """One client's outcome; requests and replies are copied, so that each side owns its arrays."""
        state = self._state(client)

        def work() -> Outcome:
            try:
                site = Site(client, self.population[client], state)
                own = request
                if self.copies:
                    own = replace(request, arrays=_copied(request.arrays), extras=_copied(request.extras))
                with one_thread():
                    reply = _sound(self.handler(own, site))
                if isinstance(reply, Reply) and self.copies:
                    reply = Reply(_copied(reply.arrays), _copied(reply.extras), reply.metrics, reply.n)
                return reply, site.state
            except (Exception, SystemExit) as error:  # a client may raise anything: only this client fails
                return failure_of(error), {}

        if self.timeout is None:
            return work()
        answer: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        threading.Thread(target=lambda: answer.put(work()), daemon=True).start()
        try:
            return answer.get(timeout=self.timeout)
        except queue.Empty:  # the thread runs on, but its answer is ignored
            return Failure("late", f"no answer within {self.timeout:g} s"), {}


def _sound(answer: Any) -> Reply | Failure:
    """A handler's answer, or a Failure if it is of another type; `.many` may also return Failures."""
    if isinstance(answer, ANSWER):
        return answer
    return Failure("empty", f"answered with {type(answer).__name__}, not with a Reply")


def _copied(arrays: Arrays) -> Arrays:
    return {k: np.array(v) if isinstance(v, np.ndarray | np.generic) else v for k, v in arrays.items()}
