"""A simulated clock: how long a round would take the clients' devices, and what energy it would cost.

Nothing here is measured. With n samples, E epochs and models of D bytes down and U bytes up, client k takes
D / down_k + E n / speed_k + U / up_k seconds; a forward pass counts a third of a training pass (Hobbhahn and Sevilla,
2021). A round lasts as long as its slowest reply, or until the deadline if a client is missing. Energy is power times
time: `watts` while computing, `radio_watts` while sending or receiving. With over-commitment more clients are asked
than are needed, and the round ends when enough of them have replied; the others stop then.

In asynchronous rounds (`stagger`) it does not wait for the slowest. At most `at_once` clients train at a time; a client
that is done, or lost, makes room for the next in the queue, which begins at that moment. All pending requests are kept
in the run's memory, so that a run resumes bit for bit in the middle of them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mutirao.core.arrays import Arrays, nbytes
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper, bytes_of_replies, collect
from mutirao.core.parts import with_defaults
from mutirao.core.roster import Roster
from mutirao.core.rounds import Round, Run
from mutirao.core.validation import fault
from mutirao.randomness import rng
from mutirao.selection import how_many, sizes
from mutirao.simulation.devices import DeviceModel, Devices, SampleDevices

Costs = dict[ClientId, tuple[float, float]]  # seconds and joules of each client
FORWARD = 1 / 3  # of the work of a training pass

# Keys in the run's memory: resumed runs of older versions have them.
PREFIX = "flights."
TABLE = PREFIX + "table"


@dataclass(frozen=True)
class PendingRequest:
    """A client's outcome, its cost in seconds and joules, and when it arrives (infinite: still in the queue)."""

    client: ClientId
    outcome: Reply | Failure
    seconds: float
    joules: float
    arrives: float = math.inf


class PendingRequests:
    """Clients that are training and clients in the queue, in the order in which they begin; `clock` is the time."""

    def __init__(self, run: Run, buffer: int, at_once: int) -> None:
        self.run = run
        self.buffer = buffer
        self.at_once = at_once
        self.clock, self.pending = read_pending(run.memory)

    def clients(self) -> frozenset[ClientId]:
        """The clients that are training or in the queue."""
        return frozenset(self.pending)

    def add(self, requests: Mapping[ClientId, Request], outcomes: Iterable[PendingRequest]) -> None:
        """Queue clients in the order of their requests. Replies are validated here, before the model moves on."""
        by_client = {request.client: request for request in outcomes}
        for client, request in requests.items():
            outcome = by_client[client].outcome
            if isinstance(outcome, Reply):
                outcome = fault(request.arrays, outcome) or outcome
            self.pending[client] = replace(by_client[client], outcome=outcome)

    def take_finished(self) -> list[PendingRequest]:
        """Advance the clock until `buffer` replies have arrived or none is pending; what arrived, in order of time."""
        finished: list[PendingRequest] = []
        while sum(isinstance(request.outcome, Reply) for request in finished) < self.buffer:
            self._begin()
            if not self.pending:
                break
            first = min(self.pending.values(), key=lambda request: (request.arrives, request.client))
            self.clock = max(self.clock, first.arrives)
            finished.append(self.pending.pop(first.client))
        self.save()
        return finished

    def save(self) -> None:
        """Keep all pending requests in the run's memory."""
        others = {k: v for k, v in self.run.memory.items() if not k.startswith(PREFIX)}
        self.run.memory = others | write_pending(self.clock, self.pending)

    def _begin(self) -> None:
        """Let the first clients in the queue begin, as far as there is room."""
        room = self.at_once - sum(math.isfinite(request.arrives) for request in self.pending.values())
        waiting = [c for c, request in self.pending.items() if math.isinf(request.arrives)]
        for client in waiting[: max(0, room)]:
            request = self.pending[client]
            self.pending[client] = replace(request, arrives=self.clock + request.seconds)


def write_pending(clock: float, pending: Mapping[ClientId, PendingRequest]) -> Arrays:
    """Pending requests as arrays: a table, which is JSON, and the arrays of replies under their line's number."""
    out: Arrays = {}
    lines = []
    for i, (client, request) in enumerate(pending.items()):
        line = {"client": client, "seconds": request.seconds, "joules": request.joules}
        # JSON has no infinity, which stands for a client in the queue.
        line["arrives"] = request.arrives if math.isfinite(request.arrives) else None
        outcome = request.outcome
        if isinstance(outcome, Failure):
            line["failure"] = [outcome.kind, outcome.reason]
        else:
            line |= {"n": int(outcome.n), "metrics": {k: float(v) for k, v in outcome.metrics.items()}}
            out |= {f"{PREFIX}{i}.arrays.{k}": np.asarray(v) for k, v in outcome.arrays.items()}
            out |= {f"{PREFIX}{i}.extras.{k}": np.asarray(v) for k, v in outcome.extras.items()}
        lines.append(line)
    text = json.dumps({"clock": clock, "flights": lines})
    return out | {TABLE: np.frombuffer(text.encode(), np.uint8)}


def read_pending(memory: Arrays) -> tuple[float, dict[ClientId, PendingRequest]]:
    """The clock and the pending requests that `write_pending` stored; 0 and none in a new run."""
    if TABLE not in memory:
        return 0.0, {}
    table = json.loads(memory[TABLE].tobytes())
    pending = {}
    for i, line in enumerate(table["flights"]):
        outcome: Reply | Failure
        if "failure" in line:
            outcome = Failure(*line["failure"])
        else:
            arrays = arrays_under(memory, f"{PREFIX}{i}.arrays.")
            extras = arrays_under(memory, f"{PREFIX}{i}.extras.")
            outcome = Reply(arrays, extras, line["metrics"], line["n"])
        arrives = math.inf if line["arrives"] is None else line["arrives"]
        pending[line["client"]] = PendingRequest(line["client"], outcome, line["seconds"], line["joules"], arrives)
    return table["clock"], pending


def arrays_under(memory: Arrays, prefix: str) -> Arrays:
    """The arrays with names that begin with a prefix, without the prefix."""
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}


class TimedFleet(Wrapper):
    """A fleet with a simulated clock: clients that drop out or miss the deadline are lost, and rounds have costs.

    With over-commitment, the first `wanted` replies (a count, or a share of those present) make a round.

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

    def __init__(self, fleet: Fleet, model: SampleDevices, run: Run, epochs: int, wanted: int | float = 1.0) -> None:
        super().__init__(fleet)
        self.run = run
        self.epochs = epochs
        self.wanted = wanted
        self.model = with_defaults(model, DeviceModel)  # type: ignore[type-abstract]
        self.deadline = self.model.deadline or math.inf
        self.jitter = self.model.jitter
        self._devices: Devices | None = None
        self._pending: PendingRequests | None = None
        self._start_round()

    def stagger(self, buffer: int, at_once: int) -> None:
        """Let requests to train return with the first replies on the clock; the others stay pending with the run."""
        self._pending = PendingRequests(self.run, buffer, at_once)

    def awaited(self) -> frozenset[ClientId]:
        """The clients with a pending request."""
        if self._pending is None:
            return self.fleet.awaited()
        return self._pending.clients()

    def devices(self, roster: Roster) -> Devices:
        """The devices of all clients in the roster, sampled from the seed alone."""
        if self._devices is None or len(self._devices.speed) != len(roster):
            self._devices = self.model(roster.ids, rng(self.run.seed, 0, "devices"))
        return self._devices

    def declare(self, roster: Roster) -> None:
        """Enter how long each client would need, as clients of FedCS report it; unknown sizes count as the mean."""
        d = self.devices(roster)
        size = nbytes(self.run.arrays)
        roster.figures["ready_seconds"] = size / d.down + self.epochs * sizes(roster) / d.speed
        roster.figures["upload_seconds"] = size / d.up
        self.fleet.declare(roster)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask the clients that do not drop out; replies that would have come too late are failures."""
        answers, costs, gone = self.measure(requests)
        training = all(request.do == "train" for request in requests.values())
        if self._pending is not None and training:
            return self._ask_asynchronously(self._pending, requests, answers, costs)
        if self.model.overcommit > 1 and training:
            wanted = how_many(self.wanted, len(self.run.roster.here()))
            if len(answers.replies) >= wanted:
                answers, costs = take_first(answers, costs, wanted)
                gone = set()  # the round ends before anyone misses them
        # The server cannot know that a client dropped out: it waits for it until the deadline.
        missing = 0.0
        if gone and math.isfinite(self.deadline):
            missing = self.deadline
        longest = max((seconds for c, (seconds, _) in costs.items() if c not in gone), default=0.0)
        self._seconds += max(longest, missing)
        if self._pending is not None:
            self._pending.clock += max(longest, missing)  # training goes on while other clients are probed
        self._spend(costs)
        return answers

    def _ask_asynchronously(
        self, pending: PendingRequests, requests: Mapping[ClientId, Request], answers: Answers, costs: Costs
    ) -> Answers:
        """Queue the requests and return what arrives next."""
        outcomes = answers.replies | answers.failures
        began = pending.clock
        pending.add(requests, (PendingRequest(c, outcomes[c], *costs[c]) for c in requests))
        finished = {request.client: request for request in pending.take_finished()}
        self._seconds += pending.clock - began
        self._spend({c: (request.seconds, request.joules) for c, request in finished.items()})
        arrived = collect(finished, ((c, request.outcome) for c, request in finished.items()))
        return replace(arrived, carried=answers.carried)

    def measure(self, requests: Mapping[ClientId, Request]) -> tuple[Answers, Costs, set[ClientId]]:
        """The clients' answers, what each costs in seconds and joules, and which clients drop out."""
        roster = self.run.roster
        d = self.devices(roster)
        self._requests_made += 1
        draw = rng(self.run.seed, self.run.round + 1, f"devices {self._requests_made}")
        # One number for each client of the roster: its fate does not depend on which others are asked.
        lost = draw.random(len(roster))
        jitter = np.exp(self.jitter * draw.standard_normal(len(roster)))
        rows = {c: roster.row(c) for c in sorted(requests)}
        gone = {c for c, i in rows.items() if lost[i] < d.dropout[i]}
        asked = {c: r for c, r in requests.items() if c not in gone}
        answers = self.fleet.ask(asked) if asked else Answers({}, {})
        replies = dict(answers.replies)
        failures = dict(answers.failures)
        costs: Costs = {}
        for c, i in rows.items():
            work, down, up = self.load(requests[c], replies.get(c), i)
            if answers.carried:  # the fleet sends less than whole models
                down, up = (total / max(1, len(asked)) for total in answers.carried)
            work = float(jitter[i] * work / d.speed[i])
            radio = float(jitter[i] * (down / d.down[i] + up / d.up[i]))
            if c in replies and work + radio > self.deadline:
                failures[c] = Failure("late", f"would take {work + radio:.4g} s, the deadline is {self.deadline:g} s")
                del replies[c]
            if c in gone:
                failures[c] = Failure("gone", "dropped out (simulated)")
            seconds = min(work + radio, self.deadline)
            part = seconds / max(work + radio, 1e-12)  # a client that is cut off has spent only that much
            costs[c] = seconds, float(part * (d.watts[i] * work + d.radio_watts[i] * radio))
        return Answers(dict(sorted(replies.items())), dict(sorted(failures.items())), answers.carried), costs, gone

    def _spend(self, costs: Costs) -> None:
        for c, (seconds, joules) in costs.items():
            before = self._costs.get(c, (0.0, 0.0))
            self._costs[c] = before[0] + seconds, before[1] + joules
            self._joules += joules

    def load(self, request: Request, reply: Reply | None, row: int) -> tuple[float, float, float]:
        """Samples to train on, bytes down and bytes up; a client that never replied is taken to have tried."""
        n = int(self.run.roster.n[row])
        up = 0
        if reply is not None:
            n = reply.n
            up = bytes_of_replies(Answers({"": reply}, {}))
        passes = FORWARD * n
        if request.do == "train":
            passes = float(request.config.get("epochs", self.epochs)) * n
        elif request.do == "probe":
            passes = FORWARD * min(n, int(request.config.get("probe_samples", n)))
        return passes, nbytes(request.arrays) + nbytes(request.extras), up

    def record(self, done: Round) -> None:
        """Add the simulated costs to the record of a round, and begin the next."""
        done.row.update(sim_seconds=self._seconds, sim_joules=self._joules)
        for line in done.clients:
            seconds, joules = self._costs.get(line["client"], (0.0, 0.0))
            line.update(sim_seconds=seconds, sim_joules=joules)
        self._start_round()
        self.fleet.record(done)

    def _start_round(self) -> None:
        self._seconds = 0.0
        self._joules = 0.0
        self._requests_made = 0
        self._costs: Costs = {}


def take_first(answers: Answers, costs: Costs, wanted: int) -> tuple[Answers, Costs]:
    """The first `wanted` replies. All other clients stop when these are in, and have spent as much as by then."""
    order = sorted(answers.replies, key=lambda c: (costs[c][0], c))
    end = costs[order[wanted - 1]][0]
    spare = Failure("late", f"not needed: {wanted} others had replied after {end:.4g} s")
    failures = answers.failures | dict.fromkeys(order[wanted:], spare)
    replies = {c: reply for c, reply in answers.replies.items() if c not in failures}
    cut: Costs = {}
    for c, (seconds, joules) in costs.items():
        part = min(1.0, end / max(seconds, 1e-12))
        cut[c] = min(seconds, end), joules * part
    return replace(answers, replies=replies, failures=dict(sorted(failures.items()))), cut
