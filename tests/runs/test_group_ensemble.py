"""What several groups' models say together, asked of a run folder; and sets and networks of the user's own."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.arrays import part_of
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.runs.execute import execute
from mutirao.runs.group_ensemble import combine_run
from mutirao.runs.run_folder import load_run

SMALL = {"clients": 10, "rounds": 2, "epochs": 2, "warm_epochs": 8, "per_round": 1.0, "references": 0, "samples": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("combining") / "run"
    assert len(execute("groups", SMALL, out)["groups"]) == 5
    return out


def by_hand(folder: Path, client: str, weights: dict[str, float]) -> float:
    """The share of an asker's own test samples that a weighted mean of softmaxes names rightly, written out."""
    task, run = find("groups").task(resolve(find("groups").config, SMALL)), load_run(folder)
    maps = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["class_maps"]
    x, y = task.population[client].test.batch(slice(0, None))
    total = np.zeros((len(y), 10))
    for group, weight in weights.items():
        w = {k: torch.from_numpy(v) for k, v in part_of(run.arrays, group).items()}
        hidden = torch.relu(x @ w["0.weight"].T + w["0.bias"])
        p = torch.softmax(hidden @ w["2.weight"].T + w["2.bias"], 1).numpy()
        total[:, maps[group]] += weight * p
    return float(np.mean(total.argmax(1) == y.numpy()))


@pytest.mark.parametrize("by", ["sample", "validation", "distance", "equal"])
def test_it_is_the_weighted_mean_of_probabilities(folder: Path, by: str) -> None:
    found = combine_run(folder, "c3", by)
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.own["combined"] == pytest.approx(by_hand(folder, "c3", found.weights))
    for group in found.weights:
        assert found.own[group] == pytest.approx(by_hand(folder, "c3", {group: 1.0}))
    if by in ("sample", "distance"):  # an asker is sent to its own group
        assert max(found.weights, key=lambda g: found.weights[g]) == found.group
    if by == "equal":
        assert found.union["combined"] > max(v for g, v in found.union.items() if g != "combined")


def test_the_command_leaves_weights_and_predictions(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["combine", str(folder), "--client", "c3", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "weights.json").read_text(encoding="utf-8"))
    assert told == json.loads(done.output)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open(encoding="utf-8")))
    right = np.mean([row["label"] == row["guess"] for row in rows])
    assert right == pytest.approx(told["own"]["combined"])
    said = CliRunner().invoke(main, ["combine", str(folder), "--client", "c3"]).output
    assert "its own group, alone" in said
    assert (folder / "combined" / "c3" / "weights.json").is_file()


def test_who_is_not_there_and_runs_without_groups_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'nobody' in"):
        combine_run(folder, "nobody")
    execute("quickstart", {"clients": 4, "rounds": 1}, tmp_path / "one")
    with pytest.raises(ConfigError, match="has no groups to combine"):
        combine_run(tmp_path / "one", "c0")
    two = {"cluster": "kmeans", "cluster.groups": 2, "warm_epochs": 1, "rounds": 1}
    execute("tabular", two | {"clients": 6}, tmp_path / "table")
    with pytest.raises(ConfigError, match="expected a task that classifies"):
        combine_run(tmp_path / "table", "c0")


def test_groups_of_any_classifier_can_be_asked(tmp_path: Path) -> None:
    two = {"cluster": "kmeans", "cluster.groups": 2, "warm_epochs": 1, "rounds": 1, "clients": 6}
    execute("quickstart", two, tmp_path / "run")
    found = combine_run(tmp_path / "run", "c2", "equal")
    assert set(found.weights) == {"g0", "g1"}
    assert 0 <= found.own["combined"] <= 1


OWN = """
import numpy as np
from torch import nn

def load(seed):
    draw = np.random.default_rng(seed)
    y = np.tile(np.arange(4), 60)
    x = np.eye(4)[y] + draw.normal(0, 0.1, (240, 4))
    return x[:200], y[:200], x[200:], y[200:]

def network(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, outputs))

def wrong(seed):
    return np.zeros(3)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_groups.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_groups", raising=False)
    return "own_groups"


def test_data_and_network_of_ones_own(own_code: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "data": f"{own_code}:load",
        "model": f"{own_code}:network",
        "clients": 8,
        "epochs": 30,
    }
    summary = execute("groups", settings | {"partition": {"name": "by_class", "classes": 2}}, tmp_path / "run")
    assert summary["final"]["rand"] == 1.0
    assert len(summary["groups"]) == 2
    assert summary["final"]["accuracy"] > 0.9
    other = execute("quickstart", {"data": f"{own_code}:load", "clients": 4, "rounds": 1}, tmp_path / "other")
    assert 0 <= other["final"]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data", "own_groups:wrong", "gives a ndarray; expected a Labelled"),
        ("data", "own_groups:nothing", "cannot load 'own_groups:nothing'"),
        ("data", "os:getcwd", "is not a function that gives a data set but part of Python itself"),
        ("model", "own_groups:load", "own_groups:load' fails"),
        ("model", "os:getcwd", "is not a function that gives a torch module but part of Python itself"),
        ("model", "smal", "is not a choice; did you mean 'small'"),
    ],
)
def test_what_is_no_set_or_network_is_refused(own_code: str, key: str, value: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        execute("groups", {**SMALL, key: value}, tmp_path / "run")


def test_a_file_that_names_such_code_needs_trust(own_code: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'recipe = "quickstart"\ndata = "{own_code}:load"\n', encoding="utf-8")
    done = CliRunner().invoke(main, ["run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "names code to run: own_groups:load" in done.output
