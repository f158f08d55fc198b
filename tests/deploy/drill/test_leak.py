"""What an update reveals: attacks get samples back from a plain one; pins of a policy refuse the worst, noise all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.cli import main
from mutirao.core.arrays import Arrays
from mutirao.deploy.leak_drill import (
    LeakDrill,
    count_recovered,
    craft_thresholds,
    drill_leak,
    nearest_samples,
    read_thresholds,
)
from mutirao.deploy.policy.pins import content_hash
from mutirao.privacy.trials import Trial


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    folder, trial = tmp_path_factory.mktemp("leak"), Trial("leak", "")
    drill_leak(folder, trial, LeakDrill())
    return folder, trial


def results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(t["attack"], t["rule"]): t for t in json.loads((folder / "leak.json").read_text())["told"]}


@pytest.mark.slow
def test_a_wide_crafted_model_gives_images_back_and_the_templates_pins_refuse_it(drilled: tuple[Path, Trial]) -> None:
    folder, trial = drilled
    found = results(folder)
    plain = found["images, a wide model", "plain"]
    assert plain["recovered"] > 200
    assert plain["samples"] == 992
    under = found["images, a wide model", "policy"]
    assert (under["recovered"], under["refused"]) == (0, "pinned.epochs")
    assert trial.good


def test_noise_of_one_clip_leaves_nothing_to_recover(drilled: tuple[Path, Trial]) -> None:
    found = results(drilled[0])
    assert found["images, a wide model", "noise"]["recovered"] == 0
    assert found["images, the agreed model", "noise"]["recovered"] == 0
    assert found["membership, crafted units", "noise"]["auc"] < 0.7  # 0.5 is chance, and 0.04 its deviation


def test_the_pins_alone_do_not_keep_everything(drilled: tuple[Path, Trial]) -> None:
    """Said in the table and on the page: crafted weights in the agreed model get at samples, and at membership."""
    found = results(drilled[0])
    for rule in ("plain", "policy"):
        assert 0 < found["images, the agreed model", rule]["recovered"] < 64  # no more than there are hidden units
        assert found["membership, crafted units", rule]["low"] > 0.8
    assert "13 of 992 by the agreed model" in drilled[1].happened


def test_there_is_a_picture_and_a_table(drilled: tuple[Path, Trial]) -> None:
    folder, trial = drilled
    assert (folder / "leak.png").read_bytes().startswith(b"\x89PNG")
    assert len(trial.facts["table"]) == 5
    assert trial.facts["table"][0].split() == ["plain", "under", "the", "policy", "clip", "1,", "noise", "1"]


@pytest.mark.slow
def test_a_policy_without_pins_fails_the_drill_and_its_records_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        f'[recipes]\nquickstart = "{content_hash("quickstart")}"\n[asked]\nrequests = ["train"]\nmin_samples = 50\n'
        '[reply]\narrays = ["*"]\nmetrics = ["*"]\n'
    )
    said = CliRunner().invoke(main, ["drill", "leak", "--policy", str(path), "--folder", str(tmp_path / "out")])
    assert said.exit_code == 1, said.output
    assert said.output.startswith("BAD      leak")
    assert results(tmp_path / "out" / "leak")["images, a wide model", "policy"]["recovered"] > 200
    assert {p.name for p in tmp_path.iterdir()} == {"policy.toml", "out"}


def test_a_recipe_that_cannot_be_attacked_so_is_said_in_one_line(tmp_path: Path) -> None:
    said = CliRunner().invoke(main, ["drill", "leak", "--recipe", "cytology", "--folder", str(tmp_path)])
    assert said.exit_code == 1
    assert "'cytology' has no setting 'hidden'" in said.output
    assert "Traceback" not in said.output


def descend(arrays: Arrays, x: Any, y: Any, rate: float) -> Arrays:
    """One step of gradient descent on the mean cross-entropy of a two-layer network, by hand."""
    w1, b1, w2, b2 = (arrays[k] for k in ("a", "b", "c", "d"))
    before = x @ w1.T + b1
    hidden = np.maximum(before, 0.0)
    outputs = hidden @ w2.T + b2
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    slope = p / p.sum(1, keepdims=True)
    slope[np.arange(len(y)), y] -= 1.0
    slope /= len(y)
    back = (slope @ w2) * (before > 0)
    steps = {"a": back.T @ x, "b": back.sum(0), "c": slope.T @ hidden, "d": slope.sum(0)}
    return {k: arrays[k] - rate * steps[k] for k in arrays}


def blank(units: int, features: int, classes: int = 4) -> Arrays:
    shapes = {"a": (units, features), "b": (units,), "c": (classes, units), "d": (classes,)}
    return {k: np.zeros(shape) for k, shape in shapes.items()}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 3.0))
def test_what_lies_alone_between_two_thresholds_is_read_exactly(seed: int, rate: float) -> None:
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(12, 7)), draw.integers(0, 4, 12)
    sent = craft_thresholds(blank(2000, 7), draw.normal(size=(300, 7)), np.random.default_rng(seed + 1))
    found = read_thresholds(sent, descend(sent, x, y, rate), 7)
    passed = (x @ (sent["a"] / 1e-4).T > -sent["b"] / 1e-4).sum(1)  # how many thresholds each sample passes
    alone = [i for i in range(12) if passed[i] and (passed == passed[i]).sum() == 1]
    nearest, error = nearest_samples(found, x)
    assert {int(nearest[passed[i] - 1]) for i in alone} == set(alone)
    assert max((error[passed[i] - 1] for i in alone), default=0.0) < 1e-4
    assert count_recovered(found, x) >= len(alone)


def test_nothing_found_matches_nothing() -> None:
    assert count_recovered(np.full((5, 3), np.nan), np.ones((4, 3))) == 0
    nearest, error = nearest_samples(np.array([[1.0, 0.0], [np.nan, 0.0]]), np.array([[0.0, 2.0], [1.0, 0.1]]))
    assert nearest[0] == 1
    assert error[0] == pytest.approx(0.1 / np.hypot(1.0, 0.1))
    assert error[1] == np.inf
