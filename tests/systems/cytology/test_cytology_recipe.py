"""The cytology recipe: columns, comparisons, refusals, privacy; and from its run to a screened slide."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.fleet import Reply, Request, Site, Wrapper
from mutirao.core.rounds import Run
from mutirao.datasets.tile_folders import TileScale, write_tile_scale
from mutirao.deploy.flower.run_tasks import recipe_from, settings_at_site
from mutirao.errors import ConfigError
from mutirao.experiments.party_agreement import require_agreement, run_recipe
from mutirao.experiments.task import Task, find
from mutirao.report import execute
from mutirao.research_notice import NOTICE
from mutirao.robustness.attacks import Attacked, SignFlip
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.cytology.slides.models import load_model
from mutirao.systems.cytology.slides.screening import cut_for
from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Smear, write_slide
from mutirao.systems.cytology.slides.tiling import Cut
from mutirao.systems.images.heads import probabilities
from mutirao.systems.images.metrics import screening_metrics

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
    for trainer, count in (("client_1", 6), ("client_2", 6), ("client_3", 6), ("global_test", 5)):
        for label, name in enumerate(("abnormal", "normal")):
            folder = home / "set" / trainer / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.normal(70 + 110 * label, 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i % 3}-{i}.png")
    return home / "set"


def config(data: Path | str, **more: Any) -> Any:
    return resolve(find("cytology").config, {**QUICK, "data": str(data), **more})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cytology", "images"])
@pytest.mark.parametrize("validation", [0.5, 0.0])
def test_a_server_without_pictures_judges_by_the_sites_or_not_at_all(
    federation: Path, tmp_path: Path, recipe: str, validation: float
) -> None:
    fit = {"rounds": 3, "views": 1, "validation": validation, "classes": "abnormal,normal", "clients": 3}
    fit |= {"weights": "random", "slide": r"^(\d+)-"} if recipe == "cytology" else {"side": 8, "clients_every": 0}
    kind = find(recipe)
    at_sites = kind.prepare(resolve(kind.config, {**fit, "data": str(federation)}))
    fleet = Wrapper(LocalFleet(at_sites.handler, at_sites.population))  # the server has nobody's pictures at hand
    summary = execute(recipe, resolve(kind.config, {**fit, "data": "none"}), tmp_path / "run", fleet=fleet)
    rows = CsvTable(tmp_path / "run" / "history.csv").read()
    judge = "distributed_accuracy" if recipe == "cytology" else "accuracy"
    assert (summary["judge"], judge in rows[0]) == (judge, validation > 0)
    if validation:
        told = [float(row[judge]) for row in rows]
        assert summary["best_round"] == 1 + told.index(max(told))
    else:
        assert summary["best_round"] == 3  # the last one: nobody said which is best
    with pytest.raises(ConfigError, match="classes: name them"):
        kind.prepare(resolve(kind.config, {"data": "none"}))


def test_a_run_has_the_papers_columns_and_sends_only_the_head(federation: Path, tmp_path: Path) -> None:
    execute("cytology", config(federation, rounds=3), tmp_path / "run")
    rows = CsvTable(tmp_path / "run" / "history.csv").read()
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


FIGURES = {"balanced_accuracy", "accuracy", "loss", "ece", "auc", "sensitivity@95"}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"centralised": True}, {"only": "client_2"}, {"personal": "ditto"}])
def test_judged_by_what_hospitals_keep_back_the_test_set_has_no_influence(
    federation: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    data = tmp_path / "set"
    shutil.copytree(federation, data)
    settings = config(data, judge_by="vali", **more)
    summary = execute("cytology", settings, tmp_path / "run", pictures=False)
    for old, new in (("abnormal", "swap"), ("normal", "abnormal"), ("swap", "normal")):
        (data / "global_test" / old).rename(data / "global_test" / new)
    again = execute("cytology", settings, tmp_path / "again", pictures=False)
    assert (again["digest"], again["final"]) == (summary["digest"], summary["final"])
    names = {"accuracy", "balanced_accuracy", "loss"} if "personal" in more else FIGURES | {"distributed_accuracy"}
    assert names <= set(summary["final"])
    assert summary["judge"] == "balanced_accuracy"
    assert not {"global_acc", "global_accuracy"} & set(summary["final"])
    assert not (tmp_path / "run" / "verdict.json").exists()
    tested = execute("cytology", replace(settings, judge_by="test"), tmp_path / "test", pictures=False)
    assert tested["digest"] == summary["digest"]  # it only judges


def test_hospitals_tell_the_figures_of_the_test_set_of_what_they_keep_back(federation: Path) -> None:
    recipe, settings = find("cytology"), config(federation, judge_by="vali", rounds=1)
    task = recipe.prepare(settings)
    run, fleet = Run(task.initial()), LocalFleet(task.handler, task.population)
    (done,) = recipe.flow(fleet, settings, task, run)
    hospital: Any = task.handler
    found = []
    for name in task.population:
        kept = task.population[name].test
        p = probabilities(hospital.fill(run.arrays), kept.x.numpy())
        found.append(screening_metrics(p, kept.y.numpy(), ("abnormal", "normal"), np.array([True, False])))
    for name in FIGURES:  # the hospitals keep equally many back
        assert done.row[name] == pytest.approx(np.mean([figures[name] for figures in found]), rel=1e-5), name
    assert set(recipe.disclosure(settings, task).metrics) >= FIGURES  # so that a site's policy lets them out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"validation": 0.0}, "judge_by=vali: .* validation=0 holds out nothing; use validation=0.2"),
        (
            {"privacy": "local"},
            "judge_by=vali: .* with privacy=local nothing but updates may leave them; use privacy=none",
        ),
        ({"secure": "secagg+"}, "judge_by=vali: .* nothing but updates may leave them; use secure=none"),
    ],
)
def test_where_hospitals_cannot_judge_they_are_not_asked_to(federation: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find("cytology").prepare(config(federation, judge_by="vali", **more))


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


class Elsewhere(LocalFleet):
    """Hospitals in this process, taken for others'."""

    def is_remote(self) -> bool:
        return True


def hospitals(task: Task, **odd: Any) -> Elsewhere:
    """The task's hospitals as sites; some of them hold or do something else."""
    own = require_agreement(task)
    handlers: dict[str, Any] = {c: h for c, h in odd.items() if callable(h)}
    data = {c: task.population[c] for c in task.population} | {c: d for c, d in odd.items() if c not in handlers}
    return Elsewhere(lambda request, site: handlers.get(site.id, own.handler)(request, site), data)


@pytest.mark.parametrize("more", [{}, {"privacy": "local"}, {"privacy": "dpsgd"}, {"secure": "secagg+"}])
def test_a_hospital_with_another_class_list_takes_no_part_whatever_may_leave(
    more: dict[str, Any], federation: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(federation, clients=4, rounds=1, **more)
    recipe, task = find("cytology"), find("cytology").prepare(settings)
    data = {c: task.population[c] for c in task.population}
    swapped = replace(data["client_3"], classes=("columnar_normal", "superficial"))
    fleet = hospitals(task, client_3=swapped, client_4=data["client_1"])
    masked = Elsewhere(task.secure.at_client(fleet.handler), fleet.population)
    with caplog.at_level("WARNING", "mutirao"):
        (done,) = run_recipe(recipe, masked, settings, task, Run(task.initial()))
    assert (done.row["selected"], done.row["replied"]) == (3, 3)
    assert "client_3 takes no part: refused: agreed.classes: classes" in caplog.text
    assert [r["client"] for r in done.clients if r["failure"]] == ["client_3"]


def test_a_hospital_with_another_body_takes_no_part(federation: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(federation, rounds=1)
    recipe, task = find("cytology"), find("cytology").prepare(settings)
    hospital: Any = task.handler
    other = replace(hospital, backbone="0" * 64)
    assert task.agreed.keys() == {"classes", "body", "preprocessing"}
    fleet = hospitals(task, client_2=require_agreement(replace(task, handler=other, agreed={})).handler)
    (done,) = run_recipe(recipe, fleet, settings, task, Run(task.initial()))
    assert done.row["replied"] == 2
    assert "client_2 takes no part: refused: agreed.body: body" in caplog.text


def test_other_weights_or_views_have_other_digests(federation: Path) -> None:
    make = find("cytology").prepare
    first, same, views = (make(config(federation, **more)).agreed for more in ({}, {"lr": 0.1}, {"views": 3}))
    assert first == same
    assert {k for k in first if first[k] != views[k]} == {"preprocessing"}
    other = make(config(federation, weights="")).agreed  # those of the installed package
    assert {k for k in first if first[k] != other[k]} == {"body"}


def test_hospitals_most_of_whose_classes_differ_are_refused(federation: Path) -> None:
    settings = config(federation)
    recipe, task = find("cytology"), find("cytology").prepare(settings)
    odd = {c: replace(task.population[c], classes=("abnormal", "healthy")) for c in ("client_2", "client_3")}
    with pytest.raises(ConfigError, match=r"2 of 3 clients do not agree on .*classes.*client_3: refused"):
        next(run_recipe(recipe, hospitals(task, **odd), settings, task, Run(task.initial())))
    with pytest.raises(ConfigError, match="lacks fungus"):
        recipe.task(config(federation, classes="abnormal,normal,fungus")).population["client_1"]


def test_at_a_site_all_data_is_one_hospitals(federation: Path, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "Training").symlink_to(federation / "client_1")
    (tmp_path / "both" / "Test").symlink_to(federation / "client_2")
    settings = {"recipe": "cytology", "set": "views=1 weights=random slide='' validation=0.25 clients=3"}
    for folder, pictures in ((federation / "client_1", 12), (tmp_path / "both", 24)):
        for at_node, by_policy in (({"data": str(folder)}, {}), ({}, {"data": str(folder)})):
            task = recipe_from_site(settings, at_node, by_policy)
            held = task.population["any name"]
            assert (len(held.train), len(held.test)) == (pictures * 3 // 4, pictures // 4)
            assert task.population.counts("any name") == {"abnormal": pictures // 2, "normal": pictures // 2}
    prepared = recipe_from_site(settings, {"data": str(federation)}, {})  # which says whose pictures are
    assert sum(prepared.population.counts("client_2").values()) == 12
    assert "any name" not in prepared.population
    assert not recipe_from_site({**settings, "data": str(federation)}, {}, {}).population.accepts_any_client


def recipe_from_site(run: dict[str, Any], node: dict[str, Any], policy: dict[str, Any]) -> Any:
    name, settings = recipe_from(settings_at_site(run, node, policy))
    return find(name).prepare(settings)


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


@pytest.mark.slow
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
    row = CsvTable(tmp_path / "run" / "history.csv").read()[-1]
    assert "distributed_accuracy" not in row
    assert "val_acc" not in row


def test_one_folder_of_classes_is_split_by_slide(federation: Path, tmp_path: Path) -> None:
    source = tmp_path / "one"
    for k, trainer in enumerate(("client_1", "client_2", "client_3")):
        for file in (federation / trainer).glob("*/*.png"):
            target = source / file.parent.name / f"{10 * k + int(file.name[0])}-{file.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    task = find("cytology").task(config(source, clients=2))
    assert list(task.population) == ["client_1", "client_2"]
    assert task.classes == 2


@pytest.mark.slow
def test_an_optimiser_that_is_kept_survives_a_run_that_is_resumed(federation: Path, tmp_path: Path) -> None:
    from mutirao.core.arrays import digest
    from mutirao.runs.run_folder import load_run

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
    scores = [float(r["score"]) for r in CsvTable(home / "page" / "scores.csv").read()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == facts["scored"] > 3
    assert facts["score"] == pytest.approx(np.mean(scores[:10]), abs=1e-5)
    page = (home / "page" / "index.html").read_text()
    assert NOTICE in page
    assert "http" not in page  # it asks no other host for anything
    same = CliRunner().invoke(main, [*words[:4], str(out), *words[5:], "--json"])
    assert json.loads(same.stdout)["score"] == pytest.approx(facts["score"], abs=1e-5)

    import onnx
    from onnx.reference import ReferenceEvaluator

    from mutirao.systems.cytology.slides.readers import open_slide

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
    assert NOTICE in {p.key: p.value for p in written.metadata_props}["notice"]
    broken = home / "broken.safetensors"
    broken.write_bytes((home / "model.safetensors").read_bytes()[:-9])
    refused = CliRunner().invoke(main, [*words[:4], str(broken)])
    assert refused.exit_code == 6
    assert "corrupt or truncated" in refused.output


@pytest.mark.slow
def test_size_and_scale_of_the_tiles_travel_with_the_model_and_are_not_overruled_unsaid(
    federation: Path, tmp_path: Path
) -> None:
    data, out = tmp_path / "set", tmp_path / "run"
    shutil.copytree(federation, data)
    write_tile_scale(data / "client_1", TileScale(64, 1.0))
    write_tile_scale(data / "global_test", TileScale(64, 1.0))
    execute("cytology", config(data, rounds=1), out)
    shutil.rmtree(data)  # the run knows it, not the pictures
    path = tmp_path / "model.safetensors"
    assert CliRunner().invoke(main, ["slides", "export", str(out), "--out", str(path)]).exit_code == 0
    slide = tmp_path / "slide.tiff"
    write_slide(slide, Smear(512, 512, 0.5, per_mm2=400), LABORATORIES[0], seed=5)
    words = ["slides", "screen", str(slide), "--model", str(path), "--out", str(tmp_path / "page")]
    facts = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert (facts["size"], facts["mpp"], facts["tiles"]) == (64, 1.0, 16)
    known = load_model(path)
    assert cut_for(known, 64, 1.0) == cut_for(known, None, None) == Cut(size=64, mpp=1.0)
    refused = CliRunner().invoke(main, [*words[:4], str(out), "--size", "128"])
    assert refused.exit_code == 2
    assert "the model was trained on tiles of 64 pixels at 1 micrometres a pixel, not 128 at 1" in refused.output
    loud = CliRunner().invoke(main, [*words, "--size", "128", "--anyway"])
    assert loud.exit_code == 0
    assert "WARNING: the model was trained on tiles of 64 pixels" in loud.output
    assert (
        "the model was trained on 64 at 1: its scores mean little here"
        in (tmp_path / "page" / "index.html").read_text()
    )


def test_tiles_of_different_scales_are_refused_before_the_first_round(federation: Path, tmp_path: Path) -> None:
    data = tmp_path / "set"
    shutil.copytree(federation, data)
    write_tile_scale(data / "client_1", TileScale(64, 1.0))
    write_tile_scale(data / "client_2", TileScale(64, 0.5))
    with pytest.raises(ConfigError, match="the tiles are of different scales"):
        find("cytology").task(config(data))


def test_a_hospital_that_a_screen_drops_does_not_end_the_run(federation: Path) -> None:
    chosen = config(federation, screen="norm")
    task = find("cytology").task(chosen)
    fleet = LocalFleet(Attacked(task.handler, frozenset({"client_2"}), SignFlip(-50.0)), task.population)
    rounds = list(find("cytology").flow(fleet, chosen, task, Run(task.initial())))
    assert [[r["client"] for r in done.clients if r["rejected"]] for done in rounds] == [["client_2"], ["client_2"]]
