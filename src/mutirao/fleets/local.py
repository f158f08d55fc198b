"""The in-process fleet: thousands of virtual clients on one machine."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mutirao.arrays import Arrays
from mutirao.fleet import Answers, ClientId, Failure, Handler, Reply, Request, Site, collect, failure_of

Outcome = tuple[ClientId, Reply | Failure]


class LocalFleet:
    """Clients are calls of `handler` on the data of `population`; a handler with `.many` gets them all at once.

    `population` maps names to data and may make the data on access. With `timeout`, clients that have not
    answered after so many seconds are late, and the round goes on without them.
    """

    def __init__(self, handler: Handler, population: Mapping[ClientId, Any], timeout: float | None = None) -> None:
        self.handler = handler
        self.population = population
        self.timeout = timeout
        self.states: dict[ClientId, Arrays] = {}  # only of clients that keep one
        self._clients = sorted(population)

    def clients(self) -> list[ClientId]:
        return self._clients

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        sites = {c: Site(c, self.population[c], self.states.get(c, {})) for c in sorted(requests)}
        outcomes = self._outcomes(requests, sites)
        answers = collect(requests, outcomes if self.timeout is None else _until(self.timeout, outcomes))
        self.states |= {c: site.state for c, site in sites.items() if site.state}
        return answers

    def _outcomes(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> Iterator[Outcome]:
        together = getattr(self.handler, "many", None)
        if together is not None:
            try:
                replies: Mapping[ClientId, Reply] = together(requests, sites)
            except Exception as error:  # which client failed is found out below, one by one
                if len(sites) == 1:
                    yield next(iter(sites)), failure_of(error)
                    return
            else:
                yield from replies.items()
                return
        for client, site in sites.items():
            try:
                yield client, self.handler(requests[client], site)
            except Exception as error:  # a client may raise anything: it is a failure of that client alone
                yield client, failure_of(error)


def _until(seconds: float, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """Pass on what comes within `seconds`; the rest runs on in a thread that nobody listens to."""
    arrived: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def work() -> None:
        for outcome in outcomes:
            arrived.put(outcome)
        arrived.put(None)

    threading.Thread(target=work, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            outcome = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if outcome is None:
            return
        yield outcome
