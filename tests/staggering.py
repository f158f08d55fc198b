"""Clients with quadratic losses on devices of known speeds, and a run of them that waits for nobody."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.records import Round
from mutirao.core.rounds import Patience, Run, train
from mutirao.selection import Uniform
from mutirao.simulation.asynchronous import AsynchronousFleet, RefillingSelector
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import Devices
from mutirao.simulation.local_fleet import LocalFleet

NAMES = [f"c{i:02d}" for i in range(12)]


class Quadratic:
    """f_k(w) = (w - o_k)' A_k (w - o_k) / 2, three steps of gradient descent; `shared`: all have one optimum."""

    def __init__(self, shared: bool, steps: int = 3, lr: float = 0.3) -> None:
        draw = np.random.default_rng(5)
        self.curves = {c: draw.uniform(0.2, 2.0, 4) for c in NAMES}
        self.optimum = draw.normal(size=4)
        self.optima = {c: self.optimum if shared else self.optimum + draw.normal(size=4) for c in NAMES}
        self.steps, self.lr = steps, lr

    def work(self, client: str, w: Any) -> Any:
        for _ in range(self.steps):
            w = w - self.lr * self.curves[client] * (w - self.optima[client])
        return w

    def __call__(self, request: Request, site: Site) -> Reply:
        site.state["visits"] = site.state.get("visits", np.array(0)) + 1
        return Reply({"w": self.work(site.id, request.arrays["w"])}, metrics={"loss": 1.0}, n=10)


class Clock:
    """Devices whose links cost nothing; client i does 1 + i^2 / 3 samples a second, so that 40 lie between them."""

    jitter = deadline = 0.0

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def speeds(self, names: Sequence[str]) -> Any:
        return 1 + np.array([int(c[1:]) for c in names]) ** 2 / 3.0

    def __call__(self, names: Sequence[str], rng: np.random.Generator) -> Devices:
        free, nothing = np.full(len(names), np.inf), np.zeros(len(names))
        return Devices(self.speeds(names), free, free, nothing + 2, nothing, nothing + self.dropout)


def staggered_fleet(task: Any, run: Run, buffer: int, at_once: int, clock: Any = None, **how: Any) -> AsynchronousFleet:
    timed = TimedFleet(LocalFleet(task, dict.fromkeys(NAMES)), clock or Clock(), run, epochs=1)
    return AsynchronousFleet(timed, run, buffer, at_once, **how)


def run_staggered(
    task: Any, aggregate: Any, rounds: int, at_once: int, clock: Any = None, run: Run | None = None
) -> tuple[Run, list[Round]]:
    """So many rounds, and what was recorded of each."""
    run = run or Run({"w": np.zeros(4)}, seed=1)
    rebases = "models" not in aggregate.needs.server
    fleet = staggered_fleet(task, run, aggregate.buffer_of(at_once), at_once, clock, rebases=rebases)
    select, patience = RefillingSelector(Uniform, fleet), Patience(min_replies=1, wait=0)
    return run, list(train(run, fleet, rounds=rounds, select=select, aggregate=aggregate, patience=patience))
