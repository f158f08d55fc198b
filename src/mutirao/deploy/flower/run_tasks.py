"""The task that a Flower run requests, and the client that a node is in it."""

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Context

from mutirao import config as configuration
from mutirao.core.fleet import ClientId, Scalar
from mutirao.deploy.policy.rules import assignments
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find

TaskOf = Callable[[Context], Task]
OWN = "sites"  # the setting of recipes by which data are one party's own


def recipe_task(context: Context, instead: Mapping[str, Scalar] | None = None) -> Task:
    """The task of the recipe that the run configuration names; a node may say where its own data lie, and more."""
    return task_from(settings_at_site(context.run_config, context.node_config, instead))


def settings_at_site(
    run_config: Mapping[str, Scalar], node_config: Mapping[str, Scalar], instead: Mapping[str, Scalar] | None = None
) -> str:
    """The full configuration of a run as a site works by it: its own data are never partitioned again."""
    asked: dict[str, Any] = dict(run_config)
    own: dict[str, Scalar] = dict(instead or {})
    if "data" in node_config:
        # These are applied after the run's settings: no run may point a site to other data.
        own = {"data": node_config["data"], **own}
    recipe = find(str(asked.get("recipe", "quickstart")))
    if is_place(own.get("data")) and OWN in {f.name for f in fields(recipe.config)}:
        own[OWN] = True
    return settings_in(asked, own)


def is_place(data: Scalar | None) -> bool:
    """Whether a site's `data` is a file or a folder of its own, and no set that all have by name."""
    try:
        return isinstance(data, str) and data != "" and Path(data).expanduser().exists()
    except (OSError, ValueError):  # a name too long, or with a zero in it
        return False


@functools.lru_cache(maxsize=2)
def task_from(toml: str) -> Task:
    """The task of a full configuration; kept, because Flower's engine gives a process one message after another."""
    recipe, config = recipe_from(toml)
    return find(recipe).prepare(config)


def recipe_from(toml: str) -> tuple[str, Any]:
    """A recipe's name and its configuration, from the text `mutirao.config.dump` writes."""
    table = tomllib.loads(toml)
    name = table.pop("recipe")
    return name, configuration.resolve(find(name).config, table)


def settings_in(run_config: Mapping[str, Scalar], instead: Mapping[str, Scalar] | None = None) -> str:
    """The full configuration that a Flower run requests: its settings, then those in `set`, then those `instead`."""
    name = str(run_config.get("recipe", "quickstart"))
    sets = [*assignments(run_config), *(instead or {}).items()]
    return configuration.dump(name, configuration.resolve(find(name).config, {}, sets))


def client_name(context: Context, task_of: TaskOf) -> ClientId:
    """The name in the node's configuration; in a simulation the client that has the partition's number."""
    if "name" in context.node_config:
        return str(context.node_config["name"])
    if "partition-id" not in context.node_config:
        raise ConfigError("this node has no name; start it with --node-config 'name=\"...\"'")
    names = sorted(task_of(context).population)
    i = int(context.node_config["partition-id"])
    if not 0 <= i < len(names):
        raise ConfigError(f"partition {i} has no client: the task has {len(names)}")
    return names[i]


def client_data(task: Task, name: ClientId) -> Any:
    """What the client of that name holds."""
    try:
        return task.population[name]
    except KeyError:
        # A population may read data on access, and fail with a KeyError of its own.
        if name in list(task.population):
            raise
        raise ConfigError(f"the task has no client {name!r}{configuration.nearest(name, task.population)}") from None
