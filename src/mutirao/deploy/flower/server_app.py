"""The Flower server app that runs the recipe a run configuration names."""

import functools
import os
import re
import tomllib
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mutirao import config as configuration
from mutirao.deploy.flower.run_tasks import recipe_from, settings_in
from mutirao.deploy.layout import FOLDER_VARIABLE
from mutirao.deploy.server.control_calls import admitted_samples, is_entitled
from mutirao.flower.flower_fleet import FlowerFleet, IsEntitled, KeepsTrail
from mutirao.report import execute
from mutirao.runs.audit_trail import clients_with_trails
from mutirao.runs.execute import reopen
from mutirao.runs.progress import Progress


def server_app() -> ServerApp:
    """A Flower server that runs the recipe the run configuration names and writes its run folder.

    >>> type(server_app()).__name__  # in pyproject.toml: serverapp = "my_package.server:app"
    'ServerApp'
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        asked = context.run_config
        recipe, config = recipe_from(toml := settings_in(asked))
        out = Path(str(asked.get("out", "")) or f"runs/{re.sub(r'[^A-Za-z0-9_.]+', '-', recipe)}")
        resume = configuration.coerce("resume", asked.get("resume", False), bool)
        timeout = configuration.coerce("timeout", asked.get("timeout", 600.0), float, low=1e-9)
        if resume and (out / "config.toml").exists():
            table = {k: v for k, v in tomllib.loads(toml).items() if k != "recipe"}
            recipe, config = reopen(recipe, out, configuration.flatten(table))  # refuses other settings
        admitted = admitted_samples(Path(os.environ.get("MUTIRAO_SITE") or "."))
        entitled = entitlement_here()
        keepers = keepers_here(out)
        fleet = FlowerFleet(grid, timeout, is_entitled=entitled, keeps_trail=keepers, admitted=admitted)
        execute(recipe, config, out, fleet=fleet, resume=resume, watch=Progress(config.rounds))

    return app


def entitlement_here() -> IsEntitled:
    """Which node may use which name: on a server made by `mutirao site`, only the site admitted under it."""
    folder = server_here()
    if folder:
        return functools.partial(is_entitled, folder)
    return lambda name, node: True


def keepers_here(out: Path) -> KeepsTrail:
    """Which clients' replies need the head of an audit trail: on such a server all; else those in the run's trail."""
    if server_here():
        return lambda name: True
    return clients_with_trails(out / "audit.jsonl").__contains__


def server_here() -> Path | None:
    """The server folder of `mutirao site` that this process belongs to; None without one."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if folder and (Path(folder) / "sites").is_dir():
        return Path(folder)
    return None
