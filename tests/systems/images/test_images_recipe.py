"""The images recipe: every layout, what is trained, judged and agreed on, and sites with folders of their own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.report import execute
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.images.client import ImageTrainer
from mutirao.systems.images.heads import probabilities
from mutirao.systems.images.image_sources import find_image_sources
from mutirao.systems.images.models import TrainingPlan
from sets import listed, write_classes, write_four, write_leaf, write_table

QUICK = {"rounds": 2, "clients": 3, "side": 16, "views": 2, "batch_size": 8}
RECIPE = find("images")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return write_classes(home / "by_class", count=24)


@pytest.fixture(scope="module")
def federation(home: Path) -> Path:
    for k in (1, 2, 3):
        write_classes(home / "set" / f"client_{k}", count=8, seed=k)
    write_classes(home / "set" / "global_test", count=6, seed=9)
    return home / "set"


def config(data: Path | str, **more: Any) -> Any:
    return resolve(RECIPE.config, {**QUICK, "data": str(data), **more})


def run_of(settings: Any, task: Task | None = None) -> tuple[Run, list[dict[str, Any]]]:
    task = task or RECIPE.prepare(settings)
    run = Run(task.initial(), seed=settings.seed)
    fleet = LocalFleet(task.handler, {c: task.population[c] for c in task.population})
    return run, [done.row for done in RECIPE.flow(fleet, settings, task, run)]


def test_a_folder_of_classes_is_learned_and_judged_by_what_people_expect(folder: Path, tmp_path: Path) -> None:
    settings = config(folder, rounds=10, clients_every=5)
    summary = execute("images", settings, tmp_path / "run")
    final = summary["final"]
    names = {"accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"}
    assert names <= set(final)
    assert {f"{name}_worst" for name in names} <= set(final)  # as every client judges it
    assert final["accuracy"] > 0.9  # bright against dark
    assert (tmp_path / "run" / "confusion.png").stat().st_size > 1000
    assert summary["judge"] == "accuracy"


def test_the_figures_are_those_of_scikit_learn(folder: Path) -> None:
    settings = config(folder)
    task = RECIPE.task(settings)
    arrays, handler = task.initial(), task.handler
    assert isinstance(handler, ImageTrainer)
    assert task.evaluate is not None
    found, pictures = task.evaluate(arrays), find_image_sources(folder, settings, "").test()
    p, y = probabilities(handler.fill(arrays), TrainingPlan.of(settings).extract(pictures.files)), pictures.labels
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, p.argmax(1)))
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, p[:, 1]))
    assert found["f1"] == pytest.approx(sk.f1_score(y, p.argmax(1)))
    assert found["log_loss"] == pytest.approx(sk.log_loss(y, p), rel=1e-5)


def test_clients_are_those_whose_the_pictures_are(folder: Path, home: Path) -> None:
    rows = [{**row, "client": ("ana", "bia")[i % 2]} for i, row in enumerate(listed(folder))]
    file = write_table(home / "owned.csv", rows)
    task = RECIPE.task(config(file))
    assert list(task.population) == ["ana", "bia"]
    dealt = RECIPE.task(config(file, partition="dirichlet"))
    assert list(dealt.population) == ["client_1", "client_2", "client_3"]
    assert len(list(RECIPE.task(config(folder)).population)) == 3
    with pytest.raises(ConfigError, match="partition=natural: it is unknown which client each picture belongs to"):
        RECIPE.task(config(folder, partition="natural"))


def test_a_group_is_never_split_between_training_and_judging(home: Path) -> None:
    rows = [{**row, "group": f"g{i % 9}"} for i, row in enumerate(listed(write_classes(home / "grouped", count=36)))]
    of = {str(home / row["file"]): row["group"] for row in rows}
    file = write_table(home / "grouped.csv", rows)
    for seed in range(4):
        found = find_image_sources(file, config(file, seed=seed), "")
        held = {of[str(f)] for f in found.test().files}
        assert held
        for pictures in found.hospitals.values():
            assert not held & {of[str(f)] for f in pictures().files}


@pytest.mark.parametrize(("body", "trainable"), [("efficientnet_lite0", "auto"), ("efficientnet_lite0", "last_block")])
def test_of_a_pretrained_backbone_only_what_is_trained_travels(federation: Path, body: str, trainable: str) -> None:
    settings = config(federation, body=body, trainable=trainable, weights="random", rounds=1, views=1, samples=4)
    task = RECIPE.prepare(settings)
    sizes = sum(a.size for a in task.initial().values())
    assert sizes == 320 * 2 + 2 if trainable == "auto" else 320 * 2 + 2 < sizes < 3_000_000
    assert set(task.agreed) == {"classes", "body", "preprocessing"}
    assert run_of(settings, task)[1][0]["replied"] == 3


def test_the_way_of_the_engine_does_not_matter(federation: Path) -> None:
    runs = [run_of(config(federation, engine=engine, views=3))[0] for engine in ("auto", "threads", "plain")]
    assert len({digest(run.arrays) for run in runs}) == 1


def test_a_party_with_other_classes_or_another_body_is_refused_by_name(
    federation: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(federation)
    task = RECIPE.prepare(settings)
    parties = {c: task.population[c] for c in task.population}
    parties["client_3"] = replace(parties["client_3"], classes=("bird", "dog"))
    run = Run(task.initial())
    rows = [done.row for done in RECIPE.flow(LocalFleet(task.handler, parties), settings, task, run)]
    assert [row["replied"] for row in rows] == [2, 2]
    assert "client_3 refused: agreed.classes: classes" in caplog.text
    request = Request(
        "train", task.initial(), {"seed": 0, "round": 1, **{f"agreed.{k}": v for k, v in task.agreed.items()}}
    )
    handler: Any = task.handler
    outcomes = handler.many(dict.fromkeys(parties, request), {c: Site(c, data) for c, data in parties.items()})
    assert [type(outcomes[c]).__name__ for c in sorted(parties)] == ["Reply", "Reply", "Failure"]
    assert "classes" in str(outcomes["client_3"])
    with pytest.raises(Exception, match=r"body .* is agreed on, there is none here"):
        handler(
            replace(request, config={**request.config, "agreed.body": "0123"}), Site("client_1", parties["client_1"])
        )


def test_sites_with_folders_of_their_own_make_the_model_of_the_whole_federation(federation: Path) -> None:
    whole, rows = run_of(config(federation))
    server = config(federation / "global_test", sites=True)
    task = RECIPE.prepare(server)
    own = {f"client_{k}": RECIPE.prepare(config(federation / f"client_{k}", sites=True)) for k in (1, 2, 3)}

    def at_its_site(request: Request, site: Site) -> Reply:
        return own[site.id].handler(request, Site(site.id, own[site.id].population[site.id], site.state))

    run = Run(task.initial(), seed=server.seed)
    fleet = LocalFleet(at_its_site, dict.fromkeys(own))
    there = [done.row for done in RECIPE.flow(fleet, server, task, run)]
    assert digest(run.arrays) == digest(whole.arrays)
    assert there[-1]["accuracy"] == rows[-1]["accuracy"]


def test_a_server_without_pictures_needs_the_classes_and_lets_the_sites_judge(federation: Path) -> None:
    with pytest.raises(ConfigError, match="classes: name them"):
        RECIPE.task(config("synthetic", sites=True))
    server = config("synthetic", sites=True, classes="bird,cat")
    task = RECIPE.prepare(server)
    assert task.evaluate is None
    own = RECIPE.prepare(config(federation / "client_1", sites=True, classes="bird,cat"))
    run = Run(task.initial())
    fleet = LocalFleet(own.handler, {f"client_{k}": own.population[f"client_{k}"] for k in (1, 2, 3)})
    rows = [done.row for done in RECIPE.flow(fleet, server, task, run)]
    assert {"accuracy", "balanced_accuracy", "log_loss"} <= set(rows[-1])
    with pytest.raises(ConfigError, match="they are at another site"):
        task.population["client_1"]


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is the same in every run of the same kind."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.parametrize("more", [{}, {"centralised": True}, {"personal": "ditto"}])
def test_judged_by_what_clients_keep_back_the_test_set_has_no_influence(
    federation: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    shutil.copytree(federation, tmp_path / "set")
    settings = config(tmp_path / "set", judge_by="vali", **more)
    run, rows = run_of(settings)
    (tmp_path / "set/global_test/bird").rename(tmp_path / "set/global_test/swap")  # a bird is called a cat now
    (tmp_path / "set/global_test/cat").rename(tmp_path / "set/global_test/bird")
    (tmp_path / "set/global_test/swap").rename(tmp_path / "set/global_test/cat")
    again, others = run_of(settings)
    assert digest(again.arrays) == digest(run.arrays)
    assert plain(others) == plain(rows)
    assert {"accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"} <= set(rows[-1])
    assert digest(run_of(replace(settings, judge_by="test"))[0].arrays) == digest(run.arrays)  # it only judges


def test_the_share_that_clients_keep_back_judges_as_one_set(federation: Path, tmp_path: Path) -> None:
    settings = config(federation, judge_by="vali", clients_every=0)
    summary = execute("images", settings, tmp_path / "run")
    assert not (tmp_path / "run" / "confusion.png").exists()
    run, rows = run_of(settings)
    task = RECIPE.prepare(settings)
    trainer: Any = task.handler
    told = [(len(task.population[c].test), trainer.evaluate(run.arrays, task.population[c])) for c in task.population]
    for name in ("accuracy", "log_loss"):
        assert rows[-1][name] == pytest.approx(np.average([t[name] for _, t in told], weights=[n for n, _ in told]))
        assert summary["final"][name] == rows[-1][name]


def test_sites_judge_by_what_they_keep_back_though_the_server_has_pictures(federation: Path) -> None:
    _, rows = run_of(config(federation, judge_by="vali", clients_every=-1))
    server = config(federation / "global_test", sites=True, judge_by="vali", clients_every=0)
    whole, task = RECIPE.prepare(config(federation)), RECIPE.prepare(server)
    assert task.evaluate is None
    fleet, run = LocalFleet(whole.handler, whole.population), Run(task.initial(), seed=server.seed)
    there = [done.row for done in RECIPE.flow(fleet, server, task, run)]
    assert plain(there) == plain(rows)
    assert "evaluate" in RECIPE.disclosure(server, task).requests


def test_pooled_is_all_that_clients_have(federation: Path) -> None:
    together = RECIPE.task(config(federation)).population
    pooled = RECIPE.task(config(federation, centralised=True)).population
    assert len(pooled["pooled"]) == sum(len(together[c]) for c in together)


def test_sets_of_arrays_are_dealt_to_virtual_clients(home: Path) -> None:
    write_four(home / "idx", train=60, test=20)
    _, rows = run_of(config(home / "idx"))
    assert {"accuracy", "auc", "f1"} <= set(rows[-1])
    leaf = RECIPE.task(config(write_leaf(home / "leaf"), clients=50))
    assert len(leaf.population) == 6  # a client a writer, without a word
    with pytest.raises(ConfigError, match="body=resnet18 needs image files"):
        RECIPE.task(config(home / "idx", body="resnet18"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"trainable": "head"}, "body=small has no pretrained part to keep"),
        ({"weights": "random"}, "weights: body=small begins from scratch"),
        ({"group": "("}, "is not a regular expression"),
        ({"classes": "bird,dog"}, "lacks"),
        ({"data": "nowhere"}, "there is no folder nowhere"),
        ({"clients": 999}, "too few for 999 clients"),
        (
            {"judge_by": "vali", "validation": 0.0},
            "judge_by=vali: .* validation=0 holds out nothing; use validation=0.2",
        ),
        ({"judge_by": "vali", "privacy": "local"}, "judge_by=vali: .* with privacy=local nothing but updates"),
        ({"judge_by": "vali", "privacy": "dpsgd"}, "judge_by=vali: .* with privacy=dpsgd nothing but updates"),
        ({"judge_by": "vali", "secure": "secagg+"}, "judge_by=vali: .* with secure=secagg.* nothing but updates"),
    ],
)
def test_what_does_not_fit_is_one_line_before_the_first_round(folder: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        run_of(config(**{"data": folder, **more}))
    assert "\n" not in str(refused.value)


def test_a_table_may_name_classes_that_a_site_has_no_pictures_of(folder: Path, home: Path) -> None:
    rows = [row for row in listed(folder) if row["label"] == "cat"]
    file = write_table(home / "cats.csv", rows)
    task = RECIPE.prepare(config(file, sites=True, classes="bird,cat"))
    assert task.population["any site"].classes == ("bird", "cat")
    assert set(task.population["any site"].train.y.tolist()) == {1}
    with pytest.raises(ConfigError, match="has the class cat alone"):
        RECIPE.task(config(file, sites=True))


def test_the_default_needs_no_files(tmp_path: Path) -> None:
    summary = execute("images", resolve(RECIPE.config, {"rounds": 1, "samples": 100}), tmp_path / "run", pictures=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["classes"] == 10
    assert np.isfinite(summary["final"]["loss"])
