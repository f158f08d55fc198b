"""Tuning: equal effort, validation data alone, and a study that confirms what was chosen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import parse_assignment, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES
from mutirao.report import execute
from mutirao.studies import search_space
from mutirao.studies.confirmation import confirming, merged, write_tuning
from mutirao.studies.study import Cell, read_study
from mutirao.studies.tuning import Trial, Tuning, read_tuning, trial_cells, tune, warnings, winners
from mutirao.systems.quickstart import Config
from mutirao.systems.tabular import recipe as tabular

HEAD = """
recipe = "quickstart"
baseline = "fedavg"
metrics = ["accuracy", "loss"]
seeds = 2
[threshold]
accuracy = 0.5
[settings]
rounds = 2
clients = 6
per_round = 6
epochs = 1
partition = { name = "dirichlet", alpha = 0.5 }
[methods.fedavg]
[methods.prox]
lr = 0.7
aggregate = { name = "fedprox", mu = 0.1 }
[published]
source = "Silva, 2020"
values = { prox = { accuracy = 0.9 } }
"""
STUDY = (
    HEAD
    + """
[tune]
metric = "accuracy"
seeds = [7, 8]
[tune.grid]
lr = [0.00001, 0.1, 0.2]
[tune.own.prox]
lr = [0.1]
"aggregate.mu" = [0.01, 1.0, 2.0]
"""
)


def tuning_of(folder: Path, text: str = STUDY, *sets: str) -> Tuning:
    (folder / "s.toml").write_text(text)
    return read_tuning(folder / "s.toml", [parse_assignment(s) for s in sets])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning, list[Trial]]:
    folder = tmp_path_factory.mktemp("tuning")
    tuning = tuning_of(folder, STUDY, "hidden=16")
    trials = tune(tuning, folder / "out", workers=1)
    write_tuning(tuning, trials, folder / "out")
    return folder, tuning, trials


def test_every_method_gets_the_same_number_of_trials_in_the_same_places(done: tuple[Path, Tuning, list[Trial]]) -> None:
    folder, tuning, trials = done
    assert [trial.name for trial in trials] == [f"{m}-{i}" for m in ("fedavg", "prox") for i in (1, 2, 3)]
    assert all(len(trial.values) == 2 and not trial.fault for trial in trials)
    assert tuning.runs == len(list((folder / "out/cells").glob("*/*/summary.json"))) == 12


def test_every_run_is_judged_by_validation_data(done: tuple[Path, Tuning, list[Trial]]) -> None:
    folder, _, _ = done
    configs = [file.read_text() for file in (folder / "out/cells").glob("*/*/config.toml")]
    assert all('judge_by = "vali"' in text and "hidden = 16" in text for text in configs)
    assert {f"seed = {s}" in text for text in configs for s in (0, 1)} == {False}


def test_the_best_mean_wins_and_an_edge_is_said_loudly(done: tuple[Path, Tuning, list[Trial]]) -> None:
    _, tuning, trials = done
    best = winners(tuning, trials)
    for method in ("fedavg", "prox"):
        means = [sum(t.values) / 2 for t in trials if t.method == method]
        assert sum(best[method].values) / 2 == max(means)
    ends = Trial("fedavg", 1, (("lr", 0.2),), (0.9, 0.9))
    inner = Trial("prox", 1, (("lr", 0.1), ("aggregate.mu", 1.0)), (0.5, 0.5))
    assert warnings(tuning, [ends, inner]) == [
        "fedavg: lr = 0.2 is the largest tried; the best may lie beyond, so widen the search"
    ]
    lower = [Trial("prox", i, (), (v,), sign=-1.0) for i, v in enumerate((0.5, 0.4, 0.4), 1)]
    assert winners(tuning, lower)["prox"].number == 2  # the first of equals, and of a loss the smallest
    lost = Trial("fedavg", 1, (("lr", 0.1),), fault="diverged")
    assert "fedavg: no trial finished" in warnings(tuning, [lost, inner])


def test_the_confirming_study_is_the_same_with_tuned_settings_fresh_seeds_and_the_test_set(
    done: tuple[Path, Tuning, list[Trial]],
) -> None:
    folder, tuning, trials = done
    study, best = read_study(folder / "out/confirm-s.toml"), winners(tuning, trials)
    assert (study.methods, study.baseline, study.metrics) == (("fedavg", "prox"), "fedavg", ("accuracy", "loss"))
    assert study.threshold == {"accuracy": 0.5}
    assert study.published.claims["prox", "accuracy"].value == 0.9
    assert [cell.place for cell in study.cells if cell.method == "prox"] == [(("seed", 0),), (("seed", 1),)]
    before = {cell.name: cell for cell in tuning.study.cells}

    def resolved(cell: Cell, *more: tuple[str, object]) -> Config:
        return resolve(Config, {}, (*cell.settings, *more))

    for cell in study.cells:
        assert resolved(cell) == resolved(before[cell.name], *best[cell.method].point)
        assert resolved(cell).judge_by == "test"
        assert resolved(cell).hidden == 16


def test_finished_trials_are_kept(done: tuple[Path, Tuning, list[Trial]]) -> None:
    folder, _, trials = done
    files = {f: f.stat().st_mtime_ns for f in (folder / "out/cells").glob("*/*/summary.json")}
    again = tune(tuning_of(folder, STUDY, "hidden=16"), folder / "out", workers=1)
    assert [t.values for t in again] == [t.values for t in trials]
    assert {f: f.stat().st_mtime_ns for f in files} == files


def test_a_search_that_numbers_its_points_anew_is_refused_and_chooses_nothing(
    done: tuple[Path, Tuning, list[Trial]],
) -> None:
    folder, _, trials = done
    moved = STUDY.replace("[0.00001, 0.1, 0.2]", "[0.05, 0.1, 0.2]")  # as a new first value would move the others
    with pytest.raises(ConfigError, match=r"fedavg-1.*was made with other settings.*; to widen a search, add values"):
        tune(tuning_of(folder, moved, "hidden=16"), folder / "out", workers=1)
    again = tune(tuning_of(folder, STUDY, "hidden=16"), folder / "out", workers=1)
    assert [t.values for t in again] == [t.values for t in trials]


def test_a_setting_that_diverges_loses_and_says_why(tmp_path: Path) -> None:
    text = STUDY.replace("[0.00001, 0.1, 0.2]", "[0.1, 1e30]").replace("[0.01, 1.0, 2.0]", "[0.01, 1.0]")
    tuning = tuning_of(tmp_path, text.replace("seeds = [7, 8]", "seeds = 1"))
    trials = tune(tuning, tmp_path / "out", workers=1)
    assert tuning.axes == {"seed": [1000]}
    assert "seed1000" in trials[1].fault
    assert winners(tuning, trials)["fedavg"].number == 1
    write_tuning(tuning, trials, tmp_path / "out")
    table = json.loads((tmp_path / "out/trials.json").read_text())
    assert [row["chosen"] for row in table["trials"][:2]] == [True, False]
    assert table["trials"][1]["mean"] is None
    assert trials[1].fault in (tmp_path / "out/trials.csv").read_text()


RANGE = (
    HEAD
    + """
[tune]
seeds = [7]
trials = 3
[tune.range]
lr = { low = 0.01, high = 0.5, log = true }
"""
)


def test_a_range_gives_every_method_as_many_proposals_and_goes_on_where_it_was_left(tmp_path: Path) -> None:
    short = tune(tuning_of(tmp_path, RANGE.replace("trials = 3", "trials = 2")), tmp_path / "out", workers=1)
    tuning = tuning_of(tmp_path, RANGE)
    files = {f: f.stat().st_mtime_ns for f in (tmp_path / "out/cells").glob("*/*/summary.json")}
    trials = tune(tuning, tmp_path / "out", workers=1)
    assert len(files) == 4
    assert {f: f.stat().st_mtime_ns for f in files} == files
    assert [t.method for t in trials] == ["fedavg"] * 3 + ["prox"] * 3
    assert {t.name: t.point for t in short}.items() <= {t.name: t.point for t in trials}.items()
    assert [t.point for t in trials[:3]] == [t.point for t in trials[3:]]  # all begin alike
    assert len({t.point for t in trials}) == 3
    plan = json.loads((tmp_path / "out/study.json").read_text())
    assert len(plan["cells"]) == 6
    (tmp_path / "confirm.toml").write_text(confirming(tuning, trials))
    assert read_study(tmp_path / "confirm.toml").methods == ("fedavg", "prox")


def test_without_optuna_a_range_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_space, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mutirao\[tune\]', or give a \[tune.grid\]"):
        tuning_of(tmp_path, RANGE)
    assert tuning_of(tmp_path, STUDY).effort == 3  # a grid needs none


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "there is no [tune] table"),
        (STUDY.replace("[tune.grid]", "[tune.gird]"), "unknown key 'gird'; did you mean 'grid'?"),
        (STUDY.replace("[tune.own.prox]", "[tune.own.porx]"), "no method 'porx'; did you mean 'prox'?"),
        (STUDY.replace("[0.01, 1.0, 2.0]", "[0.01]"), "prox would have 1 points to try and fedavg 3"),
        (STUDY.replace("seeds = [7, 8]", "seeds = [1, 7]"), "1 is a seed of the study"),
        (STUDY.replace("seeds = [7, 8]", 'seeds = "x"'), "tune.seeds must be a list"),
        (STUDY.replace("seeds = [7, 8]", "trials = 3"), "a grid is tried completely"),
        (STUDY.replace("0.00001", "-1.0"), "method 'fedavg-1': lr: -1.0 is too small"),
        (STUDY.replace('"aggregate.mu"', '"aggregate.nu"'), "has no setting 'nu'"),
        (STUDY.replace("rounds = 2", 'rounds = 2\njudge_by = "vali"'), "the study sets judge_by"),
        (RANGE.replace("trials = 3", "trials = 0"), "tune.trials: 0 is not"),
        (RANGE.replace("low = 0.01, high = 0.5, log = true", "low = -1.0, high = 0.5"), "lr: -1.0 is too small"),
        (RANGE.replace("[tune.range]", "grid = { lr = [0.1] }\n[tune.range]"), "one of them"),
        (
            STUDY.replace('"accuracy", "loss"', "").replace('metric = "accuracy"\nseeds = [7', "seeds = [7"),
            "name the metric",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tuning_of(tmp_path, text)
    assert said in str(caught.value)


def test_what_is_tuned_cannot_be_set_and_unknown_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lr is tuned for fedavg, so it cannot be set too"):
        tuning_of(tmp_path, STUDY, "lr=0.5")
    tuning = tuning_of(tmp_path, STUDY.replace('metric = "accuracy"', 'metric = "acuracy"'))
    with pytest.raises(ConfigError, match=r"no cell has a metric 'acuracy'"):
        tune(tuning, tmp_path / "out", workers=1)


def test_a_recipe_without_validation_data_is_refused(tmp_path: Path) -> None:
    text = 'recipe = "iris:iris"\n[methods.a]\n[tune]\nmetric = "accuracy"\ngrid = { lr = [0.1, 0.2] }\n'
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"iris:iris has no validation data.* accepts judge_by=vali"):
        read_tuning(tmp_path / "s.toml", trust=lambda where, names: True)


@pytest.mark.parametrize("recipe", [name for name in NAMES if name != "quickstart"])
def test_recipes_with_validation_data_are_judged_by_it(tmp_path: Path, recipe: str) -> None:
    text = f'recipe = "{recipe}"\nseeds = 1\n[methods.a]\n[tune]\nmetric = "loss"\ngrid = {{ lr = [0.1, 0.2] }}\n'
    tuning = tuning_of(tmp_path, text)
    cells = trial_cells(tuning, Trial("a", 1, (("lr", 0.1),)))
    assert all(("judge_by", "vali") in cell.settings for cell in cells)


TABULAR = """
recipe = "tabular"
metrics = ["balanced_accuracy"]
seeds = 1
[settings]
data = "wine"
rounds = 2
clients = 3
model = "linear"
[methods.fedavg]
[methods.prox]
aggregate = { name = "fedprox", mu = 0.1 }
[tune]
seeds = [7]
[tune.grid]
lr = [0.00001, 0.1]
"""


@pytest.mark.slow
def test_a_table_is_tuned_by_rows_that_neither_train_nor_test(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path, TABULAR)
    trials = tune(tuning, tmp_path / "out", workers=1)
    assert [trial.fault for trial in trials] == [""] * 4
    best = winners(tuning, trials)
    assert [best[method].point for method in ("fedavg", "prox")] == [(("lr", 0.1),)] * 2
    write_tuning(tuning, trials, tmp_path / "out")
    (cell, _) = read_study(tmp_path / "out/confirm-s.toml").cells
    chosen = resolve(tabular.Config, {}, cell.settings)
    assert (chosen.judge_by, chosen.lr, chosen.seed) == ("test", 0.1, 0)
    (tried,) = trial_cells(tuning, trials[1])
    config = resolve(tabular.Config, {}, tried.settings)
    assert trials[1].values == (execute("tabular", config, tmp_path / "again")["final"]["balanced_accuracy"],)
    tested = replace(config, judge_by="test")
    assert trials[1].values != (execute("tabular", tested, tmp_path / "test")["final"]["balanced_accuracy"],)


def test_the_command_tunes_writes_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = STUDY.replace("[0.00001, 0.1, 0.2]", "[0.00001, 0.3]").replace("[0.01, 1.0, 2.0]", "[0.01, 1.0]")
    Path("s.toml").write_text(text.replace("seeds = [7, 8]", "seeds = [7]"))
    ran = CliRunner().invoke(main, ["tune", "s.toml", "--workers", "1"])
    assert ran.exit_code == 0, ran.output
    assert "mutirao study runs/tune-s/confirm-s.toml" in ran.stdout
    assert "WARNING: fedavg: lr = 0.3 is the largest tried" in ran.stderr
    assert "# WARNING: fedavg: lr = 0.3 is the largest tried" in Path("runs/tune-s/confirm-s.toml").read_text()
    told = CliRunner().invoke(main, ["tune", "s.toml", "--workers", "1", "--json"])
    assert json.loads(told.stdout)["chosen"]["fedavg"] == {"lr": 0.3}
    refused = CliRunner().invoke(main, ["tune", "s.toml", "--trials", "3"])
    assert refused.exit_code != 0
    assert refused.stderr.startswith("error: s.toml: tune.trials: a grid is tried completely")


def test_settings_of_which_the_last_holds() -> None:
    pairs = [("lr", 1), ("aggregate.name", "fedprox"), ("aggregate.mu", 1), ("aggregate.mu", 2), ("lr", 3)]
    assert merged(pairs) == {"lr": 3, "aggregate": {"name": "fedprox", "mu": 2}}
    assert merged([("select", "aoiu"), ("select.alpha", 0.5)]) == {"select": {"name": "aoiu", "alpha": 0.5}}
