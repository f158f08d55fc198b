"""Clients with updates that are known beforehand, and fleets that lose some of them on purpose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Site, Wrapper
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.masking_handler import MaskingHandler
from mutirao.privacy.secure_aggregation.summing_fleet import SecureFleet
from mutirao.simulation.local_fleet import LocalFleet

MODEL: Arrays = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "b": np.array([0.5, -0.5]),
    "steps": np.array(7, np.int64),
    "mask": np.array([True, False]),
}
METRICS = ("accuracy", "loss")


def names(count: int) -> list[ClientId]:
    return [f"site {i:03d}" for i in range(count)]


def update_of(client: ClientId, model: Arrays) -> Reply:
    """What a client makes of the model: known to the test, and unlike that of any other."""
    i = int(client.split()[1])
    draw = np.random.default_rng(1000 + i)
    arrays: Arrays = {
        "w": (model["w"] + draw.normal(0, 0.3, (3, 4))).astype(np.float32),
        "b": model["b"] + draw.normal(0, 0.3, 2),
        "steps": np.asarray(model["steps"] + i % 3),
        "mask": np.array([i % 2 == 0, True]),
    }
    return Reply(arrays, metrics={"loss": float(draw.uniform(0, 3)), "accuracy": float(draw.uniform())}, n=10 + 3 * i)


def handler(request: Request, site: Site) -> Reply:
    reply = update_of(site.id, request.arrays)
    site.state["visits"] = np.asarray(site.state.get("visits", np.array(0)) + 1)
    return reply if request.do == "train" else Reply({}, metrics=reply.metrics, n=reply.n)


@dataclass
class Lossy(Wrapper):
    """A fleet in which clients go silent from a stage on, or only after it was done there (`after`)."""

    fleet: Fleet
    lose: Mapping[ClientId, str] = field(default_factory=dict)
    after: Mapping[ClientId, str] = field(default_factory=dict)
    seen: list[tuple[ClientId, Request, Reply | None]] = field(default_factory=list)
    meddle: Callable[[ClientId, Request], Request] = lambda client, request: request
    twist: Callable[[ClientId, Request, Reply], Reply] = lambda client, request, reply: reply
    gone: set[ClientId] = field(default_factory=set)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        self.gone |= {c for c, r in requests.items() if self.lose.get(c) == r.do}
        answers = self.fleet.ask({c: self.meddle(c, r) for c, r in requests.items() if c not in self.gone})
        self.gone |= {c for c, r in requests.items() if self.after.get(c) == r.do}
        replies = {c: self.twist(c, requests[c], r) for c, r in answers.replies.items() if c not in self.gone}
        self.seen += [(c, r, answers.replies.get(c)) for c, r in requests.items()]
        silent = {c: Failure("late", "no answer in time") for c in requests if c in self.gone}
        failures = dict(sorted(({c: f for c, f in answers.failures.items() if c not in silent} | silent).items()))
        return Answers(replies, failures)


def lossy(count: int, secure: SecAggPlus, work: Any = handler, **settings: Any) -> tuple[Lossy, SecureFleet]:
    """A secure fleet, and the one inside it that sees all that is carried."""
    inside = Lossy(LocalFleet(MaskingHandler(work, secure), dict.fromkeys(names(count))), **settings)
    return inside, SecureFleet(inside, secure, METRICS)


def ask(fleet: Fleet, clients: list[ClientId], do: str = "train", model: Arrays = MODEL) -> Answers:
    return fleet.ask(dict.fromkeys(clients, Request(do, model, {"seed": 0, "round": 1})))
