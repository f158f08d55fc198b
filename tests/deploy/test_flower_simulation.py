"""A recipe over Flower's simulation engine, with another engine in its place."""

import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from iris import iris
from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.fleet import Wrapper
from mutirao.deploy.flower import client_app, ray_simulation, simulate
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.report import execute

__all__ = ["identity"]  # a fixture that holds for all tests here, too


def engine_of(grid: LoopGrid, problem: Exception | None = None) -> Callable[..., None]:
    """In place of Flower's engine: one node a client, until the server is done or there is a problem."""

    def run_engine(app: Any, toml: str, nodes: int, cpus: float, gpus: float) -> None:
        for i in range(nodes):
            grid.join(**{"partition-id": i})
        server = threading.Thread(target=app, args=(grid, Context(7, 1, {}, RecordDict(), {})))
        server.start()
        while problem is not None and grid.greetings < nodes:
            time.sleep(0.01)
        if problem is not None:
            grid.deliver = lambda message, node: None  # type: ignore[method-assign]
            time.sleep(0.3)
            raise RuntimeError("Simulation Runtime crashed.") from problem
        server.join()

    return run_engine


def simulated(monkeypatch: pytest.MonkeyPatch, out: Path, problem: Exception | None = None) -> dict[str, Any]:
    config = resolve(iris.config, {"rounds": 3})
    grid = LoopGrid(client_app(lambda _: iris.task(config)))
    monkeypatch.setattr(ray_simulation, "run_engine", engine_of(grid, problem))
    return simulate("iris:iris", config, out)


def test_a_simulation_gives_what_the_local_fleet_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = simulated(monkeypatch, tmp_path / "there")
    here = execute("iris:iris", resolve(iris.config, {"rounds": 3}), tmp_path / "here")
    assert there["digest"] == here["digest"]
    assert not [t for t in threading.enumerate() if t.name == "flower-engine"]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "signature"), [("tabular", "projection"), ("quickstart", "bias")])
def test_groups_of_any_task_are_found_over_flowers_messages(
    recipe: str, signature: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"clients": 6, "per_round": 1.0, "epochs": 1, "rounds": 2, "warm_epochs": 2, "signature": signature}
    config = resolve(find(recipe).config, {**settings, "cluster": "kmeans", "cluster.groups": 2})
    grid = LoopGrid(client_app(lambda _: find(recipe).prepare(config)))
    monkeypatch.setattr(ray_simulation, "run_engine", engine_of(grid))
    there = simulate(recipe, config, tmp_path / "there")
    here = execute(recipe, config, tmp_path / "here", pictures=False)
    assert len(here["groups"]) == 2
    assert there["groups"] == here["groups"]
    assert there["digest"] == here["digest"]


def test_an_engine_that_dies_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MutiraoError, match="Flower's simulation ended: MemoryError: no more of it"):
        simulated(monkeypatch, tmp_path, MemoryError("no more of it"))


def test_a_refused_simulation_does_not_start_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated(monkeypatch, tmp_path)
    monkeypatch.setattr(ray_simulation, "run_engine", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigError, match="already holds a run"):
        simulate("iris:iris", resolve(iris.config, {"rounds": 5}), tmp_path)
    assert simulate("iris:iris", resolve(iris.config, {"rounds": 3}), tmp_path, resume=True)["already"]


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install mutirao\[flower\]"):
        simulate("iris:iris", resolve(iris.config, {}), tmp_path)


def test_a_simulation_loses_nothing_of_the_fleet_inside() -> None:
    own = {name for name in vars(ray_simulation.Simulation) if not name.startswith("_")}
    assert issubclass(ray_simulation.Simulation, Wrapper)
    assert own == {"fleet", "clients", "close"}  # the rest is passed on
