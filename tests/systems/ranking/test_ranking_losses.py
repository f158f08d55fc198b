"""Losses of lists go with any aggregation, any selection and what else a run may ask for, or are refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from research.settled import settled_task

from mutirao import aggregation, selection
from mutirao.aggregation.fedrisk import FedRisk
from mutirao.config import resolve
from mutirao.core.arrays import digest, flat, is_finite
from mutirao.core.fleet import Request
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.ranking.recipe import LOSS_NAMES, Config

TINY: dict[str, Any] = {"queries": 50, "clients": 6, "per_round": 3, "rounds": 2, "hidden": 4, "partition": "by_query"}
TINY |= {"lr": 0.002, "evaluate_every": 2, "metrics": "ndcg@5"}
LISTS = LOSS_NAMES[1:]
STALE = {"fedbuff", "fedasync"}  # they need a clock
TASKS: dict[str, Task] = {}


def made(settings: dict[str, Any], task: Task | None = None) -> tuple[list[Round], Run]:
    found = find("ranking")
    config = resolve(found.config, TINY | settings)
    task = task or found.prepare(config)
    run = Run(task.initial(), seed=1)
    return list(found.flow(LocalFleet(task.worker, task.population), config, task, run)), run


def pairs() -> list[tuple[str, str, str]]:
    """Every aggregation and every selection with each loss, in turn."""
    selectors, aggregators = list(selection.NAMES), list(aggregation.NAMES)
    longest = max(len(selectors), len(aggregators))
    return [
        (loss, selectors[(i + shift) % len(selectors)], aggregators[i % len(aggregators)])
        for shift, loss in enumerate(LISTS)
        for i in range(longest)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "select", "aggregate"), pairs())
def test_two_rounds(loss: str, select: str, aggregate: str) -> None:
    if loss not in TASKS:
        TASKS[loss] = find("ranking").prepare(resolve(Config, TINY | {"loss": loss}))
    settings = {"loss": loss, "select": select, "aggregate": aggregate}
    settings |= {"devices": "tifl"} if aggregate in STALE else {}
    if select == "hicsfl":  # it looks at the biases of classes, of which a scorer has none
        with pytest.raises(ConfigError, match=r"select.layer: the model has 0 biases with 5 entries"):
            made(settings, TASKS[loss])
        return
    rounds, run = made(settings, TASKS[loss])
    assert [r.row["failed"] for r in rounds] == [0, 0]
    assert is_finite(run.arrays)
    assert 0 < rounds[-1].row["ndcg@5"] <= 1


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "int8"},
        {"compress": "topk"},
        {"moments": False, "secure": "secagg+", "aggregate": "fedavg"},
        {"moments": False, "privacy": "central", "aggregate": "fedavg"},
        {"moments": False, "privacy": "dpsgd", "aggregate": "fedavg", "batch_size": 2},
        {"personal": "ditto", "aggregate": "fedavg"},
        {"personal": "fedper", "aggregate": "fedavg"},
        {"personal": "fedbn", "norm": "batch", "aggregate": "fedavg"},
        {"personal": "finetune"},
        {"norm": "layer", "layers": 3},
        {"norm": "batch", "select": "aoiu"},
        {"layers": 0},
        {"samples": 2},
        {"centralised": True, "per_round": 1},
    ],
    ids=str,
)
def test_with_what_else_a_run_may_ask_for(settings: dict[str, Any]) -> None:
    rounds, run = made({"loss": "approxndcg", **settings})
    assert [r.row["failed"] for r in rounds] == [0, 0]
    assert is_finite(run.arrays)


def test_labels_that_are_no_classes_are_not_renamed() -> None:
    with pytest.raises(ConfigError, match="drift=rename: the clients of this task have no samples with classes"):
        made({"loss": "listnet", "drift": "rename"})


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_every_engine_gives_the_plain_paths_model(norm: str) -> None:
    settings = {"loss": "lambdarank", "norm": norm, "aggregate": "fedrisk", "select": "aoiu"}
    plain, first = made({**settings, "engine": "plain"})
    for engine in ("auto", "threads", "stacked", "fused"):
        rounds, run = made({**settings, "engine": engine})
        np.testing.assert_allclose(flat(run.arrays), flat(first.arrays), rtol=1e-5, atol=1e-6)
        assert [r["risk"] for r in rounds[-1].clients] == [r["risk"] for r in plain[-1].clients]


def test_errors_are_a_byte_a_document_and_what_no_grade_allows_is_refused() -> None:
    task = settled_task(resolve(Config, TINY | {"loss": "listnet"}))
    assert task.classes == 5
    name = next(iter(task.population))
    request = Request("train", task.initial(), {"seed": 0, "round": 1, "extras": "squared_errors,entropy"})
    reply = LocalFleet(task.handler, task.population).ask({name: request}).replies[name]
    errors, there = reply.extras["squared_errors"], int((task.population[name].y >= 0).sum())
    assert errors.dtype == np.uint8
    assert len(errors) == there == reply.extras["batch_sizes"].sum()
    assert 0 < errors.max() <= 16
    assert 0 <= reply.metrics["entropy"] <= np.log(5)
    aggregator = FedRisk(classes=task.classes)
    assert aggregator.fault(reply) is None
    malicious = replace(reply, extras={**reply.extras, "squared_errors": np.full_like(errors, 17)})
    assert aggregator.fault(malicious) is not None


def test_fedprox_is_stacked_with_the_weight_that_the_server_tells() -> None:
    settings = {"aggregate": "fedprox", "optimizer": "adam", "lr": 0.01, "loss": "grades"}
    found = [find("ranking").prepare(resolve(Config, TINY | settings | {"engine": e})) for e in ("stacked", "plain")]
    (_, ours), (_, plain) = (
        made({**settings, "engine": e}, t) for e, t in zip(("stacked", "plain"), found, strict=True)
    )
    (trainer,) = found[0].knows.client.trainers.made.values()
    compiled_steps = [m for key, m in trainer._cache.items() if isinstance(key, tuple)]
    assert compiled_steps  # or the plain path would be compared with itself
    assert all(m is not None and m.mu > 0 for m in compiled_steps)
    np.testing.assert_allclose(flat(ours.arrays), flat(plain.arrays), rtol=1e-4, atol=1e-5)
    assert digest(made({**settings, "aggregate": "fedavg", "engine": "plain"})[1].arrays) != digest(plain.arrays)
