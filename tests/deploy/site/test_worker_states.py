"""Personal models and compression through a site's worker: what a site keeps goes there and back, bit by bit."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.flower.client import STATE, States
from mutirao.deploy.policy.policy_templates import policy_for
from mutirao.deploy.rehearsal import local_fleet, permit_training
from mutirao.deploy.site.worker_client import WorkerClient
from mutirao.experiments.task import find
from mutirao.flower.messages import unpack
from mutirao.report import execute

__all__ = ["identity"]  # a fixture that holds for all tests here, too

SMALL = {"rounds": 3, "clients": 2, "per_round": 2, "hidden": 4, "epochs": 1}
PAIRS = [
    {"personal": "fedper", "compress": "topk"},
    {"personal": "ditto", "compress": "int8", "compress.rounding": "stochastic"},
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerClient]:
    """The worker of a process that stands for the SuperNode, in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(["sleep", "600"]) as node:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("w")))
        try:
            yield WorkerClient(node.pid)
        finally:
            node.kill()


@pytest.mark.parametrize("judged", [False, True], ids=["plain", "under a policy"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['personal']} {pair['compress']}")
def test_a_run_through_the_worker_is_the_run_without(
    warm: WorkerClient, pair: dict[str, str], judged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = [*(SMALL | pair).items()]
    config, here = resolve(find("quickstart").config, {}, sets), local_fleet("quickstart", sets)
    grid = LoopGrid(client_app(warm=warm), set=" ".join(f"{k}={v}" for k, v in sets))
    for name in ("c0", "c1"):
        policy = tmp_path / name / "policy.toml"
        policy.parent.mkdir()
        policy.write_text(permit_training(policy_for(["quickstart"], sets)))
        grid.join(name=name, **({"policy": str(policy)} if judged else {}))
    mine = execute("quickstart", config, tmp_path / "here", fleet=here, pictures=False)
    there = FlowerFleet(grid, timeout=120, greet=60)
    theirs = execute("quickstart", config, tmp_path / "there", fleet=there, pictures=False)
    for figure in ("digest", "final", "bytes_up", "bytes_down"):
        assert mine[figure] == theirs[figure]
    for name in ("c0", "c1"):
        if judged:
            (run,) = (tmp_path / name / "states").iterdir()
            kept = States(run.parent, run.name).before("evaluate", 3)[1]
        else:
            kept = unpack(grid.nodes[grid.node_of(name)].state[STATE])  # type: ignore[arg-type]
        assert {"personal.2.weight", "compress.0.weight"} <= kept.keys()
        assert digest(kept) == digest(here.states[name])
    assert "no worker" not in caplog.text  # it was the worker who did it
