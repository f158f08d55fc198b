"""Our client under Flower's own strategies: it answers them in their words, and a site's policy holds for them, too."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import FedProx as FlowersFedProx

from loopgrid import NAMES, LoopGrid, identity, softmax_handler, softmax_task
from mutirao import Reply, Run, train
from mutirao.aggregation import FedAvg
from mutirao.config import resolve
from mutirao.core.fleet import Request, Site
from mutirao.deploy.flower import Strategy, client_app, initial_arrays
from mutirao.deploy.policy.pins import content_hash
from mutirao.experiments.task import Task, find
from mutirao.flower.messages import pack, unpack
from mutirao.selection import Uniform
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


def grid_of(task: Task, names: list[str] = NAMES) -> LoopGrid:
    grid = LoopGrid(client_app(lambda _: task))
    for name in names:
        grid.join(name=name)
    return grid


def recipe_grid(**more: Any) -> tuple[LoopGrid, ArrayRecord]:
    """Three clients of a recipe, and its first model."""
    asked = {"recipe": "quickstart", "clients": 3, "set": "samples=40", **more}
    grid = LoopGrid(client_app(), **asked)
    for i in range(3):
        grid.join(**{"partition-id": i})
    return grid, initial_arrays(Context(7, 1, {}, RecordDict(), asked))


def told(seen: list[dict[str, Any]]) -> Task:
    """The softmax task, noting what its clients are told."""

    def handler(request: Request, site: Site) -> Reply:
        seen.append(dict(request.config))
        return softmax_handler(request, site)

    return dataclasses.replace(softmax_task(), handler=handler)


def test_a_stock_fedavg_over_our_client_gives_what_our_own_run_gives() -> None:
    task = softmax_task()
    result = FlowersFedAvg(**ALL).start(grid_of(task), pack(task.initial()), num_rounds=3)
    run = Run(task.initial())
    list(train(run, LocalFleet(task.handler, task.population), rounds=3, select=Uniform(5), aggregate=FedAvg()))
    assert all(np.abs(v - run.arrays[k]).max() < 1e-6 for k, v in unpack(result.arrays).items())
    assert result.train_metrics_clientapp[3]["loss"] < result.train_metrics_clientapp[1]["loss"]


def test_clients_are_told_round_rate_and_proximal_weight_by_our_names() -> None:
    seen: list[dict[str, Any]] = []
    strategy, task = FlowersFedProx(proximal_mu=0.5, **ALL), told(seen)
    strategy.start(grid_of(task, ["ana"]), pack(task.initial()), 2, train_config=ConfigRecord({"lr": 0.1}))
    assert seen == [{"seed": 0, "round": number, "lr": 0.1, "mu": 0.5} for number in (1, 2)]


def test_a_recipes_client_trains_and_judges_for_a_stock_strategy() -> None:
    grid, start = recipe_grid(seed=5)
    result = FlowersFedAvg().start(grid, start, num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
    task = find("quickstart").prepare(resolve(find("quickstart").config, {"clients": 3, "samples": 40, "seed": 5}))
    fleet = LocalFleet(task.handler, task.population)
    run = Run(task.initial(), seed=5)
    list(train(run, fleet, rounds=2, select=Uniform(3), aggregate=FedAvg(), config={"lr": 0.1}))
    assert all(np.abs(v - run.arrays[k]).max() < 1e-5 for k, v in unpack(result.arrays).items())
    assert 0 <= result.evaluate_metrics_clientapp[2]["accuracy"] <= 1


def test_our_strategy_gets_from_our_client_the_errors_that_fedrisk_needs() -> None:
    grid, start = recipe_grid()
    strategy = Strategy("fedrisk", fraction_evaluate=0.0)
    strategy.start(grid, start, num_rounds=1)
    assert len(set(strategy.run.roster.figures["risk"].tolist())) > 1


def test_a_setting_that_nothing_here_is_set_by_is_refused_by_name() -> None:
    grid, start = recipe_grid()
    content = {"arrays": start, "config": ConfigRecord({"local-lr": 1})}
    (answer,) = grid.send_and_receive([Message(RecordDict(content), next(iter(grid.nodes)), "train")])
    assert "told.local-lr" in answer.error.reason


@pytest.mark.parametrize(
    ("kind", "records", "why"),
    [
        ("query", {"arrays": ArrayRecord()}, "says not what is to be done"),
        ("train", {}, "one ArrayRecord, this one 0"),
        ("train", {"a": ArrayRecord(), "b": ArrayRecord()}, "one ArrayRecord, this one 2"),
    ],
)
def test_what_is_no_request_is_answered_by_one_line(kind: str, records: dict[str, Any], why: str) -> None:
    grid = grid_of(softmax_task(), ["ana"])
    (answer,) = grid.send_and_receive([Message(RecordDict(records), grid.node_of("ana"), kind)])
    assert why in answer.error.reason


def site_task(_: Any) -> Task:
    return softmax_task()


def test_a_sites_policy_judges_what_a_stock_strategy_asks(tmp_path: Path) -> None:
    task, recipe = softmax_task(), "test_flower_stock_client:site_task"
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[recipes]\n"{recipe}" = "{content_hash(recipe)}"\n[asked]\nrequests = ["train"]\nmin_samples = 5\n'
        '[reply]\narrays = ["*"]\nextras = []\nmetrics = ["loss"]\nremove = true\nsamples_step = 50\n'
    )
    grid = LoopGrid(client_app(site_task))
    node = grid.join(name="ana", policy=str(policy))
    content = {"arrays": pack(task.initial()), "config": ConfigRecord({"server-round": 1, "lr": 0.1})}
    train_reply, judged = grid.send_and_receive(
        [Message(RecordDict(content), node, kind) for kind in ("train", "evaluate")]
    )
    assert dict(train_reply.content["metrics"])["num-examples"] == 100  # of 120
    assert set(train_reply.content) == {"arrays", "metrics", "audit"}
    assert "asked.requests" in judged.error.reason
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("asked", "sent", "refused")] == [
        *("asked", "sent"),
        *("asked", "refused"),
    ]
    # A strategy of Flower's own takes the reply as it is.
    result = FlowersFedAvg(**ALL).start(grid, pack(task.initial()), num_rounds=1)
    assert unpack(result.arrays).keys() == task.initial().keys()
