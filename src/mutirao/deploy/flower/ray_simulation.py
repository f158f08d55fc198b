"""A fleet of simulated clients in Flower's own engine (Ray)."""

import contextlib
import functools
import importlib.util
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, cast

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mutirao import config as configuration
from mutirao.core.fleet import ClientId, Fleet, Wrapper, failure_of
from mutirao.deploy.flower.client import client_app
from mutirao.deploy.flower.run_tasks import task_from
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.flower.flower_fleet import FlowerFleet
from mutirao.report import execute


class Simulation(Wrapper):
    """A fleet in Flower's own simulation engine; it starts when it is first needed, and ends with `close`."""

    def __init__(self, recipe: str, config: Any, timeout: float = 86400, cpus: float = 1, gpus: float = 0) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("Flower's simulation needs Ray: install mutirao[flower]")
        self.recipe = recipe
        self.config = config
        self.timeout = timeout
        self.cpus = cpus
        self.gpus = gpus
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self._engine: threading.Thread | None = None

    @functools.cached_property
    def fleet(self) -> Fleet:  # type: ignore[override]  # what a wrapper is around is made when it is first asked for
        """The fleet inside the engine, which runs in a thread: its server does nothing but lend us its grid."""
        fleets: queue.SimpleQueue[FlowerFleet | None] = queue.SimpleQueue()
        app = ServerApp()
        nodes = len(find(self.recipe).prepare(self.config).population)
        made: list[FlowerFleet] = []

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            while len(set(grid.get_node_ids())) < nodes and not self._over.wait(0.02):
                pass  # the engine is about to make its nodes
            made.append(FlowerFleet(grid, self.timeout, greet=600.0))  # Ray takes its time to start
            fleets.put(made[0])
            self._over.wait()

        def engine() -> None:
            try:
                run_engine(app, configuration.dump(self.recipe, self.config), nodes, self.cpus, self.gpus)
            except BaseException as error:
                # flwr calls sys.exit where it cannot go on; in this thread that must not go unseen.
                self._problem = error
            finally:
                self._over.set()
                fleets.put(None)
                for fleet in made:
                    fleet.close()  # no client can answer any more

        self._engine = threading.Thread(target=engine, name="flower-engine", daemon=True)
        self._engine.start()
        fleet = fleets.get()
        self._check()
        return cast("FlowerFleet", fleet)

    def clients(self) -> list[ClientId]:
        """The simulated clients."""
        self._check()
        names = self.fleet.clients()
        self._check()  # it may have ended while we waited for names
        return names

    def close(self) -> None:
        """End the engine."""
        self._over.set()
        if self._engine is not None:
            self._engine.join(timeout=60)

    def _check(self) -> None:
        if (error := self._problem) is not None:
            while error.__cause__ is not None:  # the engine wraps what happened in two general errors
                error = error.__cause__
            raise MutiraoError(f"Flower's simulation ended: {failure_of(error).reason}") from error


def run_engine(app: ServerApp, toml: str, nodes: int, cpus: float, gpus: float) -> None:
    """Run Flower's simulation engine, silently, until its server app returns."""
    import ray
    from flwr.simulation import run_simulation
    from ray.job_config import JobConfig

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    if not ray.is_initialized():
        # As a "client" job its workers look for code where we do, and not in the working folder first.
        path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
        quiet: Any = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
        ray.init(job_config=JobConfig(_client_job=True), runtime_env=path, **quiet)
    settings: Any = {"client_resources": {"num_cpus": cpus, "num_gpus": gpus}}
    logger = logging.getLogger("flwr")
    before = logger.level
    # What matters in its log also comes as failures and errors.
    logger.setLevel(logging.CRITICAL + 1)
    try:
        run_simulation(app, client_app(lambda _: task_from(toml)), nodes, backend_config=settings)
    finally:
        logger.setLevel(before)


def simulate(
    recipe: str, config: Any, out: Path, resume: bool = False, watch: Any = None, **engine: float
) -> dict[str, Any]:
    """Run a recipe over Flower's simulation engine; `engine` may hold `timeout`, `cpus` and `gpus` (a worker).

    What is wrong is said before Ray is started:

    >>> simulate("quickstart", {"rounds": 0}, Path("runs/ray"))
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: rounds: 0 is too small, at least 1 is needed
    """
    with contextlib.closing(Simulation(recipe, config, **engine)) as fleet:
        return execute(recipe, config, out, fleet=fleet, resume=resume, watch=watch)
