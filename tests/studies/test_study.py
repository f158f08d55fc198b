"""A study: a grid that resumes, tables that claim no more than they show."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.cli.options import STOPPED
from mutirao.config import parse_assignment
from mutirao.errors import ConfigError
from mutirao.report import render
from mutirao.studies.comparison import compare_methods, latex, markdown, reached_in, write_tables
from mutirao.studies.study import read_study, run_study

STUDY = """
recipe = "quickstart"
baseline = "fedavg"
metrics = ["accuracy", "loss"]
seeds = 3
[threshold]
accuracy = 0.3
[settings]
rounds = 3
clients = 6
per_round = 6
epochs = 1
[methods.fedavg]
aggregate = "fedavg"
[methods.slow]
lr = 0.001
[methods.adam]
aggregate = { name = "fedadam", lr = 0.05 }
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(STUDY)
    study = read_study(folder / "small.toml")
    assert len(study.cells) == 9
    assert run_study(study, folder / "out", workers=1) == []
    return folder


def test_the_table_says_what_the_runs_show(finished: Path) -> None:
    study = read_study(finished / "small.toml")
    lines = {(x.method, x.metric): x for x in compare_methods(study, finished / "out")}
    ends = [
        json.loads((finished / "out/cells" / cell.name / "summary.json").read_text())["final"]["accuracy"]
        for cell in study.cells
        if cell.method == "slow"
    ]
    slow = lines["slow", "accuracy"]
    assert slow.values == tuple(ends)
    assert slow.final.mean == pytest.approx(sum(ends) / 3)
    assert slow.verdict == "worse"
    assert lines["slow", "loss"].verdict == "worse"  # a larger loss is worse
    assert lines["fedavg", "accuracy"].verdict == "baseline"
    assert slow.reached.endswith("(0 of 3)")
    assert slow.reached.startswith("> 3")
    assert slow.against is not None
    assert slow.against.p == 1.0  # of being better
    assert slow.against.p_t < 0.05  # what goes with the verdict
    assert slow.p_holm >= slow.against.p_t


def test_finished_cells_are_kept_and_lost_ones_made_again(finished: Path) -> None:
    study, out = read_study(finished / "small.toml"), finished / "out"
    kept = out / "cells/fedavg/seed0/summary.json"
    lost = out / "cells/fedavg/seed1/summary.json"
    before, digest = kept.stat().st_mtime_ns, json.loads(lost.read_text())["digest"]
    lost.unlink()
    seen: list[str] = []
    assert run_study(study, out, workers=1, watch=lambda done, name: seen.append(name)) == []
    assert len(seen) == 9
    assert kept.stat().st_mtime_ns == before
    assert json.loads(lost.read_text())["digest"] == digest


def test_a_cell_made_with_other_settings_is_not_taken_for_this_one(finished: Path) -> None:
    study = read_study(finished / "small.toml", [parse_assignment("lr=0.2"), parse_assignment("seeds=1")])
    problems = run_study(study, finished / "out", workers=1)
    assert len(problems) == 3
    assert all("other settings" in p for p in problems)


def test_the_command_writes_tables_and_curves(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    done = CliRunner().invoke(main, ["study", "small.toml", "--out", "out", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "worse" in done.stdout
    for name in ("table.csv", "table.md", "table.tex", "table.json", "curves_accuracy.png"):
        assert (finished / "out" / name).stat().st_size > 50
    table = json.loads((finished / "out/table.json").read_text())
    assert table["baseline"] == "fedavg"
    assert {line["verdict"] for line in table["lines"]} <= {"baseline", "better", "worse", "not shown"}
    lines = compare_methods(read_study(finished / "small.toml"), finished / "out")
    assert markdown(lines).count("\n") == 2 + len(lines)
    assert r"\textbf{" in latex(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name at least one method"),
        ('recipe = "quickstart"\nmethod = 1', "unknown key 'method'; did you mean 'methods'?"),
        ('recipe = "quikstart"\n[methods.a]', "did you mean 'quickstart'?"),
        ('recipe = "quickstart"\nbaseline = "b"\n[methods.a]', "the baseline 'b' is not one of the methods"),
        ('recipe = "quickstart"\n[over]\nlr = 1\n[methods.a]', "lr must be a list"),
        ('recipe = "quickstart"\n[methods.a]\nlr = "x"', "method 'a': lr: 'x' is not a number"),
        ('recipe = "quickstart"\nseeds = "x"\n[methods.a]', "seed must be a list"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_study(tmp_path / "wrong.toml")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "/abs", "a/b", "..", "a\\u0000b", ".hidden", ""])
def test_a_methods_name_never_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "wrong.toml").write_text(f'recipe = "quickstart"\n[methods."{name}"]\nlr = 0.1\n')
    with pytest.raises(ConfigError, match="expected a plain name"):
        read_study(tmp_path / "wrong.toml")


@pytest.mark.parametrize("value", ["../x", "/abs", "a/b", "..", "a%2Fb"])
def test_nor_does_a_value_of_an_axis(tmp_path: Path, value: str) -> None:
    (tmp_path / "s.toml").write_text(f'recipe = "quickstart"\n[over]\ndata = ["{value}", "digits"]\n[methods.a]\n')
    names = {cell.name for cell in read_study(tmp_path / "s.toml").cells}
    assert len(names) == 2
    assert all(len(Path(name).parts) == 2 and Path(name).parts[0] == "a" for name in names)


def test_a_metric_that_no_cell_has_is_refused_before_the_grid_starts(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY.replace('"loss"', '"acuracy"'))
    with pytest.raises(ConfigError, match=r"no cell has a metric 'acuracy'; did you mean 'accuracy'\?"):
        run_study(read_study(tmp_path / "s.toml"), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


ODD = """
from iris import accuracy, iris, iris_task
from dataclasses import replace
from mutirao.experiments.task import Recipe

def task(config):
    scores = lambda arrays: accuracy(arrays) | {"regret": float(config.lr), "val_loss": float(config.lr)}
    return replace(iris_task(config), evaluate=scores, metrics=())

recipe = Recipe(iris.config, task)
"""
ODD_STUDY = """
recipe = "odd:recipe"
metrics = ["accuracy", "regret", "val_loss"]
seeds = 5
[settings]
rounds = 1
[methods.small]
lr = 0.1
[methods.large]
lr = 0.2
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the workers
    (tmp_path / "odd.toml").write_text(ODD_STUDY)
    return tmp_path


def test_what_is_not_declared_is_refused_by_name_once_a_cell_of_each_method_is_there(odd: Path) -> None:
    (odd / "odd.toml").write_text(ODD_STUDY.replace('"val_loss"', '"ece"'))
    with pytest.raises(ConfigError, match="no cell has a metric 'ece'"):
        run_study(read_study(odd / "odd.toml", trust=lambda where, names: True), odd / "out", workers=1)
    assert len(list((odd / "out").glob("cells/*/*/summary.json"))) < 10


def test_a_larger_loss_is_worse_and_of_a_metric_nobody_knows_there_is_no_verdict(odd: Path) -> None:
    study = read_study(odd / "odd.toml", trust=lambda where, names: True)
    assert run_study(study, odd / "out", workers=1) == []
    lines = compare_methods(study, odd / "out")
    verdicts = {(x.method, x.metric): x.verdict for x in lines}
    assert verdicts["large", "val_loss"] == "worse"
    assert verdicts["small", "val_loss"] == "baseline"
    assert verdicts["large", "regret"] == "direction not declared"
    write_tables(study, lines, odd / "out")
    assert json.loads((odd / "out/table.json").read_text())["directions"] == {"accuracy": "higher", "val_loss": "lower"}
    page = render(odd / "out")
    assert "regret: no method is called better or worse, as its direction is not declared." in page
    assert "best regret" not in page


BROKEN = """
import os
from mutirao.systems import quickstart
from mutirao.experiments.task import Recipe

def task(config):
    if config.lr == 0.2 and config.seed == 0:
        os.kill(os.getpid(), 9)
    if config.lr == 0.2:
        raise ValueError("a bug")
    return quickstart.task(config)

recipe = Recipe(quickstart.Config, task)
"""


def test_a_cell_that_breaks_or_is_killed_is_lost_alone(odd: Path) -> None:
    (odd / "broken.py").write_text(BROKEN)
    text = ODD_STUDY.replace("odd:", "broken:").replace("seeds = 5", "seeds = 2")
    (odd / "broken.toml").write_text(text.replace('metrics = ["accuracy", "regret", "val_loss"]', ""))
    study = read_study(odd / "broken.toml", trust=lambda where, names: True)
    killed = "its process was killed (SIGKILL), as it happens where memory runs out"
    lost = [f"large/seed0: {killed}", "large/seed1: ValueError: a bug"]
    assert run_study(study, odd / "out", workers=1) == lost
    assert len(list((odd / "out").glob("cells/small/*/summary.json"))) == 2


def workers_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found += [int(stat.parent.name)] if int(fields[1]) == pid and fields[0] != "Z" else []
    return found


@pytest.mark.slow
def test_ctrl_c_ends_a_study_within_seconds_and_leaves_no_worker_behind(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(STUDY.replace("rounds = 3", "rounds = 100000"))
    words = [sys.executable, "-m", "mutirao.cli", "study", "long.toml", "--out", "out", "--workers", "2"]
    study = subprocess.Popen(
        words,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background have none
    )
    try:
        began = time.monotonic()
        while len(list(tmp_path.glob("out/cells/*/*/history.csv"))) < 2:
            assert time.monotonic() - began < 120
            assert study.poll() is None
            time.sleep(0.1)
        started = workers_of(study.pid)
        assert len(started) >= 2
        study.send_signal(signal.SIGINT)  # to the study alone: its workers must hear of it from it
        began = time.monotonic()
        _, said = study.communicate(timeout=60)  # its cells would take days
    finally:
        study.kill()
    assert study.returncode == 130
    assert said.strip().splitlines()[-1] == f"error: {STOPPED}"
    assert "Traceback" not in said
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() - began < 60
        time.sleep(0.1)


def test_rounds_to_a_threshold_with_runs_that_never_get_there() -> None:
    curves = [list(enumerate(values, 1)) for values in ([0.1, 0.5], [0.6, 0.7], [0.1, 0.2], [0.2, 0.3])]
    assert reached_in([*curves[:2], curves[3]], 0.5) == "2 (2 of 3)"
    assert reached_in([curves[0], *curves[2:]], 0.5) == "> 2 (1 of 3)"
    falling = [(10, 0.95), (20, 0.91), (30, 0.9)]  # judged every tenth round, and lower is better
    assert reached_in([falling], 0.91, lower=True) == "20 (1 of 1)"
    assert reached_in([falling], 0.8, lower=True) == "> 30 (0 of 1)"


def test_a_cell_made_before_a_setting_existed_is_still_that_cell(finished: Path) -> None:
    study = read_study(finished / "small.toml")
    file = finished / "out/cells" / study.cells[0].name / "config.toml"
    whole = file.read_text()
    file.write_text(whole.replace('\n[devices]\nname = "none"\n', "\n").replace("clients_every = 0\n", ""))
    assert file.read_text() != whole
    assert run_study(study, finished / "out", workers=1) == []
    file.write_text(whole.replace("rounds = 3", "rounds = 4"))
    (problem,) = run_study(study, finished / "out", workers=1)
    assert "was made with other settings" in problem
    file.write_text(whole)
