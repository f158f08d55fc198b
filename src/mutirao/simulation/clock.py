"""A model of the clients' devices: how long a round would take them and what energy it would cost.

Nothing here is measured. With n samples, E epochs and models of D bytes down and U bytes up, client k takes
D / down_k + E n / speed_k + U / up_k seconds; a forward pass counts a third of a training pass (Hobbhahn and Sevilla,
2021). A round lasts as long as its slowest reply, or until the deadline if somebody is missing. Energy is power by
time: `watts` while computing, `radio_watts` while sending or receiving. With over-commitment more clients are asked
than are wanted, and a round lasts until as many as are wanted have replied; the others stop then.

Told to `stagger`, it does not wait for the slowest: see `simulation/pending_requests.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mutirao.core.arrays import nbytes
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper, bytes_of_replies, collect
from mutirao.core.parts import with_defaults
from mutirao.core.roster import Roster
from mutirao.core.rounds import Round, Run
from mutirao.randomness import rng
from mutirao.selection import how_many, sizes
from mutirao.simulation.devices import DeviceModel, Devices, Draw
from mutirao.simulation.pending_requests import PendingRequest, PendingRequests

Costs = dict[ClientId, tuple[float, float]]  # seconds and joules of each
FORWARD = 1 / 3  # of the work of a training pass


class TimedFleet(Wrapper):
    """A fleet with a simulated clock: clients that drop out or miss the deadline are lost; rounds have simulated costs.

    If the model has over-commitment, the first `wanted` replies (a count, or a share of those present) make a round.

    >>> from mutirao import LocalFleet
    >>> from mutirao.simulation.devices import TiFLDevices
    >>> fleet = LocalFleet(lambda request, site: Reply(request.arrays, n=100), {f"c{i}": None for i in range(5)})
    >>> run = Run({"w": np.zeros(1)})
    >>> run.roster.meet(fleet.clients())
    >>> timed = TimedFleet(fleet, TiFLDevices(speed=50.0), run, epochs=1)
    >>> timed.declare(run.roster)
    >>> sorted(run.roster.figure("ready_seconds").round(2).tolist())  # five kinds of devices
    [0.01, 0.01, 0.02, 0.04, 0.2]
    """

    def __init__(self, fleet: Fleet, model: Draw, run: Run, epochs: int, wanted: int | float = 1.0) -> None:
        super().__init__(fleet)
        self.wanted = wanted
        self.model, self.run, self.epochs = with_defaults(model, DeviceModel), run, epochs  # type: ignore[type-abstract]
        self.deadline, self.jitter = self.model.deadline or math.inf, self.model.jitter
        self._devices: Devices | None = None
        self._seconds, self._joules, self._asked = 0.0, 0.0, 0
        self._costs: Costs = {}
        self._flights: PendingRequests | None = None

    def stagger(self, buffer: int, at_once: int) -> None:
        """Let requests to train return with the first replies on the clock; those on their way are the run's."""
        self._flights = PendingRequests(self.run, buffer, at_once)

    def awaited(self) -> frozenset[ClientId]:
        """Who is on the way, by the clock."""
        return self.fleet.awaited() if self._flights is None else self._flights.clients()

    def devices(self, roster: Roster) -> Devices:
        """The devices of all clients the roster knows, drawn from the seed alone."""
        if self._devices is None or len(self._devices.speed) != len(roster):
            self._devices = self.model(roster.ids, rng(self.run.seed, 0, "devices"))
        return self._devices

    def declare(self, roster: Roster) -> None:
        """Tell the server how long each client would need, as clients of FedCS do; sizes not known are the mean."""
        d, size = self.devices(roster), nbytes(self.run.arrays)
        roster.figures["ready_seconds"] = size / d.down + self.epochs * sizes(roster) / d.speed
        roster.figures["upload_seconds"] = size / d.up
        self.fleet.declare(roster)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask those who do not drop out; replies that would have come too late are failures."""
        answers, costs, gone = self.measure(requests)
        flights = self._flights
        if flights is not None and all(request.do == "train" for request in requests.values()):
            outcomes = answers.replies | answers.failures
            began = flights.clock
            flights.add(requests, (PendingRequest(c, outcomes[c], *costs[c]) for c in requests))
            heard = {flight.client: flight for flight in flights.land()}
            self._seconds += flights.clock - began
            self._spend({c: (flight.seconds, flight.joules) for c, flight in heard.items()})
            come = collect(heard, ((c, flight.outcome) for c, flight in heard.items()))
            return replace(come, carried=answers.carried)
        if self.model.overcommit > 1 and all(request.do == "train" for request in requests.values()):
            wanted = how_many(self.wanted, len(self.run.roster.here()))
            if len(answers.replies) >= wanted:
                answers, costs = take_first(answers, costs, wanted)
                gone = set()  # nobody waits for them
        missing = self.deadline if gone and math.isfinite(self.deadline) else 0.0
        longest = max((seconds for c, (seconds, _) in costs.items() if c not in gone), default=0.0)
        self._seconds += max(longest, missing)
        if flights is not None:
            flights.clock += max(longest, missing)  # those who train go on while others are probed
        self._spend(costs)
        return answers

    def measure(self, requests: Mapping[ClientId, Request]) -> tuple[Answers, Costs, set[ClientId]]:
        """What clients answer, what that costs each in seconds and joules, and who drops out."""
        roster, number = self.run.roster, self.run.round + 1
        d, self._asked = self.devices(roster), self._asked + 1
        lot = rng(self.run.seed, number, f"devices {self._asked}")
        lost, shake = lot.random(len(roster)), np.exp(self.jitter * lot.standard_normal(len(roster)))
        rows = {c: roster.row(c) for c in sorted(requests)}
        gone = {c for c, i in rows.items() if lost[i] < d.dropout[i]}
        asked = {c: r for c, r in requests.items() if c not in gone}
        answers = self.fleet.ask(asked) if asked else Answers({}, {})
        each = tuple(b / max(1, len(asked)) for b in answers.carried) if answers.carried else None
        replies, failures = dict(answers.replies), dict(answers.failures)
        costs: Costs = {}
        for c in sorted(requests):
            work, down, up = self.load(requests[c], replies.get(c), rows[c])
            if each is not None:  # the fleet sends less than whole models
                down, up = each
            work = float(shake[rows[c]] * work / d.speed[rows[c]])
            radio = float(shake[rows[c]] * (down / d.down[rows[c]] + up / d.up[rows[c]]))
            if c in replies and work + radio > self.deadline:
                failures[c] = Failure("late", f"would take {work + radio:.4g} s, the deadline is {self.deadline:g} s")
                del replies[c]
            if c in gone:
                failures[c] = Failure("gone", "dropped out (simulated)")
            seconds = min(work + radio, self.deadline)
            part = seconds / max(work + radio, 1e-12)  # who is cut off has spent only that much
            costs[c] = seconds, float(part * (d.watts[rows[c]] * work + d.radio_watts[rows[c]] * radio))
        return Answers(dict(sorted(replies.items())), dict(sorted(failures.items())), answers.carried), costs, gone

    def _spend(self, costs: Costs) -> None:
        for c, (seconds, joules) in costs.items():
            before = self._costs.get(c, (0.0, 0.0))
            self._costs[c] = before[0] + seconds, before[1] + joules
            self._joules += joules

    def load(self, request: Request, reply: Reply | None, row: int) -> tuple[float, float, float]:
        """Samples to train on, bytes down and bytes up; one that never replied is taken to have tried."""
        n = reply.n if reply is not None else int(self.run.roster.n[row])
        passes = float(request.config.get("epochs", self.epochs)) * n if request.do == "train" else FORWARD * n
        if request.do == "probe":
            passes = FORWARD * min(n, int(request.config.get("probe_samples", n)))
        up = bytes_of_replies(Answers({"": reply}, {})) if reply is not None else 0
        return passes, nbytes(request.arrays) + nbytes(request.extras), up

    def record(self, done: Round) -> None:
        """Add the simulated costs to the record of a round, and begin the next."""
        done.row.update(sim_seconds=self._seconds, sim_joules=self._joules)
        for line in done.clients:
            seconds, joules = self._costs.get(line["client"], (0.0, 0.0))
            line.update(sim_seconds=seconds, sim_joules=joules)
        self._seconds, self._joules, self._asked, self._costs = 0.0, 0.0, 0, {}
        self.fleet.record(done)


def take_first(answers: Answers, costs: Costs, wanted: int) -> tuple[Answers, Costs]:
    """The quickest replies, as many as are wanted; all others stop when these are in, and have cost so much by then."""
    order = sorted(answers.replies, key=lambda c: (costs[c][0], c))
    end = costs[order[wanted - 1]][0]
    spare = Failure("late", f"not needed: {wanted} others had replied after {end:.4g} s")
    failures = answers.failures | dict.fromkeys(order[wanted:], spare)
    replies = {c: reply for c, reply in answers.replies.items() if c not in failures}
    part = {c: min(1.0, end / max(seconds, 1e-12)) for c, (seconds, _) in costs.items()}
    cut = {c: (min(seconds, end), joules * part[c]) for c, (seconds, joules) in costs.items()}
    return replace(answers, replies=replies, failures=dict(sorted(failures.items()))), cut
