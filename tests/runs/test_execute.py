"""One path for the command line, Flower and scripts: what it takes, what it refuses, and what it leaves behind."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import iris as shared
import mutirao
from iris import IrisConfig, accuracy, iris, iris_task
from mutirao.cli import main
from mutirao.config import Common, Part, read_toml, resolve
from mutirao.core.arrays import Arrays
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts
from mutirao.experiments.task import Recipe, Task, find, recipe_name
from mutirao.runs.execute import execute
from mutirao.runs.reader import Record

SHORT = IrisConfig(rounds=2)


def scored(**more: Any) -> Recipe:
    """Iris, judged also by a regret that falls."""

    def task(config: IrisConfig) -> Task:
        def scores(arrays: Arrays) -> dict[str, float]:
            found = accuracy(arrays)
            return found | {"regret": 1 - found["accuracy"], "val_loss": 2.0}

        return replace(iris_task(config), evaluate=scores, **more)

    return Recipe(IrisConfig, task)


def test_a_recipe_is_given_by_name_or_as_it_is_and_a_folder_by_a_path_or_text(tmp_path: Path) -> None:
    named = execute("iris:iris", SHORT, tmp_path / "a")
    given = execute(iris, SHORT, str(tmp_path / "b"))
    assert given["digest"] == named["digest"]
    assert (tmp_path / "a/config.toml").read_text() == (tmp_path / "b/config.toml").read_text()
    assert read_toml(tmp_path / "b/config.toml")["recipe"] == given["recipe"] == "iris:iris"


def test_the_name_of_a_recipe_leads_back_to_it() -> None:
    assert recipe_name(find("recsys")) == "recsys"
    assert recipe_name(iris) == "iris:iris"  # though this module has it, too
    assert recipe_name(shared.iris) == "iris:iris"
    assert recipe_name(scored()) == ""


def test_a_recipe_without_a_name_says_that_its_run_cannot_be_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nameless = scored()
    with caplog.at_level(logging.WARNING, "mutirao"):
        first = execute(nameless, SHORT, tmp_path / "run")
    assert "cannot be repeated from its config.toml" in caplog.text
    done = CliRunner().invoke(main, ["run", str(tmp_path / "run/config.toml"), "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert "does not say which recipe it is for" in done.stderr
    more = execute(nameless, replace(SHORT, rounds=3), tmp_path / "run", resume=True)
    assert (first["rounds"], more["rounds"]) == (2, 3)


def test_settings_may_be_a_table_or_nothing(tmp_path: Path) -> None:
    default = execute(iris, None, tmp_path / "a")
    assert default["rounds"] == 4
    table = {"rounds": 2, "aggregate": {"name": "fedavgm", "momentum": 0.5}, "select": "aoi"}
    execute(iris, table, tmp_path / "b")
    assert read_toml(tmp_path / "b/config.toml")["aggregate"] == {"name": "fedavgm", "lr": 1.0, "momentum": 0.5}


def test_parts_may_be_given_by_name_in_python(tmp_path: Path) -> None:
    plain: Any = IrisConfig(rounds=2, select="aoi", aggregate=Part("fedavg"))  # type: ignore[arg-type]
    execute(iris, plain, tmp_path / "a")
    execute(iris, resolve(IrisConfig, {"rounds": 2, "select": "aoi", "aggregate": "fedavg"}), tmp_path / "b")
    assert (tmp_path / "a/config.toml").read_text() == (tmp_path / "b/config.toml").read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": -1.0}, "lr: -1.0 is too small"),
        ({"lr": float("nan")}, "lr: must be a finite number, not nan"),
        ({"rounds": 0}, "rounds: 0 is too small"),
        ({"rounds": "two"}, "rounds: 'two' is not a whole number"),
        ({"optimizer": "adem"}, "optimizer: 'adem' is not a choice"),
        ({"aggregate": "fedavgg"}, "no part is called 'fedavgg'; did you mean 'fedavg'?"),
        ({"aggregate": Part("fedadam", {"lrr": 1.0})}, "aggregate=fedadam has no setting 'lrr'"),
    ],
)
def test_what_is_made_in_python_is_checked_as_on_the_command_line(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    for given in (replace(SHORT, **wrong), wrong, Common(**wrong)):
        with pytest.raises(ConfigError) as caught:
            execute(iris, given, tmp_path / "new" / "run")
        assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def missing_data(config: IrisConfig) -> Task:
    raise ConfigError("data: nothing is there")


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_is_refused_by_the_flow_leaves_nothing_behind_either(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "runs" / "refused"
    if there:
        out.mkdir(parents=True)
    with pytest.raises(ConfigError, match="clients_every: the clients of this task have no test data"):
        execute("ranking", {"rounds": 1, "clients": 4, "queries": 50, "clients_every": 1}, out)
    with pytest.raises(ConfigError, match="needs the metric 'entropy', which the clients of this task do not support"):
        execute(iris, {"select": "aoiu"}, out)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ([".lock"] if there else [])
    assert execute(iris, SHORT, out)["rounds"] > 0


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_fails_leaves_no_folder_behind_but_one_that_was_there(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "runs" / "first"
    if there:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is there"):
        execute(Recipe(IrisConfig, missing_data), SHORT, out)
    assert (tmp_path / "runs").exists() == there
    assert not there or (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"track": "mlflow"}, "track=mlflow needs a package"),
        ({"track": "tensorboard"}, "track=tensorboard needs a package"),
        ({"privacy": "central"}, "privacy=central needs Opacus"),
    ],
)
def test_extras_are_asked_for_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], said: str
) -> None:
    def gone(name: str, *_: Any) -> Any:
        if name in ("mlflow", "tensorboard"):
            raise ImportError(name)
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr("mutirao.runs.trackers.importlib.import_module", gone)
    monkeypatch.setattr("mutirao.runs.execute.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=said):
        execute(Recipe(IrisConfig, missing_data), settings, tmp_path / "run")  # it never gets to its data
    assert list(tmp_path.iterdir()) == []


def test_a_judge_whose_direction_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not known whether a higher 'regret' is better"):
        execute(scored(judge="regret"), SHORT, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_direction_of_a_metric_is_declared_and_kept(tmp_path: Path) -> None:
    recipe = scored(judge="regret", directions={"regret": "lower"})
    summary = execute(recipe, replace(SHORT, rounds=6), tmp_path / "run")
    record = Record.of(tmp_path / "run")
    assert summary["directions"] == {"accuracy": "higher", "regret": "lower", "val_loss": "lower"}
    assert summary["best"]["regret"] == min(row["regret"] for row in record.rows)
    assert record.direction("regret") == "lower"
    assert "regret" not in execute(scored(), SHORT, tmp_path / "other")["directions"]


def test_pictures_and_page_are_handed_in(tmp_path: Path) -> None:
    seen: list[str] = []
    recipe = scored(exhibits=Artifacts(files={"note.txt": lambda run, path: path.write_text("x") and None}))
    execute(recipe, SHORT, tmp_path / "bare")
    bare = {file.name for file in (tmp_path / "bare").iterdir()}
    assert "note.txt" in bare  # the task's files are part of the record
    assert not {"report.html", "curves.png"} & bare

    def draw(run: Run, task: Task, out: Path) -> None:
        seen.append(f"drawn after {run.round} rounds")

    execute(recipe, SHORT, tmp_path / "own", draw=draw, report=lambda out: seen.append(out.name))
    assert seen == ["drawn after 2 rounds", "own"]
    mutirao.execute(recipe, SHORT, tmp_path / "full")
    assert {"report.html", "curves.png", "note.txt"} <= {file.name for file in (tmp_path / "full").iterdir()}
