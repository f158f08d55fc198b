"""Small runs of the groups recipe whose clients can be absent: what several tests share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mutirao.clustering.group_state import Grouping
from mutirao.config import resolve
from mutirao.core.fleet import Answers, Request, Wrapper
from mutirao.core.rounds import Round, Run
from mutirao.experiments.task import Task, find
from mutirao.simulation.local_fleet import LocalFleet

RECIPE = find("groups")
SMALL = {
    "clients": 10,
    "rounds": 3,
    "epochs": 1,
    "warm_epochs": 8,
    "judge_samples": 40,
    "per_round": 1.0,
    "founders": 8,
    "references": 0,
}


class Coming(Wrapper):
    """A fleet whose clients are there only in some rounds; it counts how often it is asked what."""

    def __init__(self, fleet: LocalFleet, absent: Mapping[int, set[str]], run: Run) -> None:
        super().__init__(fleet)
        self.absent, self.run = absent, run
        self.asked: list[dict[str, Request]] = []

    def clients(self) -> list[str]:
        away = self.absent.get(self.run.round + 1, set())
        return [c for c in self.fleet.clients() if c not in away]

    def ask(self, requests: Mapping[str, Request]) -> Answers:
        self.asked.append(dict(requests))
        return self.fleet.ask(requests)


def start(absent: Mapping[int, set[str]] | None = None, **settings: Any) -> tuple[Any, Task, Run, Coming]:
    config = resolve(RECIPE.config, {**SMALL, **settings})
    task = RECIPE.task(config)
    run = Run(task.initial(), seed=config.seed)
    return config, task, run, Coming(LocalFleet(task.handler, task.population), absent or {}, run)


def go(absent: Mapping[int, set[str]] | None = None, **settings: Any) -> tuple[list[Round], Run, Coming, Task]:
    config, task, run, fleet = start(absent, **settings)
    return list(RECIPE.flow(fleet, replace(config, wait=0.0), task, run)), run, fleet, task


def state_of(run: Run) -> Grouping:
    state = Grouping.from_memory(run.memory)
    assert state is not None
    return state
