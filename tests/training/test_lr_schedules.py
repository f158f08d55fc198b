"""Schedules against torch's own, and what a run makes of them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mutirao.config import Common, resolve
from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, Task, find
from mutirao.runs.execute import execute, reopen
from mutirao.training.lr_schedules import Constant, Cosine, Schedule, Step, Warmup, schedule_of
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer


def torchs(make: Any, rounds: int) -> list[float]:
    """The rates of torch's scheduler, a step a round."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = make(optimizer), []
    for _ in range(rounds):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@given(rounds=st.integers(1, 60), final=st.floats(0, 1))
def test_cosine_is_torchs(rounds: int, final: float) -> None:
    theirs = torchs(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, rounds, eta_min=final), rounds)
    ours = [Cosine(final, rounds)(t) for t in range(1, rounds + 1)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@given(rounds=st.integers(1, 60), every=st.integers(1, 20), gamma=st.floats(0.1, 1))
def test_step_is_torchs(rounds: int, every: int, gamma: float) -> None:
    theirs = torchs(lambda o: torch.optim.lr_scheduler.StepLR(o, every, gamma), rounds)
    np.testing.assert_allclose([Step(every, gamma)(t) for t in range(1, rounds + 1)], theirs, rtol=1e-9)


@given(rounds=st.integers(1, 40), warm=st.integers(1, 20), final=st.floats(0, 1), after=st.integers(0, 5))
def test_no_factor_is_0_or_above_1_in_any_round(rounds: int, warm: int, final: float, after: int) -> None:
    schedules: list[Schedule] = [Constant(), Cosine(final, rounds), Warmup(warm), Warmup(warm, "cosine", rounds)]
    for schedule in schedules:
        assert all(0 < schedule(t) <= 1 for t in range(rounds + after + 1))  # round 0 is before the first


def test_warmup_rises_in_equal_steps_and_then_falls_as_a_cosine_of_the_rest() -> None:
    warm = Warmup(rounds=4, then="cosine", length=14)
    assert [warm(t) for t in (1, 2, 3, 4, 5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [warm(4 + t) for t in range(1, 11)] == [Cosine(length=10)(t) for t in range(1, 11)]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ({"schedule": "cosine", "schedule.final": 2.0}, "schedule=cosine: final is 2.0"),
        ({"schedule": "step", "schedule.every": 0}, "schedule=step: every is 0"),
        ({"schedule": "step", "schedule.gamma": 0.0}, "schedule=step: gamma is 0.0"),
        ({"schedule": "step", "schedule.every": 1, "schedule.gamma": 0.01, "rounds": 900}, "for round 900 is 0.0"),
        ({"schedule": "warmup", "schedule.rounds": 0}, "schedule=warmup: rounds is 0"),
        ({"schedule": "cosine", "schedule.length": 0}, "schedule=cosine: length is 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(sets: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        schedule_of(resolve(Common, {}, list(sets.items())))


def test_a_function_of_the_round_that_gives_no_rate_is_named() -> None:
    trainer = Trainer(lambda: torch.nn.Linear(2, 2), schedule=lambda round: -1.0)
    site = Site("ana", Samples(np.eye(2, dtype=np.float32), np.array([0, 1])))
    with pytest.raises(ValueError, match=r"the schedule's factor for round 3 is -1.0"):
        trainer(Request("train", trainer.initial(0), {"seed": 0, "round": 3}), site)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "ranking", "selection", "groups", "recsys", "cifar10"])
def test_every_recipe_follows_its_schedule(name: str, tmp_path: Path) -> None:
    small = {"clients": 10, "per_round": 3, "rounds": 2, "samples": 40, "wait": 0.0}
    if name == "cifar10":
        small |= {"batch_size": 20, "samples": 20}
    recipe = find(name)
    runs = {
        schedule: execute(name, resolve(recipe.config, {}, [*small.items(), *more]), tmp_path / schedule)["digest"]
        for schedule, more in {
            "constant": [],
            "step": [("schedule", "step"), ("schedule.every", 1)],
            "after": [("schedule", "step"), ("schedule.every", 2)],
        }.items()
    }
    assert runs["constant"] == runs["after"] != runs["step"]


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    rounds: int = 2


def test_a_task_whose_clients_keep_to_one_rate_is_refused(tmp_path: Path) -> None:
    def task(config: Config) -> Task:
        trainer = Trainer(lambda: torch.nn.Linear(2, 2))  # made without the configuration
        samples = Samples(np.eye(2, dtype=np.float32), np.array([0, 1]))
        return Task(trainer, {"ana": samples}, lambda: trainer.initial(0))

    with pytest.raises(
        ConfigError, match="schedule=cosine: this task's clients train with one learning rate; use constant"
    ):
        execute(Recipe(Config, task), {"schedule": "cosine"}, tmp_path / "a")
    with pytest.raises(ConfigError, match="schedule=cosine: this task's clients train"):
        execute("recsys", {"schedule": "cosine", "centralised": True, "rounds": 1}, tmp_path / "b")


def test_rounds_may_change_only_where_the_past_stays_as_it_was(tmp_path: Path) -> None:
    small: dict[str, Any] = {"clients": 6, "per_round": 3, "samples": 20, "epochs": 1}

    def begun(folder: str, rounds: int, **schedule: Any) -> Path:
        sets = {**small, "rounds": rounds} | {k.replace("_", "."): v for k, v in schedule.items()}
        execute("quickstart", resolve(find("quickstart").config, {}, list(sets.items())), tmp_path / folder)
        return tmp_path / folder

    with pytest.raises(ConfigError, match="rounds cannot change in a started run with schedule=cosine"):
        reopen(None, begun("cosine", 2, schedule="cosine"), [("rounds", 4)])
    fixed = begun("fixed", 2, schedule="cosine", schedule_length=4)
    _, config = reopen(None, fixed, [("rounds", 4)])
    again = execute("quickstart", config, fixed, resume=True)
    assert again["digest"] == execute("quickstart", config, tmp_path / "whole")["digest"]
    for name in ("step", "constant", "warmup"):
        assert reopen(None, begun(name, 2, schedule=name), [("rounds", 9)])[1].rounds == 9


def test_the_rate_of_a_round_is_that_of_the_schedule() -> None:
    samples = Samples(np.eye(2, dtype=np.float32), np.array([0, 1]))
    site, start = Site("ana", samples), Trainer(lambda: torch.nn.Linear(2, 2)).initial(0)

    def trained(trainer: Trainer, round: int) -> Any:
        return trainer(Request("train", start, {"seed": 0, "round": round}), site).arrays["weight"]

    scheduled = Trainer(lambda: torch.nn.Linear(2, 2), lr=0.4, schedule=Cosine(length=10))
    for round in (1, 6, 10):
        lr = 0.4 * (1 + math.cos(math.pi * (round - 1) / 10)) / 2
        assert np.array_equal(trained(scheduled, round), trained(Trainer(lambda: torch.nn.Linear(2, 2), lr=lr), round))
