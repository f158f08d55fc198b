"""The real ClientApp over Flower's own wire format, in this process: same results as in process."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from torch import nn

from loopgrid import LoopGrid, connected, digits, identity, softmax_task
from mutirao.aggregation import FedAvg
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run, train
from mutirao.deploy.flower import client
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task
from mutirao.flower.messages import unpack
from mutirao.selection import Uniform
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

__all__ = ["identity"]  # a fixture that holds for all tests here, too

ROOT = Path(__file__).parents[2]


def torch_task(**how: Any) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))

    trainer = Trainer(model, **how)  # a round this small is trained plainly in process, too
    return Task(trainer, {k: Samples(*v) for k, v in digits().items()}, lambda: trainer.initial(3))


def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@pytest.mark.parametrize(
    "task",
    [softmax_task(), torch_task(), torch_task(optimizer="adam", lr=0.01, keep_optimizer=True)],
    ids=["numpy", "torch", "an optimiser that goes on"],
)
def test_history_and_model_are_those_of_the_local_fleet_bit_for_bit(task: Task) -> None:
    local = LocalFleet(task.handler, task.population)
    grid, fleet = connected(task)
    runs = []
    for each in (local, fleet):
        run = Run(task.initial(), seed=3)
        made = list(train(run, each, rounds=4, select=Uniform(3), aggregate=FedAvg(), expect=5))
        runs.append((run, [r.clients for r in made]))
    (here, here_clients), (there, there_clients) = runs
    assert rows(here.history) == rows(there.history)
    assert here_clients == there_clients
    assert digest(here.arrays) == digest(there.arrays)
    kept = {c.node_config["name"]: c.state.get(client.STATE) for c in grid.nodes.values()}
    states = {name: unpack(record) for name, record in kept.items() if isinstance(record, ArrayRecord)}
    assert {k: digest(v) for k, v in states.items()} == {k: digest(v) for k, v in local.states.items()}


def test_the_documented_app_with_data_that_is_only_at_the_client_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/flower.md").read_text(), re.DOTALL)[-1]
    page: dict[str, Any] = {}
    exec(compile(code, "flower.md", "exec"), page)  # the page's own code
    grid = LoopGrid(page["client"])
    for name, size in {"recife": 2, "olinda": 6}.items():
        np.save(tmp_path / f"{name}.npy", np.full((size, 3), size))
        grid.join(name=name, data=str(tmp_path / f"{name}.npy"))
    page["server"](grid, Context(7, 1, {}, RecordDict(), {}))
    assert capsys.readouterr().out == "1 [5. 5. 5.]\n2 [5. 5. 5.]\n"  # (2 * 2 + 6 * 6) / 8


def test_without_flower_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if f"{n}.".startswith("mutirao.flower.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(ConfigError, match=r"install mutirao\[flower\]"):
        importlib.import_module("mutirao.flower")
