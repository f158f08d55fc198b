"""Any selection goes with any aggregation and any recipe: two rounds each.

`make test` runs a sample in which every aggregator meets three selectors and three recipes. `make test-slow` runs all
pairs of a selector and an aggregator on the quickest recipe, and every selector and aggregator on the others.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mutirao import aggregation, selection
from mutirao.compression import compress_of
from mutirao.config import build, resolve
from mutirao.core.arrays import is_finite
from mutirao.core.parts import as_aggregator, as_selector
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, Task, find
from mutirao.privacy.secure_aggregation.kinds import secure_of
from mutirao.simulation.local_fleet import LocalFleet

SMALL = {
    "quickstart": {"clients": 8, "per_round": 4, "epochs": 1},
    "selection": {"clients": 8, "per_round": 4, "epochs": 1},
    "ranking": {"clients": 8, "per_round": 4, "queries": 50},
    "online": {"clients": 8, "per_round": 4, "queries": 50},
    "groups": {"clients": 6, "per_round": 3, "epochs": 1, "warm_epochs": 1, "partition": "iid", "samples": 40},
    "recsys": {"clients": 12, "per_round": 4, "dimension": 8},
    "cifar10": {"clients": 4, "per_round": 3, "epochs": 1, "samples": 10, "model": "small"},
    "images": {"clients": 4, "per_round": 3, "samples": 10},
    "tabular": {"clients": 8, "per_round": 4, "epochs": 1, "partition": "iid"},
    # Random weights: what is tested is that parts fit, on any machine; the tiles are of three tiny slides.
    "cytology": {"clients": 3, "per_round": 2, "side": 1024, "slides": 2, "views": 1, "weights": "random"},
}
TASKS: dict[str, Task] = {}
STALE = {"fedbuff", "fedasync"}  # they need a clock, and groups wait for all
STEPPING = STALE | {
    "fedrisk",
    "fednova",
    "fedexp",
    "qfedavg",
}  # their weights are a step, too: they need not sum to one


def combinations() -> list[tuple[str, str, str]]:
    """Recipe, selector and aggregator: all pairs of any two of them."""
    selectors, aggregators = list(selection.NAMES), list(aggregation.NAMES)
    longest = max(len(selectors), len(aggregators))
    each = [(selectors[i % len(selectors)], aggregators[i % len(aggregators)]) for i in range(longest)]
    others = [(recipe, *pair) for recipe in NAMES if recipe != "quickstart" for pair in each]
    return [*product(["quickstart"], selectors, aggregators), *others]


def sample() -> set[tuple[str, str, str]]:
    """Three combinations for each aggregator; together they have every selector and every recipe several times."""
    recipes, selectors = list(NAMES), list(selection.NAMES)
    return {
        (recipes[(i + 3 * turn) % len(recipes)], selectors[(i + 4 * turn) % len(selectors)], aggregate)
        for i, aggregate in enumerate(aggregation.NAMES)
        for turn in range(3)
    }


def quick_and_slow() -> list[Any]:
    """The sample, and all other combinations marked slow."""
    quick = sample()
    rest = [pytest.param(*each, marks=pytest.mark.slow) for each in combinations() if each not in quick]
    return [*sorted(quick), *rest]


def task_of(recipe: str) -> Task:
    """The task of a recipe, made once: the parts under test do not change it."""
    if recipe not in TASKS:
        TASKS[recipe] = find(recipe).task(resolve(find(recipe).config, SMALL[recipe]))
    return TASKS[recipe]


def has_output_bias(task: Task) -> bool:
    """Whether one bias of the model, and no other, has an entry a class."""
    if not (arrays := task.initial()):
        return True  # the model is made when its clients have agreed on what it is for
    return [len(v) for k, v in arrays.items() if k.endswith("bias") and v.ndim == 1].count(task.classes or 0) == 1


@pytest.mark.parametrize(("recipe", "select", "aggregate"), quick_and_slow())
def test_two_rounds(recipe: str, select: str, aggregate: str) -> None:
    found, task = find(recipe), task_of(recipe)
    settings = {**SMALL[recipe], "rounds": 2, "select": select, "aggregate": aggregate}
    settings |= {"devices": "tifl"} if aggregate in STALE else {}
    config = resolve(found.config, settings)
    run = Run(task.initial(), seed=1)
    parts = build("select", config.select, count=1, classes=2), build("aggregate", config.aggregate)
    select_part, aggregate_part = as_selector(parts[0]), as_aggregator(parts[1])
    unmet = [task.capabilities.unmet(part.needs) for part in (select_part, aggregate_part)]
    if needed := [need for needs in unmet for need in needs]:
        with pytest.raises(ConfigError, match=f"needs {needed[0]}, which the clients"):
            next(iter(found.flow(LocalFleet(task.handler, task.population), config, task, run)))
        return  # a pair that does not fit is refused before the first round
    if select_part.needs.biases and not has_output_bias(task):
        with pytest.raises(ConfigError, match=r"select\.layer: the model has"):
            next(iter(found.flow(LocalFleet(task.handler, task.population), config, task, run)))
        return
    if recipe == "groups" and aggregate in STALE:
        with pytest.raises(ConfigError, match="does not wait for all clients, but groups do"):
            next(iter(found.flow(LocalFleet(task.handler, task.population), config, task, run)))
        return
    rounds = list(found.flow(LocalFleet(task.handler, task.population), config, task, run))
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["failed"] == 0 for r in rounds)
    assert is_finite(run.arrays)
    total = sum(r["weight"] for r in rounds[-1].clients)
    assert total > 0 if aggregate in STEPPING else total == pytest.approx(1.0)


# What each recipe has to be told before it goes with secure aggregation, which is for means alone.
SUMMED = {
    "quickstart": {},
    "selection": {"select": "aoi"},
    "ranking": {"aggregate": "fedavg", "moments": False},
    "online": {},
    "groups": {"head": "full", "per_round": 4},
    "cifar10": {},
    "images": {"clients_every": 0},
    "cytology": {"per_round": 3, "classes": "abnormal,normal"},
    "tabular": {},  # and the schema of a run before
    "recsys": {"download": "all"},
}


def write_schema(path: Path) -> dict[str, str]:
    """The schema of a run without secure aggregation."""
    found, task = find("tabular"), task_of("tabular")
    run = Run(task.initial(), seed=1)
    config = resolve(found.config, {**SMALL["tabular"], "rounds": 1})
    list(found.flow(LocalFleet(task.handler, task.population), config, task, run))
    path.write_bytes(run.memory["agreed.schema"].tobytes())
    return {"schema": str(path)}


@pytest.mark.parametrize("recipe", list(SUMMED))
def test_two_rounds_with_secure_aggregation(recipe: str, tmp_path: Path) -> None:
    found = find(recipe)
    more = {**SUMMED[recipe], **(write_schema(tmp_path / "schema.json") if recipe == "tabular" else {})}
    config = resolve(found.config, {**SMALL[recipe], "rounds": 2, "secure": "secagg+", **more})
    task = task_of(recipe) if recipe not in ("groups", "ranking", "tabular", "recsys") else found.task(config)
    run = Run(task.initial(), seed=1)
    fleet = LocalFleet(secure_of(config).at_client(task.handler), task.population)
    rounds = list(found.flow(fleet, config, task, run))
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["failed"] == 0 for r in rounds)
    for done in rounds:
        told = {(r.get("group"), r["n"], r.get("loss", r.get("shown_loss"))) for r in done.clients if r["try"] == 1}
        assert len(told) == len({r.get("group") for r in done.clients if r["try"] == 1})


@pytest.mark.parametrize("kind", ["topk", "int8"])
@pytest.mark.parametrize("recipe", sorted(SUMMED.keys() - {"recsys"}))
def test_two_rounds_with_compression(recipe: str, kind: str) -> None:
    found = find(recipe)
    config = resolve(found.config, {**SMALL[recipe], "rounds": 2, "compress": kind})
    task = task_of(recipe) if recipe not in ("groups", "tabular") else found.task(config)
    run = Run(task.initial(), seed=1)
    fleet = LocalFleet(compress_of(config).at_client(task.handler), task.population)
    rounds = list(found.flow(fleet, config, task, run))
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["failed"] == 0 for r in rounds)
    assert all(r.row["bytes_up"] < 0.6 * r.row["bytes_down"] for r in rounds[1:])
    assert is_finite(run.arrays)


def test_only_recsys_does_not_go_with_compression() -> None:
    with pytest.raises(ConfigError, match="takes whole updates"):
        find("recsys").prepare(resolve(find("recsys").config, {"compress": "int8"}))


@pytest.mark.parametrize("aggregate", list(aggregation.NAMES))
@pytest.mark.parametrize("kind", ["fedper", "ditto", "finetune"])
def test_two_rounds_with_personal_models(kind: str, aggregate: str) -> None:
    found = find("quickstart")
    settings = {**SMALL["quickstart"], "rounds": 2, "aggregate": aggregate, "personal": kind}
    config = resolve(found.config, settings | ({"devices": "tifl"} if aggregate in STALE else {}))
    task = found.prepare(config)
    run, fleet = Run(task.initial(), seed=1), LocalFleet(task.handler, task.population)
    if kind == "fedper" and aggregate in ("scaffold", "feddyn"):
        with pytest.raises(ConfigError, match="which the clients of this task do not support"):
            next(iter(found.flow(fleet, config, task, run)))
        return  # what they keep is of a whole model
    rounds = list(found.flow(fleet, config, task, run))
    assert [r.row["round"] for r in rounds] == [1, 2]
    assert all(r.row["failed"] == 0 for r in rounds)
    assert 0 <= rounds[-1].row["accuracy"] <= 1
