"""A model of the clients' devices: how long a round would take them and what energy it would cost.

Nothing here is measured. With n samples, E epochs and models of D bytes down and U bytes up, client k takes
D / down_k + E n / speed_k + U / up_k seconds; a forward pass counts a third of a training pass (Hobbhahn and Sevilla,
2021). A round lasts as long as its slowest reply, or until the deadline if somebody is missing. Energy is power by
time: `watts` while computing, `radio_watts` while sending or receiving.

Told to `stagger`, it does not wait for the slowest: see `fleets/flights.py`.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import nbytes
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper, bytes_of_replies, collect
from mutirao.core.parts import complete
from mutirao.core.roster import Roster
from mutirao.core.rounds import Round, Run
from mutirao.core.text import read_table
from mutirao.errors import ConfigError
from mutirao.fleets.flights import Flight, Flights
from mutirao.randomness import rng
from mutirao.selection import sizes

Floats = npt.NDArray[np.float64]
Costs = dict[ClientId, tuple[float, float]]  # seconds and joules of each
MBIT = 1e6 / 8  # bytes
FORWARD = 1 / 3  # of the work of a training pass


@dataclass(frozen=True)
class Devices:
    """A column a property, a row a client."""

    speed: Floats  # samples a second, training
    down: Floats  # bytes a second
    up: Floats
    watts: Floats
    radio_watts: Floats
    dropout: Floats  # probability that a client that is asked is never heard of again in that round


Draw = Callable[[Sequence[ClientId], np.random.Generator], Devices]


class Model(Protocol):
    """Draws the devices of clients; `deadline` is in seconds (0: none), `jitter` the spread of what a round takes."""

    @property
    def deadline(self) -> float:
        """After so many seconds a reply is late (0: never)."""
        return 0.0

    @property
    def jitter(self) -> float:
        """The standard deviation of the logarithm of how long a round takes a client."""
        return 0.0

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        """The devices of these clients."""
        ...


def none(names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
    """Devices that cost no time and no energy; a recipe with these does not record any."""
    at_once, nothing = np.full(len(names), np.inf), np.zeros(len(names))
    return Devices(at_once, at_once, at_once, nothing, nothing, nothing)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What simulated devices have in common, whatever their speeds are."""

    jitter: float = 0.1
    deadline: float = 0.0
    dropout: float = 0.0
    watts: float = 3.0
    radio_watts: float = 1.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class FedCSDevices(Simulated):
    """Phones in a cell, as in FedCS: 10 to 100 samples a second, links of 1.4 Mbit/s on average and 8.6 at most.

    Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", ICC
    2019. They simulate the radio; here throughputs are exponential, cut at the maximum. Power is not in the paper.
    """

    slowest: float = 10.0
    fastest: float = 100.0
    mbits: float = 1.4
    most_mbits: float = 8.6

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        n = len(names)
        speed = rng.uniform(self.slowest, max(self.slowest, self.fastest), n)
        link = np.clip(rng.exponential(self.mbits, n), self.mbits / 100, self.most_mbits) * MBIT
        return Devices(speed, link, link, *(np.full(n, x) for x in (self.watts, self.radio_watts, self.dropout)))


@dataclass(frozen=True)
class TiFLDevices(Simulated):
    """Five equal groups of clients with 4, 2, 1, 1/2 and 1/10 of a core, as in TiFL's experiments on CIFAR-10.

    Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020. What a core and a link can do is ours.
    """

    speed: float = 50.0  # samples a second of one core
    mbits: float = 20.0

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        n = len(names)
        cores = rng.permutation(np.resize([4.0, 2.0, 1.0, 0.5, 0.1], n))
        link, rest = np.full(n, self.mbits * MBIT), (self.radio_watts, self.dropout)
        return Devices(cores * self.speed, link, link, self.watts * cores, *(np.full(n, x) for x in rest))


@dataclass(frozen=True)
class DeviceTable:
    """From a CSV file with a line a client: `client,speed,down,up,watts,radio_watts,dropout`.

    Speed in samples a second, links in Mbit/s. Only the first four columns must be there; a client that is not in the
    file gets a line of the file by lot.
    """

    file: str
    jitter: float = 0.0
    deadline: float = 0.0

    def __post_init__(self) -> None:
        check(self)

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        known, values = device_lines(self.file)
        place = {c: i for i, c in enumerate(known)}
        lot = rng.integers(0, len(known), len(names))
        rows = np.array([place.get(c, i) for c, i in zip(names, lot.tolist(), strict=True)], np.intp)
        speed, down, up, watts, radio, dropout = values[rows].T
        return Devices(speed, down * MBIT, up * MBIT, watts, radio, dropout)


NAMES = {"none": none, "fedcs": FedCSDevices, "tifl": TiFLDevices, "table": DeviceTable}


def check(model: Simulated | DeviceTable) -> None:
    """Refuse negative figures, and speeds of nought."""
    for f in fields(model):
        value = getattr(model, f.name)
        if f.name == "dropout" and not 0 <= value < 1:
            raise ValueError(f"dropout is {value!r}, but must be at least 0 and below 1")
        free = f.name in ("deadline", "jitter", "watts", "radio_watts", "dropout", "file")
        if not free and not value > 0:
            raise ValueError(f"{f.name} is {value!r}, but must be above 0")
        if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{f.name} is {value!r}, but must be at least 0")


def device_lines(file: str) -> tuple[list[ClientId], Floats]:
    """The clients of a device table and their figures."""
    names: list[ClientId] = []
    rows: list[list[float]] = []
    lines = read_table(Path(file).expanduser())
    try:
        for row in lines:
            names.append(row["client"])
            given = [float(row[k]) for k in ("speed", "down", "up")]
            rows.append([*given, *(float(row.get(k) or d) for k, d in DEFAULTS.items())])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"devices.file: {file} must have numbers in the columns client, speed, down, up") from error
    values = np.array(rows, np.float64).reshape(-1, 6)
    good = len(names) and np.isfinite(values).all() and (values >= 0).all()
    if not (good and (values[:, :3] > 0).all() and (values[:, 5] < 1).all()):
        raise ConfigError(f"devices.file: {file} must have positive speeds and links, and dropouts below 1")
    return names, values


DEFAULTS = {"watts": 3.0, "radio_watts": 1.0, "dropout": 0.0}


class Timed(Wrapper):
    """A fleet with a clock: who drops out or misses the deadline is lost, and every round has simulated costs."""

    def __init__(self, fleet: Fleet, model: Draw, run: Run, epochs: int) -> None:
        super().__init__(fleet)
        self.model, self.run, self.epochs = complete(model, Model), run, epochs  # type: ignore[type-abstract]
        self.deadline, self.jitter = self.model.deadline or math.inf, self.model.jitter
        self._devices: Devices | None = None
        self._seconds, self._joules, self._asked = 0.0, 0.0, 0
        self._costs: Costs = {}
        self._flights: Flights | None = None

    def stagger(self, buffer: int, at_once: int) -> None:
        """Let requests to train return with the first replies on the clock; those on their way are the run's."""
        self._flights = Flights(self.run, buffer, at_once)

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
            flights.add(requests, (Flight(c, outcomes[c], *costs[c]) for c in requests))
            heard = {flight.client: flight for flight in flights.land()}
            self._seconds += flights.clock - began
            self._spend({c: (flight.seconds, flight.joules) for c, flight in heard.items()})
            come = collect(heard, ((c, flight.outcome) for c, flight in heard.items()))
            return replace(come, carried=answers.carried)
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
