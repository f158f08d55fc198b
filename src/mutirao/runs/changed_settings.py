"""What of a configuration is not its recipe's default, told from a table as config.toml holds it.

No code that a table names is loaded. The defaults of a recipe that is not one of Mutirão's are kept in the trail of its
run, whose first event has them as `defaults`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from mutirao.config import Common, Part, complete_part, dump, factory, resolve, retired_of
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, find

Table = Mapping[str, Any]


def changed_settings(config: Table, base: Table | None = None) -> dict[str, Any]:
    """The settings that are not the recipe's defaults; those of a part that is not the default, where not its own.

    `base` are the defaults of a recipe that is not one of Mutirão's.

    >>> changed_settings({"recipe": "quickstart", "lr": 0.1, "aggregate": {"name": "fedyogi", "lr": 0.01, "tau": 0.1}})
    {'lr': 0.1, 'aggregate': 'fedyogi', 'aggregate.tau': 0.1}
    """
    recipe = str(config.get("recipe", ""))
    usual = defaults_of(recipe, base)
    apart: dict[str, Any] = {}
    for key, value in config.items():
        normal = usual.get(key)
        if not isinstance(value, Mapping):
            if key != "recipe" and (key not in usual or normal != value):
                apart[key] = value
            continue
        own: Table = normal if isinstance(normal, Mapping) else {}
        if (name := value.get("name", own.get("name"))) != own.get("name"):
            apart[key] = name
            own = part_defaults(key, str(name), part_module(recipe, key))
        apart |= {f"{key}.{k}": v for k, v in value.items() if k != "name" and (k not in own or own[k] != v)}
    return apart


def defaults_of(recipe: str, base: Table | None = None) -> dict[str, Any]:
    """The defaults that a configuration is held against."""
    return recipe_defaults(recipe) if recipe in NAMES else {**recipe_defaults(""), **(base or {})}


@cache
def recipe_defaults(recipe: str) -> dict[str, Any]:
    """The defaults of a recipe of Mutirão's; of any other, those that all recipes share."""
    kind = config_class_of(recipe)
    return {**retired_of(kind), **defaults_table(kind)}


def defaults_table(kind: type[Common]) -> dict[str, Any]:
    """All defaults of a configuration, as its file would hold them."""
    return {key: value for key, value in tomllib.loads(dump("", resolve(kind, {}))).items() if key != "recipe"}


def config_class_of(recipe: str) -> type[Common]:
    """The settings of a recipe of Mutirão's; of any other, those that all recipes share."""
    return find(recipe).config if recipe in NAMES else Common


def own_defaults(kind: type[Common]) -> dict[str, Any]:
    """The defaults that a recipe declares itself, which are not those that all recipes share."""
    return {key: value for key, value in defaults_table(kind).items() if declares(kind, key)}


def declares(kind: type[Common], key: str) -> bool:
    """Whether the settings have one of that name with a default of their own."""
    own = kind.__dataclass_fields__
    return key in own and own[key] is not Common.__dataclass_fields__.get(key)


def part_module(recipe: str, kind: str) -> str:
    """The module with a recipe's own parts of that kind, if it has one."""
    fields = config_class_of(recipe).__dataclass_fields__
    part = fields[kind].default if kind in fields else None
    return part.home if isinstance(part, Part) else ""


@lru_cache(1000)  # names come from folders
def part_defaults(kind: str, name: str, home: str) -> Table:
    """The settings that a part has by itself; none of a user's own part, which is not loaded for that."""
    part = Part(name, {}, home)
    try:
        return {} if ":" in name else {**retired_of(factory(kind, part)), **complete_part(kind, part).settings}
    except (ConfigError, KeyError, ImportError):  # a kind, part or package of another version or machine
        return {}
