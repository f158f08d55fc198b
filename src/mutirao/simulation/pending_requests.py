"""Clients at work on a simulated clock: each began with the model of its time, and is heard of when it is done.

At most so many are at work at once. Whoever is done, or lost, makes room for the next in the queue, which begins at
that moment. All that is on its way is kept in the run's memory, so that a run goes on in the middle bit for bit.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request
from mutirao.core.rounds import Run
from mutirao.core.validation import fault

PREFIX = "flights."
TABLE = PREFIX + "table"


@dataclass(frozen=True)
class PendingRequest:
    """What will be heard of a client, what that costs it in seconds and joules, and when (infinite: it waits)."""

    client: ClientId
    outcome: Reply | Failure
    seconds: float
    joules: float
    arrives: float = math.inf


class PendingRequests:
    """The clients at work and those in the queue, in the order in which they begin; `clock` is the time by now."""

    def __init__(self, run: Run, buffer: int, at_once: int) -> None:
        self.run, self.buffer, self.at_once = run, buffer, at_once
        self.clock, self.flights = read_pending(run.memory)

    def clients(self) -> frozenset[ClientId]:
        """Who is at work or in the queue."""
        return frozenset(self.flights)

    def add(self, requests: Mapping[ClientId, Request], outcomes: Iterable[PendingRequest]) -> None:
        """Put clients into the queue in the order of their requests; what is wrong with a reply is found here."""
        found = {flight.client: flight for flight in outcomes}
        for client, request in requests.items():
            outcome = found[client].outcome
            wrong = fault(request.arrays, outcome) if isinstance(outcome, Reply) else None
            self.flights[client] = replace(found[client], outcome=wrong or outcome)

    def land(self) -> list[PendingRequest]:
        """Let time pass until `buffer` replies are in, or nobody is left; whoever was heard of, in order of time."""
        landed: list[PendingRequest] = []
        while sum(isinstance(flight.outcome, Reply) for flight in landed) < self.buffer:
            self._begin()
            if not self.flights:
                break
            first = min(self.flights.values(), key=lambda flight: (flight.arrives, flight.client))
            self.clock = max(self.clock, first.arrives)
            landed.append(self.flights.pop(first.client))
        self.save()
        return landed

    def save(self) -> None:
        """Keep all of it in the run's memory."""
        others = {k: v for k, v in self.run.memory.items() if not k.startswith(PREFIX)}
        self.run.memory = others | write_pending(self.clock, self.flights)

    def _begin(self) -> None:
        """Those first in the queue begin, as far as there is room."""
        room = self.at_once - sum(math.isfinite(flight.arrives) for flight in self.flights.values())
        for client in [c for c, flight in self.flights.items() if math.isinf(flight.arrives)][: max(0, room)]:
            flight = self.flights[client]
            self.flights[client] = replace(flight, arrives=self.clock + flight.seconds)


def write_pending(clock: float, flights: Mapping[ClientId, PendingRequest]) -> Arrays:
    """Flights as arrays: replies under the number of their line in a table, which is JSON."""
    out: Arrays = {}
    lines = []
    for i, (client, flight) in enumerate(flights.items()):
        line = {"client": client, "seconds": flight.seconds, "joules": flight.joules}
        line["arrives"] = flight.arrives if math.isfinite(flight.arrives) else None
        made = flight.outcome
        if isinstance(made, Failure):
            line["failure"] = [made.kind, made.reason]
        else:
            line |= {"n": int(made.n), "metrics": {k: float(v) for k, v in made.metrics.items()}}
            out |= {f"{PREFIX}{i}.arrays.{k}": np.asarray(v) for k, v in made.arrays.items()}
            out |= {f"{PREFIX}{i}.extras.{k}": np.asarray(v) for k, v in made.extras.items()}
        lines.append(line)
    text = json.dumps({"clock": clock, "flights": lines})
    return out | {TABLE: np.frombuffer(text.encode(), np.uint8)}


def read_pending(memory: Arrays) -> tuple[float, dict[ClientId, PendingRequest]]:
    """The time and the flights that `write_pending` has put into a memory; none at the beginning of time."""
    if TABLE not in memory:
        return 0.0, {}
    table = json.loads(memory[TABLE].tobytes())
    flights = {}
    for i, line in enumerate(table["flights"]):
        outcome: Reply | Failure
        if "failure" in line:
            outcome = Failure(*line["failure"])
        else:
            arrays, extras = (part_under(memory, f"{PREFIX}{i}.{kind}.") for kind in ("arrays", "extras"))
            outcome = Reply(arrays, extras, line["metrics"], line["n"])
        arrives = math.inf if line["arrives"] is None else line["arrives"]
        flights[line["client"]] = PendingRequest(line["client"], outcome, line["seconds"], line["joules"], arrives)
    return table["clock"], flights


def part_under(memory: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
