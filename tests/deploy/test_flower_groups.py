"""Groups over a real SuperLink: a SuperNode that joins in mid-run is admitted and works on its group's model."""

import csv
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_flower_deployment import COMMANDS, EXAMPLE, Deployment, free_port

# A task without torch, so that nodes start at once: a client holds numbers about 0 or 9, and learns their mean.
TASK = """
import time
from dataclasses import dataclass
import numpy as np
from mutirao.aggregation import FedAvg
from mutirao.config import Common, setting
from mutirao.core.fleet import Reply
from mutirao.experiments.group_rounds import Plan, train_groups
from mutirao.clustering.group_tables import summarise_groups
from mutirao.experiments.artifacts import Artifacts
from mutirao.experiments.task import Recipe, Task
from mutirao.core.rounds import Patience
from mutirao.selection import everyone

DATA = {f"c{i}": np.array([9.0 * (i % 2), 9.0 * (i % 2)]) + 0.1 * (i % 3) for i in range(5)}

def work(request, site):
    if request.do == "warm":
        return Reply({}, {"signature": site.data.astype(np.float32)}, n=1)
    if request.do == "evaluate":
        return Reply({}, metrics={"accuracy": 1 - float(np.abs(request.arrays["w"] - site.data).max()) / 9}, n=1)
    w = request.arrays["w"]
    return Reply({"w": w + 0.5 * (site.data - w)}, metrics={"got": float(w[1])}, n=1)

def task(config):
    return Task(work, DATA, lambda: {"w": np.zeros(2)}, exhibits=Artifacts(findings=summarise_groups))

def flow(fleet, config, task, run):
    parts = everyone, FedAvg()
    plan = Plan(lambda outputs: {"w": np.zeros(2)}, 1, lambda clients: parts, patience=Patience(wait=120))
    for done in train_groups(run, fleet, plan, config.rounds, config.rounds, expect=4):
        yield done
        end = time.monotonic() + 90
        while run.round == 1 and "c4" not in fleet.clients() and time.monotonic() < end:
            time.sleep(0.3)

recipe = Recipe(Common, task, flow)
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    (tmp_path / "means.py").write_text(TASK)
    made = Deployment(tmp_path)
    made.env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{made.env.get('PYTHONPATH', '')}"
    try:
        made.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(made.port))
        made.until(made.healthy, 40, "a healthy SuperLink")
        yield made
    finally:
        made.end()


def join(deployment: Deployment, name: str) -> None:
    deployment.start(
        name,
        *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{deployment.port}"),
        *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f'name="{name}"'),
    )


@pytest.mark.slow
def test_a_node_that_joins_in_mid_run_gets_its_groups_model(deployment: Deployment) -> None:
    out = deployment.folder / "run"
    for i in range(4):
        join(deployment, f"c{i}")
    config = f'recipe="means:recipe" out="{out}" rounds=3 timeout=120.0'
    command = [COMMANDS / "flwr", "run", EXAMPLE, "--run-config", config]
    submitted = subprocess.run(
        command, env=deployment.env, cwd=deployment.folder, capture_output=True, text=True, timeout=400
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    deployment.until((out / "checkpoints" / "state_001.safetensors").exists, 120, "the first round")
    join(deployment, "c4")
    deployment.until((out / "summary.json").exists, 150, "the end of the run")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["groups"] == {"g0": ["c0", "c2", "c4"], "g1": ["c1", "c3"]}
    with (out / "clients.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["client"] == "c4"]
    assert [row["try"] for row in rows] == ["0", "1", "1"]  # admitted in the second round, then trained twice
    assert rows[0]["group"] == "g0"
    assert float(rows[0]["confidence"]) > 0.8
    assert 0 < float(rows[1]["got"]) < 0.2  # the model of the group near 0, not near 9, and not a fresh one
    assert 0 < float(rows[1]["weight"]) < 1
    assert summary["final"]["accuracy"] > 0.8
