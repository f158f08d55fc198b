"""The settings of a config.toml that differ from its recipe's defaults.

No code that a configuration names is loaded. The defaults of a recipe from outside Mutirão stand in the first event of
its audit trail, as `defaults`.
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
    """The settings that differ from the recipe's defaults; of another part, those that differ from that part's.

    `base` are the defaults of a recipe from outside Mutirão.

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
    """The defaults to compare a configuration with."""
    if recipe in NAMES:
        return recipe_defaults(recipe)
    return {**recipe_defaults(""), **(base or {})}


@cache
def recipe_defaults(recipe: str) -> dict[str, Any]:
    """The defaults of a recipe of Mutirão; of any other, those that all recipes share."""
    kind = config_class_of(recipe)
    return {**retired_of(kind), **defaults_table(kind)}


def defaults_table(kind: type[Common]) -> dict[str, Any]:
    """All defaults of a configuration, as config.toml would contain them."""
    return {key: value for key, value in tomllib.loads(dump("", resolve(kind, {}))).items() if key != "recipe"}


def config_class_of(recipe: str) -> type[Common]:
    """The configuration class of a recipe of Mutirão; of any other, the common one."""
    if recipe in NAMES:
        return find(recipe).config
    return Common


def own_defaults(kind: type[Common]) -> dict[str, Any]:
    """The defaults that a recipe declares itself, unlike those that all recipes share."""
    return {key: value for key, value in defaults_table(kind).items() if declares(kind, key)}


def declares(kind: type[Common], key: str) -> bool:
    """Whether the class declares this setting itself, with its own default."""
    own = kind.__dataclass_fields__
    return key in own and own[key] is not Common.__dataclass_fields__.get(key)


def part_module(recipe: str, kind: str) -> str:
    """The module of a recipe's own parts of this kind; empty if it has none."""
    fields = config_class_of(recipe).__dataclass_fields__
    if kind not in fields:
        return ""
    part = fields[kind].default
    if isinstance(part, Part):
        return part.home
    return ""


# The cache is bounded, because the names come from folders that others may have written.
@lru_cache(1000)
def part_defaults(kind: str, name: str, home: str) -> Table:
    """The default settings of a part; empty for a user's own part, as its code is not loaded here."""
    part = Part(name, {}, home)
    try:
        if ":" in name:
            return {}
        return {**retired_of(factory(kind, part)), **complete_part(kind, part).settings}
    except (ConfigError, KeyError, ImportError):
        # The part exists only in another version, or on another machine.
        return {}
