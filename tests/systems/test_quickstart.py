"""The quickstart end to end, as `make run` runs it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute, write_report
from mutirao.robustness.attacks import Attacked, Backdoor, Inflated, LabelFlip, MinMax, SignFlip, malicious_among
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.quickstart import Config, recipe
from mutirao.training.samples import poison


def test_over_ninety_percent_with_pictures_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = execute("quickstart", resolve(Config, {}), out)
    assert summary["final"]["accuracy"] > 0.9
    assert summary["clients"] == 50
    assert summary["bytes_up"] > summary["rounds"] * 10 * 4 * 4810  # ten models of 4,810 numbers, and metrics
    for picture in ("curves.png", "partition.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert summary["digest"] in page
    assert "All 50 clients took part" in page or "of 50 clients never took part" in page
    assert len(json.loads((out / "history.json").read_text())) == 40


def test_the_pooled_reference_is_one_client(tmp_path: Path) -> None:
    config = resolve(Config, {"centralised": True, "rounds": 3})
    task = find("quickstart").task(config)
    assert len(task.population) == 1
    summary = execute("quickstart", config, tmp_path / "run")
    assert summary["clients"] == 1
    assert summary["final"]["accuracy"] > 0.9


def test_samples_caps_what_a_client_uses() -> None:
    task = find("quickstart").task(resolve(Config, {"samples": 5}))
    assert max(len(samples) for samples in task.population.values()) == 5


def test_the_worst_client_is_judged_when_asked_for(tmp_path: Path) -> None:
    config = resolve(Config, {"rounds": 4, "clients": 10, "per_round": 5, "clients_every": 2})
    summary = execute("quickstart", config, tmp_path / "run", pictures=False)
    final = summary["final"]
    assert 0 <= final["accuracy_worst"] <= final["accuracy_p10"] <= final["accuracy_p50"] <= 1
    rows = json.loads((tmp_path / "run" / "history.json").read_text())
    assert ["accuracy_worst" in row for row in rows] == [False, True, False, True]
    task = find("quickstart").task(config)
    model = load_file(tmp_path / "run" / "checkpoints" / "round_004.safetensors")
    own = [task.handler.evaluate(model, data.test)["accuracy"] for data in task.population.values()]  # type: ignore[attr-defined]
    assert final["accuracy_mean"] == pytest.approx(np.mean(own))  # on test data, never on what was trained on
    assert final["accuracy_worst"] == pytest.approx(min(own))
    assert final["loss_worst"] >= final["loss_p90"] > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, True),
        ({"aggregate": "qfedavg"}, True),
        ({"privacy": {"name": "central", "noise": 0.1}}, True),
        ({"clients_every": -1}, False),
        ({"privacy": {"name": "local", "noise": 0.1}}, False),  # clients tell nothing but updates
        ({"centralised": True}, False),
    ],
)
def test_every_run_ends_with_how_the_worst_tenth_fares(more: dict[str, Any], told: bool, tmp_path: Path) -> None:
    config = resolve(Config, {"rounds": 2, "clients": 10, "per_round": 5, **more})
    final = execute("quickstart", config, tmp_path / "run", pictures=False)["final"]
    assert ("accuracy_worst_decile" in final) == told
    if told:
        assert (
            final["accuracy_worst"] == final["accuracy_worst_decile"] <= final["accuracy_mean"]
        )  # a tenth of ten is one
        assert "the worst tenth of them have" in write_report(tmp_path / "run").read_text()


LIES = [SignFlip(), LabelFlip(), MinMax(own=0.5), Inflated(), Inflated(scale=-1.0), Backdoor()]


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("attack", [None, *LIES], ids=repr)
def test_a_third_of_liars_costs_little_and_hardly_any_honest_reply_is_dropped(attack: Any, partition: str) -> None:
    dealt = {"name": "dirichlet", "alpha": 0.3} if partition == "dirichlet" else "iid"
    settings = {"rounds": 12, "clients": 20, "per_round": 20, "partition": dealt}
    accuracy, dropped = {}, []
    for screen in ("none", "robust"):
        config = resolve(Config, {**settings, "screen": screen})
        task = recipe.prepare(config)
        liars = (
            malicious_among(dict.fromkeys(task.population, 0), 0.3, seed=0)
            if screen == "robust" and attack
            else frozenset()
        )
        handler = Attacked(task.handler, liars, attack, poison) if liars else task.handler
        rounds = list(recipe.flow(LocalFleet(handler, task.population), config, task, Run(task.initial())))
        accuracy[screen] = np.mean([done.row["accuracy"] for done in rounds[-3:]])
        dropped = [bool(r["rejected"]) for done in rounds for r in done.clients if r["client"] not in liars]
    points, share = (2, 0.02) if partition == "iid" else (4, 0.05)
    assert 100 * (accuracy["none"] - accuracy["robust"]) < points
    assert np.mean(dropped) < share


def test_a_screen_keeps_liars_out_of_any_recipe() -> None:
    rows = {}
    for screen in ("none", "robust"):
        config = resolve(Config, {"rounds": 6, "clients": 10, "per_round": 10, "screen": screen, "partition": "iid"})
        task = recipe.prepare(config)
        liars = frozenset({"c0", "c3", "c7"})
        fleet = LocalFleet(Attacked(task.handler, liars, SignFlip(2.0)), task.population)
        rounds = list(recipe.flow(fleet, config, task, Run(task.initial())))
        rows[screen] = rounds[-1]
    assert {r["client"] for r in rows["robust"].clients if r["rejected"]} == {"c0", "c3", "c7"}
    assert rows["robust"].row["rejected"] == 3
    assert rows["robust"].row["accuracy"] > rows["none"].row["accuracy"] + 0.1
    config = resolve(Config, {"screen": "norm", "privacy": "central"})
    with pytest.raises(ConfigError, match="screen=norm cannot be set with privacy=central"):
        next(iter(recipe.flow(fleet, config, task, Run(task.initial()))))
