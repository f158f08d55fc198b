"""The cytology recipe with a head for whole slides: judged by slide, exported, and attention drawn on a slide."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.cytology.slides.models import load_model
from mutirao.systems.cytology.slides.readers import open_slide
from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Smear, write_slide

QUICK = {"rounds": 2, "views": 1, "weights": "random", "side": 1024, "slides": 4, "head": "abmil", "stain": "reinhard"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slides")


@pytest.fixture(autouse=True)
def cache_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(home / "cache"))


def config(**more: Any) -> Any:
    return resolve(find("cytology").config, {**QUICK, **more})


@pytest.mark.slow
def test_a_head_for_slides_is_federated_judged_by_slide_exported_and_its_attention_drawn(home: Path) -> None:
    out = home / "run"
    execute("cytology", config(), out)
    verdict = json.loads((out / "verdict.json").read_text())
    assert (verdict["judged"], verdict["slides"], np.sum(verdict["confusion"])) == ("slides", 6, 6)
    assert verdict["auc_interval"][0] <= verdict["auc"] <= verdict["auc_interval"][1]
    assert verdict["accuracy_interval"][0] <= verdict["accuracy"] <= verdict["accuracy_interval"][1]
    row = CsvTable(out / "history.csv").read()[-1]
    assert int(row["replied"]) == 3
    weights = 2 * (320 * 64 + 64) + 64 + 2 * 320 + 2
    assert 3 * 4 * weights <= int(row["bytes_up"]) < 3 * 4 * weights + 900

    for name in ("model.safetensors", "model.onnx"):
        made = CliRunner().invoke(main, ["slides", "export", str(out), "--out", str(home / name)])
        assert made.exit_code == 0, made.output
    slide = home / "other.tiff"
    write_slide(slide, Smear(1500, 600, 0.5, per_mm2=60, clustered=0.0), LABORATORIES[0], seed=5)
    words = ["slides", "screen", str(slide), "--model", str(home / "model.safetensors"), "--out", str(home / "page")]
    run = CliRunner().invoke(main, [*words, "--json"])
    assert run.exit_code == 0, run.output
    facts, rows = json.loads(run.stdout), CsvTable(home / "page" / "scores.csv").read()
    attention = [float(r["attention"]) for r in rows]
    assert attention == sorted(attention, reverse=True)
    assert sum(attention) == pytest.approx(1.0, abs=1e-4)
    assert facts["score_is"] == "by all tiles together (head abmil)"
    assert "most attended tiles" in (home / "page" / "index.html").read_text()

    from onnx import load
    from onnx.reference import ReferenceEvaluator

    model, opened = load_model(home / "model.safetensors"), open_slide(slide)
    tiles = [opened.region(int(r["x"]), int(r["y"]), int(r["side"]), 512) for r in rows]
    opened.close()
    found, weighed = model.classify_slide(np.stack([model.features(tile) for tile in tiles]))
    assert facts["score"] == pytest.approx(found[model.abnormal].sum(), abs=1e-5)
    assert attention == pytest.approx(weighed.tolist(), abs=1e-5)
    written = load(home / "model.onnx")
    assert {p.key: p.value for p in written.metadata_props}["stain"] == "reinhard"
    pictures = np.concatenate([model.prepare(tile).numpy() for tile in tiles[:2]])
    elsewhere = ReferenceEvaluator(written).run(None, {"pictures": pictures})
    here = model.classify_slide(np.stack([model.features(tile) for tile in tiles[:2]]))
    assert np.allclose(elsewhere[0][0], here[0], atol=1e-4)
    assert np.allclose(elsewhere[1], here[1], atol=1e-4)


@pytest.mark.parametrize("more", [{"head": "mean", "centralised": True}, {"head": "max", "aggregate": "fedmedian"}])
def test_the_other_heads_pooled_slides_and_other_aggregators_work(more: dict[str, Any]) -> None:
    recipe, chosen = find("cytology"), config(**more)
    task = recipe.prepare(chosen)
    run = Run(task.initial())
    rounds = list(recipe.flow(LocalFleet(task.handler, dict(task.population)), chosen, task, run))
    assert len(rounds) == 2
    assert 0 <= rounds[-1].row["auc"] <= 1
    assert sum(len(task.population[c]) for c in task.population) < 3 * 2 + 1


def test_what_does_not_go_with_a_head_for_slides_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="trainable=all: head=abmil is trained on features of a frozen backbone"):
        find("cytology").prepare(config(trainable="all")).initial()
    with pytest.raises(ConfigError, match="slides: 2 a laboratory are too few for a head of whole slides"):
        find("cytology").prepare(config(slides=2))
