"""Clients come and go as the model says, whoever resumes the run and however often it asks."""

from pathlib import Path

import numpy as np
import pytest

from mutirao.config import Part, build
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError, TooFewClients
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.availability import Churn, Daily, Markov, Schedule, always
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.quickstart import Config

NAMES = [f"c{i:04d}" for i in range(4000)]


def masks(model: object, rounds: int, seed: int = 0) -> np.ndarray:
    before, found = None, []
    for t in range(1, rounds + 1):
        before = model(NAMES, t, before, seed)  # type: ignore[operator]
        found.append(before)
    return np.array(found)


def test_always_is_always() -> None:
    assert masks(always, 3).all()


def test_a_markov_chain_leaves_and_comes_as_often_as_it_says() -> None:
    found = masks(Markov(leave=0.1, come=0.3), 50)
    assert found.mean() == pytest.approx(0.75, abs=0.01)
    assert found[0].mean() == pytest.approx(0.75, abs=0.03)  # from the first round on
    before, after = found[:-1], found[1:]
    assert (~after[before]).mean() == pytest.approx(0.1, abs=0.005)
    assert after[~before].mean() == pytest.approx(0.3, abs=0.01)
    assert (masks(Markov(), 5, seed=1) != masks(Markov(), 5, seed=2)).any()


def test_a_day_has_one_stay_of_its_share_at_the_same_time() -> None:
    found = masks(Daily(period=24, share=0.25), 48)
    assert found.sum(0).tolist() == [12] * 4000
    np.testing.assert_array_equal(found[:24], found[24:])
    assert found.mean(1).min() > 0.2  # all around the globe there is always someone
    together = masks(Daily(period=24, share=0.25, spread=0.0), 24)
    assert together.mean(1).tolist() == [1.0] * 6 + [0.0] * 18


def test_a_schedule_is_followed_and_who_is_not_in_it_is_always_there(tmp_path: Path) -> None:
    file = tmp_path / "stays.csv"
    file.write_text("client,from,until\nana,2,3\nana,5,5\nbia,1,1\n")
    model = Schedule(str(file))
    found = [model(["ana", "bia", "caio"], t, None, 0).tolist() for t in range(1, 7)]
    assert [row[0] for row in found] == [False, True, True, False, True, False]
    assert [row[1] for row in found] == [True, False, False, False, False, False]
    assert all(row[2] for row in found)


@pytest.mark.parametrize(
    "text", ["client,from\nana,1\n", "client,from,until\nana,one,2\n", "client,from,until\nana,1\n"]
)
def test_a_schedule_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "stays.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"^available.file: [^\n]*client, from, until$"):
        Schedule(str(tmp_path / "stays.csv"))(["ana"], 1, None, 0)
    with pytest.raises(ConfigError, match="cannot read"):
        Schedule(str(tmp_path / "nowhere.csv"))(["ana"], 1, None, 0)


@pytest.mark.parametrize("settings", [{"leave": 1.5}, {"come": 0.0}, {"come": float("nan")}])
def test_wrong_probabilities_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="available=markov"):
        build("available", Part("markov", settings))
    with pytest.raises(ConfigError, match="available=daily"):
        build("available", Part("daily", {"share": 0.0}))


def settings(**more: object) -> Config:
    from mutirao.config import resolve

    small = {"clients": 12, "per_round": 3, "epochs": 1, "rounds": 8, "available": "markov"}
    return resolve(Config, small | more)


def test_only_those_there_are_selected_and_the_record_says_how_many_were(tmp_path: Path) -> None:
    config = settings(**{"available.leave": 0.5, "available.come": 0.5})
    task, run = find("quickstart").task(config), None
    run = Run(task.initial(), seed=config.seed)
    fleet = LocalFleet(task.handler, task.population)
    before = None
    for done in find("quickstart").flow(fleet, config, task, run):
        before = Markov(0.5, 0.5)(fleet.clients(), done.row["round"], before, config.seed)
        there = {c for c, yes in zip(fleet.clients(), before, strict=True) if yes}
        assert {row["client"] for row in done.clients} <= there
        assert done.row["available"] == len(there)
    assert len({row["available"] for row in run.history}) > 1


def test_a_run_that_was_interrupted_meets_the_same_clients(tmp_path: Path) -> None:
    whole = execute("quickstart", settings(), tmp_path / "whole", pictures=False)
    execute("quickstart", settings(rounds=3), tmp_path / "parts", pictures=False)
    parts = execute("quickstart", settings(), tmp_path / "parts", resume=True, pictures=False)
    assert parts["digest"] == whole["digest"]


def test_asking_twice_in_a_round_moves_nobody() -> None:
    run = Run({"w": np.zeros(1)})
    churn = Churn(LocalFleet(lambda request, site: None, dict.fromkeys(NAMES[:50])), Markov(0.5, 0.5), run)  # type: ignore[arg-type, return-value]
    assert churn.clients() is churn.clients()
    first = churn.clients()
    run.round = 1
    assert churn.clients() != first


def test_at_night_the_server_waits_for_the_morning(tmp_path: Path) -> None:
    config = settings(available="daily", **{"available.period": 10, "available.share": 0.2, "available.spread": 0.0})
    execute("quickstart", config, tmp_path / "run", pictures=False)
    rows = CsvTable(tmp_path / "run/history.csv").read()
    assert [int(row["waited"]) for row in rows] == [0, 0, 8, 0, 8, 0, 8, 0]
    assert all(row["available"] == "12" for row in rows)


def test_when_nobody_ever_comes_the_run_ends_at_once_with_a_clear_line(tmp_path: Path) -> None:
    lines = [f"c{i:02d},1,2" for i in range(12)]
    (tmp_path / "stays.csv").write_text("\n".join(["client,from,until", *lines]) + "\n")
    config = settings(available="schedule", **{"available.file": str(tmp_path / "stays.csv")})
    with pytest.raises(TooFewClients, match="waited 0 s for 1 clients, 0 came"):
        execute("quickstart", config, tmp_path / "run", pictures=False)


def test_a_schedule_of_nobody_who_is_here_is_refused_and_of_some_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stays.csv"
    file.write_text("client,from,until\nc03,2,3\nc04,2,3\n")
    with pytest.raises(ConfigError, match="names c03, c04, but clients are called c3, c4, c5"):
        Schedule(str(file))(["c3", "c4", "c5"], 1, None, 0)
    Schedule(str(file))(["c03", "c4"], 1, None, 0)
    assert "names c04, but there are no such clients" in caplog.text


@pytest.mark.parametrize("recipe", ["quickstart", "groups"])
def test_who_judges_after_a_round_changes_neither_its_record_nor_a_resumed_run(recipe: str, tmp_path: Path) -> None:
    settings = {"clients": 10, "rounds": 4, "epochs": 1, "available": {"name": "markov", "leave": 0.4, "come": 0.4}}
    settings |= {"personal": "finetune"} if recipe == "quickstart" else {"warm_epochs": 1, "references": 0}
    whole = execute(recipe, settings, tmp_path / "whole", pictures=False)
    execute(recipe, settings | {"rounds": 2}, tmp_path / "cut", pictures=False)
    again = execute(recipe, settings, tmp_path / "cut", resume=True, pictures=False)
    assert again["digest"] == whole["digest"]
    rows, cut = (CsvTable(tmp_path / name / "history.csv").read() for name in ("whole", "cut"))
    assert [row["available"] for row in rows] == [row["available"] for row in cut]
    assert all(int(row["selected"]) <= int(row["available"]) for row in rows)
