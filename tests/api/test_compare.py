"""`mutirao.compare`: the grid of a study, from Python, in forked workers or in this process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.datasets import load_iris
from torch import nn

import mutirao as mu
from mutirao.api import compare as door
from mutirao.cli import main
from mutirao.dashboard.run_control import Refused, resume_words
from mutirao.dashboard.run_index import Shelf
from mutirao.errors import ConfigError
from mutirao.studies.study import read_study, run_study

pytestmark = pytest.mark.usefixtures("without_pictures")

X, Y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
BOTH: dict[str, dict[str, Any]] = {"FedAvg": {}, "FedYogi": {"aggregate": "fedyogi"}}
SMALL: dict[str, Any] = {"clients": 5, "per_round": 3, "rounds": 2}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.mark.slow
def test_workers_make_the_bytes_that_single_runs_make_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run before it leaves threads of torch and of ours behind, which a fork does not have."""
    alone = {seed: mu.run(model, (X, Y), **SMALL, seed=seed, engine="threads").digest for seed in (0, 1)}
    for name, workers in (("two", 2), ("one", 1), ("here", 0)):
        if name == "here":
            monkeypatch.setattr(door, "how_started", lambda: "here")
        table = mu.compare(model, (X, Y), methods=BOTH, seeds=2, workers=workers, out=name, engine="threads", **SMALL)
        assert not table.problems
        for seed, digest in alone.items():
            assert mu.load(f"{name}/cells/FedAvg/seed{seed}").digest == digest
    assert mu.run(model, (X, Y), **SMALL, engine="threads").digest == alone[0]


def test_the_table_is_the_one_of_a_study() -> None:
    table = mu.compare(model, (X, Y), methods=BOTH, seeds=[3, 4], **SMALL, metrics=["accuracy", "loss"])
    assert table.folder == Path("runs/compare-python")
    ends = [mu.load(table.folder / f"cells/FedYogi/seed{s}").final["accuracy"] for s in (3, 4)]
    row = table.frame.set_index(["method", "metric"]).loc[("FedYogi", "accuracy")]
    assert row["values"] == ends
    assert row["mean"] == pytest.approx(np.mean(ends))
    assert {line.metric for line in table.lines} == {"accuracy", "loss"}
    assert "FedYogi" in str(table)
    assert "┏" in str(table)
    assert repr(table) == "Table(runs/compare-python: FedAvg, FedYogi; 4 lines)"
    page = table._repr_html_()
    assert page.count("<tr>") == 5
    assert "FedYogi" in Path(table.report).read_text()
    assert json.loads((table.folder / "study.json").read_text())["recipe"] == "python"


def test_the_live_page_shows_it_and_sends_to_python_who_wants_it_resumed() -> None:
    mu.run(model, (X, Y), **SMALL, out="runs/one")
    mu.compare(model, (X, Y), methods=BOTH, seeds=1, **SMALL, out="runs/two")
    shelf = Shelf(Path("runs"))
    shelf.walk()
    assert {"one", "two", "two/cells/FedAvg/seed0"} <= shelf.items.keys()
    for key, said in (("one", "mutirao.run; call that again there"), ("two", "mutirao.compare; call that again there")):
        with pytest.raises(Refused, match=said):
            resume_words(shelf.items[key])
    for words in (["report", "runs/two"], ["plot", "runs/two", "bands", "--metric", "accuracy"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output


class Tell:
    """Standard error as a bar replaces it, and who wrote to it."""

    encoding = "utf-8"

    def __init__(self, to: Path) -> None:
        self.to = to

    def write(self, text: str) -> None:
        (self.to / str(os.getpid())).write_text(text)

    def flush(self) -> None:
        pass


def test_workers_do_not_write_through_a_bar_of_the_process_they_were_forked_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loud(outputs: Any, y: Any) -> Any:
        print("here", file=sys.stderr)
        return nn.functional.cross_entropy(outputs, y)

    (tmp_path / "who").mkdir()
    monkeypatch.setattr(sys, "stderr", Tell(tmp_path / "who"))
    mu.compare(model, (X, Y), methods=BOTH, seeds=1, loss=loud, progress="quiet", **SMALL)
    assert not list((tmp_path / "who").iterdir())
    mu.run(model, (X, Y), loss=loud, **SMALL, progress="quiet")
    assert [f.name for f in (tmp_path / "who").iterdir()] == [str(os.getpid())]


def test_methods_may_be_named_as_people_like_and_are_escaped() -> None:
    table = mu.compare(model, (X, Y), methods={"<b>&": {}}, seeds=1, **SMALL)
    assert "<b>&" not in table._repr_html_()
    assert "&lt;b&gt;&amp;" in table._repr_html_()


def test_settings_of_methods_and_of_axes_go_where_they_belong() -> None:
    methods = {"prox": {"aggregate": "fedprox", "mu": 0.5}, "adam": {"optimizer": "adam", "lr": 0.01}}
    table = mu.compare(model, (X, Y), methods=methods, seeds=1, over={"alpha": [0.5, 5.0]}, **SMALL)
    cells = sorted(p.parent.relative_to(table.folder / "cells").as_posix() for p in table.folder.rglob("summary.json"))
    assert cells == [f"{m}/alpha{a}-seed0" for m in ("adam", "prox") for a in (0.5, 5.0)]
    config = mu.load(table.folder / "cells/prox/alpha5.0-seed0").record.config
    assert (config["aggregate"]["mu"], config["partition"]["alpha"]) == (0.5, 5.0)


def test_it_goes_on_with_what_is_there_and_with_nothing_else() -> None:
    mu.compare(model, (X, Y), methods=BOTH, seeds=1, out="a", **SMALL)
    kept = Path("a/cells/FedAvg/seed0/summary.json").stat().st_mtime_ns
    mu.compare(model, (X, Y), methods=BOTH, seeds=2, out="a", **SMALL)
    assert Path("a/cells/FedAvg/seed0/summary.json").stat().st_mtime_ns == kept
    assert Path("a/cells/FedYogi/seed1/summary.json").exists()
    mu.run(model, (X, Y), out="b", **SMALL)
    for wrong, said in (
        (lambda: mu.compare(model, (X[1:], Y[1:]), methods=BOTH, seeds=1, out="a", **SMALL), "with another data"),
        (lambda: mu.compare(model, (X, Y), methods=BOTH, seeds=1, out="a", lr=0.5, **SMALL), "with another lr"),
        (lambda: mu.compare(model, (X, Y), methods=BOTH, seeds=1, out="b", **SMALL), "out: b holds a run"),
        (lambda: mu.run(model, (X, Y), out="a", **SMALL), "out: a holds a study"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"methods": {}}, "methods: name at least one"),
        ({"methods": ["fedavg"]}, "methods: name at least one"),
        ({"methods": {"a": "fedavg"}}, "methods: 'a' is 'fedavg', not a dict of settings"),
        ({"methods": {"a": {"agregate": "x"}}}, "method 'a': unknown setting 'agregate'; did you mean 'aggregate'?"),
        ({"methods": {"a/b": {}}}, "method 'a/b': expected a plain name"),
        ({"methods": BOTH, "baseline": "FedAvgg"}, "the baseline 'FedAvgg' is not one of the methods; did you mean"),
        ({"methods": BOTH, "seeds": 0}, "seeds: 0 is too small"),
        ({"methods": BOTH, "seeds": []}, "seed must be a list of values"),
        ({"methods": BOTH, "seed": 3}, "seed: a comparison goes over several"),
        ({"methods": BOTH, "metrics": ["acuracy"]}, "no cell has a metric 'acuracy'; did you mean 'accuracy'?"),
        ({"methods": BOTH, "metrics": "acuracy"}, "no cell has a metric 'acuracy'; did you mean 'accuracy'?"),
        ({"methods": {"a": {"loss": "mse"}}}, "method 'a': loss: it is an argument of mutirao.run"),
        ({"methods": {"a": {"clients": 5000}}, "seeds": 1}, "5000 clients"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mu.compare(model, (X, Y), **{**SMALL, **keywords})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_method_that_cannot_be_run_does_not_stop_the_others() -> None:
    table = mu.compare(model, (X, Y), methods={"FedAvg": {}, "many": {"clients": 5000}}, seeds=1, **SMALL)
    assert [line.method for line in table.lines if line.metric == "accuracy"] == ["FedAvg"]
    assert table.problems[0].startswith("many/seed0: partition=dirichlet")


SCRIPT = """
import mutirao as mu, torch, sys
x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
data = (x, (x[:, 0] > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
print(torch.get_num_threads(), float((torch.ones(2000, 2000) @ torch.ones(2000, 2000)).sum()))  # OpenMP's threads
print(mu.run(model, data, rounds=2, clients=4).best["accuracy"])
methods = {"FedAvg": {}, "FedYogi": {"aggregate": "fedyogi"}}
for again in range(2):
    print(mu.compare(model, data, methods=methods, seeds=2, rounds=ROUNDS, clients=4, out=f"out{again}"))
"""


def test_a_script_without_a_guard_compares_after_a_run_and_twice(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("ROUNDS", "2"))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("FedYogi") >= 4
    assert (tmp_path / "out0/table.json").read_text() == (tmp_path / "out1/table.json").read_text()


def test_ctrl_c_ends_it_with_its_workers_and_it_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("ROUNDS", "100000"))
    started = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(tmp_path.glob("out0/cells/*/*/checkpoints/round_004*"))) < 2:
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does it: to all of them
    _, said = started.communicate(timeout=120)
    assert started.returncode != 0
    assert said.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)  # nobody is left
    assert not (tmp_path / "out0/table.json").exists()


STUDY = """
recipe = "quickstart"
seeds = 1
[settings]
rounds = 1
epochs = 1
[methods.FedAvg]
"""


def test_named_recipes_are_compared_too() -> None:
    table = mu.compare("quickstart", methods=BOTH, seeds=1, rounds=1, epochs=1, out="a")
    Path("same.toml").write_text(STUDY)
    assert run_study(read_study(Path("same.toml")), Path("b"), start="here") == []
    first = table.folder / "cells/FedAvg/seed0/summary.json"
    digests = [json.loads(f.read_text())["digest"] for f in (first, Path("b/cells/FedAvg/seed0/summary.json"))]
    assert digests[0] == digests[1]
