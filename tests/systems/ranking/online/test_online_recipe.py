"""Online learning to rank end to end: users' clicks teach, runs repeat and resume, a wire changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clicking import write_log
from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.studies.study import read_study, run_study
from mutirao.systems.ranking.online.recipe import Config

__all__ = ["identity"]  # a fixture that holds for all tests here, too

SMALL: dict[str, Any] = {"queries": 60, "clients": 8, "rounds": 4}


def run_of(**settings: Any) -> Run:
    recipe = find("online")
    config = resolve(recipe.config, SMALL, list(settings.items()))
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    list(recipe.flow(LocalFleet(task.worker, task.population), config, task, run))
    return run


def test_users_clicks_make_the_ranker_better_than_a_random_one(tmp_path: Path) -> None:
    config = resolve(Config, SMALL | {"clients": 20, "rounds": 40, "evaluate_every": 40})
    summary = execute("online", config, tmp_path / "run", pictures=False)
    task = find("online").task(config)
    untrained = task.evaluate(task.initial())["ndcg@10"]
    assert summary["final"]["ndcg@10"] > untrained + 0.05
    rows = CsvTable(tmp_path / "run/history.csv").read()
    assert [float(row["interactions"]) for row in rows] == [80.0 * t for t in range(1, 41)]
    seen = [float(row["train_shown_ndcg"]) for row in rows]
    assert np.mean(seen[-10:]) > np.mean(seen[:10]) + 0.03  # what users see is better, too
    assert float(rows[-1]["online_ndcg"]) == pytest.approx(sum(0.9995**t * v for t, v in enumerate(seen)))
    lost = [80 * float(row["train_shown_loss"]) for row in rows]
    assert float(rows[-1]["regret"]) == pytest.approx(sum(lost))
    assert summary["directions"]["regret"] == "lower"


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    config = resolve(Config, SMALL)
    whole = execute("online", config, tmp_path / "whole", pictures=False)
    execute("online", resolve(Config, SMALL | {"rounds": 2}), tmp_path / "part", pictures=False)
    again = execute("online", config, tmp_path / "part", resume=True, pictures=False)
    assert again["digest"] == whole["digest"]
    last = [CsvTable(tmp_path / name / "history.csv").read()[-1] for name in ("whole", "part")]
    for column in ("interactions", "online_ndcg", "regret", "ndcg@10"):
        assert last[0][column] == last[1][column]


def test_over_flowers_messages_the_model_is_the_same() -> None:
    recipe = find("online")
    config = resolve(recipe.config, SMALL | {"clients": 5, "rounds": 2, "clicks": "mixed", "partition": "by_query"})
    task = recipe.prepare(config)
    grid = LoopGrid(client_app(lambda _: task))
    for name in task.population:
        grid.join(name=name)
    there, here = Run(task.initial()), Run(task.initial())
    list(recipe.flow(FlowerFleet(grid, timeout=20, greet=20), config, task, there))
    list(recipe.flow(LocalFleet(task.handler, task.population), config, task, here))
    assert digest(there.arrays) == digest(here.arrays)
    assert [row["regret"] for row in there.history] == [row["regret"] for row in here.history]


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "by_query_groups", "clicks": "mixed"},
        {"partition": "dirichlet"},  # documents of a query at several users: each has a list of its own
        {"hidden": 8, "clicks": "near_random", "noise": 0.3, "schedule": "cosine"},
        {"privacy": "shares", "privacy.repeatable": True, "privacy.sensitivity": 1.0},
        {"centralised": True},
        {"per_round": 3, "scale": "none"},
    ],
)
def test_settings_go_together_and_repeat(settings: dict[str, Any]) -> None:
    runs = [run_of(rounds=2, **settings) for _ in range(2)]
    assert runs[0].history[-1]["failed"] == 0
    assert runs[0].history[-1]["interactions"] == 2 * 4 * (3 if "per_round" in settings else 8)
    assert digest(runs[0].arrays) == digest(runs[1].arrays)


def test_noise_by_shares_is_of_the_whole_round() -> None:
    """Without anything learnt, what is left of 8 users' shares in their mean is Laplace noise / 8."""
    settings = {"rounds": 1, "privacy": "shares", "privacy.sensitivity": 5.0, "privacy.epsilon": 0.5}
    run = run_of(lr=1e-12, **settings)
    task = find("online").prepare(resolve(Config, SMALL))
    noise = run.arrays["weight"] - task.initial()["weight"]
    assert np.abs(noise).mean() == pytest.approx(10 / 8, rel=0.35)  # E|Laplace(b)| = b


def test_privacy_of_our_own_lets_nothing_leave_but_the_update() -> None:
    run = run_of(rounds=2, privacy="local")
    assert run.history[-1]["interactions"] == 64
    assert not {"online_ndcg", "regret", "train_shown_ndcg"} & set(run.history[-1])


def test_sums_under_masks_are_the_plain_ones() -> None:
    plain, masked = run_of(rounds=2), run_of(rounds=2, secure="secagg+")
    assert masked.arrays["weight"] == pytest.approx(plain.arrays["weight"], abs=1e-3)
    assert masked.history[-1]["regret"] == pytest.approx(plain.history[-1]["regret"], rel=1e-3)


def test_mixed_users_click_each_in_a_way_of_its_own() -> None:
    users = find("online").task(resolve(Config, SMALL | {"clients": 30, "clicks": "mixed"})).population
    assert len({user.clicks for user in users.values()}) == 3


def test_a_log_gives_users_queries_and_clicks(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "aol", queries=200)
    settings = {"data": str(folder), "clicks": "logged", "clients": 3, "rounds": 30, "lr": 0.3}
    config = resolve(Config, settings)
    task = find("online").prepare(config)
    assert sorted(task.population) == ["300", "301", "302"]
    assert len(find("online").task(resolve(Config, settings | {"clients": 0})).population) == 4
    summary = execute("online", config, tmp_path / "run", pictures=False)
    assert summary["final"]["mrr@10"] > 0.8  # the log's users like what a linear ranker can tell


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clicks": "logged"}, "these data have grades and no clicks"),
        ({"epochs": 3}, "epochs: a user takes one step a query"),
        ({"clients": 0}, "only a log has a number of users of its own"),
        ({"clicks": "perfct"}, "is not a choice; did you mean 'perfect'"),
        ({"personal": "fedper"}, "has its own models"),
        ({"aggregate": "fedrisk"}, "needs the extra 'squared_errors'"),
        ({"privacy": "dpsgd"}, "privacy=dpsgd is for tasks whose clients are a Trainer"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_of(**settings)


def test_a_log_is_not_clicked_on_by_simulated_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a log has users and clicks of its own"):
        run_of(data=str(write_log(tmp_path / "aol")))


def test_a_study_compares_what_users_lost(tmp_path: Path) -> None:
    study = tmp_path / "clicks.toml"
    asked = 'recipe = "online"\nmetrics = ["regret", "online_ndcg"]\n'
    study.write_text(asked + "[methods.perfect]\n[methods.odd]\nnoise = 1.0\n")
    out = tmp_path / "out"
    sets = [("rounds", 2), ("clients", 3), ("queries", 50)]
    assert run_study(read_study(study, sets), out, workers=1, start="here") == []
    assert {path.name for path in (out / "cells").iterdir()} == {"perfect", "odd"}
