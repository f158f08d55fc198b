"""The cytology recipe: columns, comparisons, refusals, privacy; and from its run to a screened slide."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mutirao.attacks import Attacked, SignFlip
from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.fleets.local import LocalFleet
from mutirao.recipes.task import find
from mutirao.report import execute
from mutirao.runs.tables import Table
from mutirao.slides.generate import LABORATORIES, Smear, write_slide

QUICK = {"rounds": 2, "views": 2, "weights": "random", "slide": r"^(\d+)-"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cytology")


@pytest.fixture(autouse=True)
def cache_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(home / "cache"))


@pytest.fixture(scope="module")
def federation(home: Path) -> Path:
    """Three hospitals and a test set of small pictures, dark ones abnormal."""
    draw = np.random.default_rng(0)
    for party, count in (("client_1", 6), ("client_2", 6), ("client_3", 6), ("global_test", 5)):
        for label, name in enumerate(("abnormal", "normal")):
            folder = home / "set" / party / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.normal(70 + 110 * label, 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i % 3}-{i}.png")
    return home / "set"


def config(data: Path | str, **more: Any) -> Any:
    return resolve(find("cytology").config, {**QUICK, "data": str(data), **more})


def test_a_run_has_the_papers_columns_and_sends_only_the_head(federation: Path, tmp_path: Path) -> None:
    execute("cytology", config(federation, rounds=3), tmp_path / "run")
    rows = Table(tmp_path / "run" / "history.csv").read()
    papers = {"round", "train_loss", "train_acc", "val_loss", "val_acc", "distributed_accuracy", "global_loss"}
    assert papers | {"global_acc", "balanced_accuracy", "auc", "ece", "sensitivity@95"} <= set(rows[-1])
    assert {"recall_abnormal", "recall_normal"} <= set(rows[-1])
    assert [int(r["replied"]) for r in rows] == [3, 3, 3]
    head = 3 * 4 * (320 * 2 + 2)
    assert head <= int(rows[0]["bytes_up"]) < head + 300  # and a few metrics
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert np.sum(verdict["confusion"]) == 10
    assert verdict["auc_interval"][0] <= verdict["auc"] <= verdict["auc_interval"][1]
    assert (tmp_path / "run" / "confusion.png").stat().st_size > 1000
    assert (tmp_path / "run" / "checkpoints" / "best.safetensors").exists()


def test_pooled_and_alone_use_the_same_training_pictures(federation: Path) -> None:
    make = find("cytology").task
    together = make(config(federation)).population
    pooled = make(config(federation, centralised=True)).population
    assert len(pooled["pooled"]) == sum(len(together[c]) for c in together)
    alone = make(config(federation, only="client_2")).population
    assert list(alone) == ["client_2"]
    assert np.array_equal(alone["client_2"].train.x, together["client_2"].train.x)
    with pytest.raises(ConfigError, match="no hospital 'client_9'"):
        make(config(federation, only="client_9"))


NESTED = "[" * 100_000


@pytest.mark.parametrize("told", ['["abnormal", "healthy"]', '["normal", "abnormal"]', "7", "{", NESTED])
def test_one_odd_class_list_stops_nobody_but_its_own_hospital(
    told: str, federation: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = find("cytology")
    settings = config(federation)
    task = recipe.task(settings)

    def handler(request: Request, site: Site) -> Reply:
        if request.do == "classes" and site.id == "client_3":
            return Reply({}, {"classes": np.frombuffer(told.encode(), np.uint8)}, n=6)
        return task.handler(request, site)

    run, fleet = Run(task.initial()), LocalFleet(handler, {c: task.population[c] for c in task.population})
    with caplog.at_level("WARNING", "mutirao"):
        rows = [done.row for done in recipe.flow(fleet, settings, task, run)]
    assert [(row["selected"], row["replied"], row["failed"]) for row in rows] == [(2, 2, 0)] * 2
    assert "client_3 is refused: its classes are" in caplog.text
    assert "agreed are 'abnormal', 'normal'" in caplog.text


def test_one_hospital_whose_updates_are_beyond_all_measure_does_not_end_the_run(federation: Path) -> None:
    recipe = find("cytology")
    settings = config(federation)
    task = recipe.task(settings)

    def handler(request: Request, site: Site) -> Reply:
        reply = task.handler(request, site)
        huge = {k: np.full_like(v, 3e38) for k, v in reply.arrays.items()}
        return replace(reply, arrays=huge) if request.do == "train" and site.id == "client_3" else reply

    run, fleet = Run(task.initial()), LocalFleet(handler, {c: task.population[c] for c in task.population})
    assert [done.row["failed"] for done in recipe.flow(fleet, settings, task, run)] == [1, 1]


def test_hospitals_most_of_whose_classes_differ_are_refused_with_the_difference(federation: Path) -> None:
    recipe = find("cytology")
    settings = config(federation)
    task = recipe.task(settings)

    odd = {c: task.population[c] for c in task.population}
    for name in ("client_2", "client_3"):
        odd[name] = replace(odd[name], classes=("abnormal", "healthy"))
    flow = recipe.flow(LocalFleet(task.handler, odd), settings, task, Run(task.initial()))
    with pytest.raises(ConfigError, match="client_3 lacks normal"):
        next(flow)
    with pytest.raises(ConfigError, match="lacks fungus"):
        recipe.task(config(federation, classes="abnormal,normal,fungus")).population["client_1"]


@pytest.mark.parametrize("trainable", ["last_block", "all"])
def test_more_than_the_head_can_be_trained(federation: Path, trainable: str) -> None:
    recipe = find("cytology")
    settings = config(federation, trainable=trainable, samples=2, rounds=2, views=1, lr=1e-4, clients=2)
    task = recipe.task(settings)
    run = Run(task.initial())
    before = {k: v.copy() for k, v in run.arrays.items()}
    few = {c: task.population[c] for c in ("client_1", "client_2")}
    list(recipe.flow(LocalFleet(task.handler, few), settings, _with(task, few), run))
    moved = [k for k in before if not np.array_equal(before[k], run.arrays[k])]
    assert len(moved) > 5
    assert not [k for k in before if k.endswith((".mean", ".var"))]  # statistics never travel


def _with(task: Any, population: Any) -> Any:
    return replace(task, population=population)


def test_local_privacy_lets_only_noised_updates_out(federation: Path, tmp_path: Path) -> None:
    settings = config(federation, privacy={"name": "local", "noise": 2.0}, classes="abnormal,normal")
    execute("cytology", settings, tmp_path / "run", pictures=False)
    row = Table(tmp_path / "run" / "history.csv").read()[-1]
    assert "distributed_accuracy" not in row
    assert "val_acc" not in row


def test_one_folder_of_classes_is_split_by_slide(federation: Path, tmp_path: Path) -> None:
    source = tmp_path / "one"
    for k, party in enumerate(("client_1", "client_2", "client_3")):
        for file in (federation / party).glob("*/*.png"):
            target = source / file.parent.name / f"{10 * k + int(file.name[0])}-{file.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    task = find("cytology").task(config(source, clients=2))
    assert list(task.population) == ["client_1", "client_2"]
    assert task.classes == 2


def test_an_optimiser_that_is_kept_survives_a_run_that_is_resumed(federation: Path, tmp_path: Path) -> None:
    from mutirao.core.arrays import digest
    from mutirao.runs.folder import load_run

    whole, kept = config(federation, rounds=4), config(federation, rounds=4, keep_optimizer=True)
    for name, chosen in (("afresh", whole), ("kept", kept), ("half", replace(kept, rounds=2))):
        execute("cytology", chosen, tmp_path / name)
    execute("cytology", kept, tmp_path / "half", resume=True)
    found = {name: digest(load_run(tmp_path / name).arrays) for name in ("afresh", "kept", "half")}
    assert found["half"] == found["kept"] != found["afresh"]


def test_from_synthetic_slides_to_a_screened_one(home: Path) -> None:
    out = home / "synthetic"
    execute("cytology", config("synthetic", side=1024, slides=2, rounds=3, views=1), out)
    for name in ("model.safetensors", "model.pt", "model.onnx"):
        made = CliRunner().invoke(main, ["slides", "export", str(out), "--out", str(home / name)])
        assert made.exit_code == 0, made.output
    slide = home / "other.tiff"
    write_slide(slide, Smear(1500, 1100, 0.5, per_mm2=40, abnormal=0.4, clustered=0.0), LABORATORIES[0], seed=5)
    words = ["slides", "screen", str(slide), "--model", str(home / "model.safetensors"), "--out", str(home / "page")]
    run = CliRunner().invoke(main, [*words, "--json"])
    assert run.exit_code == 0, run.output
    facts = json.loads(run.stdout)
    scores = [float(r["score"]) for r in Table(home / "page" / "scores.csv").read()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == facts["scored"] > 3
    assert facts["score"] == pytest.approx(np.mean(scores[:10]), abs=1e-5)
    page = (home / "page" / "index.html").read_text()
    assert "Not a medical device" in page
    assert "http" not in page  # it asks no other host for anything
    same = CliRunner().invoke(main, [*words[:4], str(out), *words[5:], "--json"])
    assert json.loads(same.stdout)["score"] == pytest.approx(facts["score"], abs=1e-5)

    import onnx
    from onnx.reference import ReferenceEvaluator

    from mutirao.slides.models import load_model
    from mutirao.slides.reading import open_slide

    model, opened = load_model(home / "model.safetensors"), open_slide(slide)
    tile = opened.region(0, 0, 224, 224)
    opened.close()
    assert np.array_equal(load_model(home / "model.pt")(tile), model(tile))
    held = torch.load(home / "model.pt", weights_only=True)  # tensors and plain facts, for anybody's torch
    assert held["facts"]["classes"] == list(model.classes)
    (home / "text.pt").write_text("no model")
    refused = CliRunner().invoke(main, [*words[:4], str(home / "text.pt")])
    assert refused.exit_code == 6
    assert "no model that can be read safely" in refused.output
    written = onnx.load(home / "model.onnx")
    found = ReferenceEvaluator(written).run(None, {"pictures": tile.transpose(2, 0, 1)[None]})[0]
    assert np.allclose(found[0], model(tile), atol=1e-4)
    assert "Not a medical device" in {p.key: p.value for p in written.metadata_props}["notice"]
    broken = home / "broken.safetensors"
    broken.write_bytes((home / "model.safetensors").read_bytes()[:-9])
    refused = CliRunner().invoke(main, [*words[:4], str(broken)])
    assert refused.exit_code == 6
    assert "corrupt or truncated" in refused.output


def test_a_hospital_that_a_screen_drops_does_not_end_the_run(federation: Path) -> None:
    chosen = config(federation, screen="norm")
    task = find("cytology").task(chosen)
    fleet = LocalFleet(Attacked(task.handler, frozenset({"client_2"}), SignFlip(-50.0)), task.population)
    rounds = list(find("cytology").flow(fleet, chosen, task, Run(task.initial())))
    assert [[r["client"] for r in done.clients if r["rejected"]] for done in rounds] == [["client_2"], ["client_2"]]
