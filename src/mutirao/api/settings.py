"""Keywords as settings: the names, checks and messages of `--set`, and a part's own settings by their name alone."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import Common, Part, can_set, coerce, factory, flatten, is_below, nearest
from mutirao.errors import ConfigError

Pairs = tuple[tuple[str, Any], ...]


def route(config: type[Common], keywords: Mapping[str, Any]) -> Pairs:
    """Keywords as pairs that `resolve` takes; `alpha` is `partition.alpha` if the chosen partition alone has it.

    >>> route(Common, {"partition": "dirichlet", "alpha": 0.3, "aggregate": {"name": "fedyogi", "lr": 0.02}})
    (('partition', 'dirichlet'), ('partition.alpha', 0.3), ('aggregate.name', 'fedyogi'), ('aggregate.lr', 0.02))
    """
    pairs = flatten({key: as_plain(value) for key, value in keywords.items() if value is not None})
    known = {f.name for f in dataclasses.fields(config)}
    parts = parts_chosen(config, pairs)
    return tuple((key if key.partition(".")[0] in known else home_of(key, known, parts), value) for key, value in pairs)


def as_plain(value: Any) -> Any:
    """A value as a TOML file would hold it."""
    if isinstance(value, Part):
        return {"name": value.name, **value.settings}
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def parts_chosen(config: type[Common], pairs: list[tuple[str, Any]]) -> dict[str, Part]:
    """The part of each kind: the one that was named, or else the default."""
    hints = typing.get_type_hints(config)
    chosen: dict[str, Part] = {f.name: f.default for f in dataclasses.fields(config) if hints[f.name] is Part}  # type: ignore[misc]
    for key, value in pairs:
        kind = key.partition(".")[0]
        if kind in chosen and not is_below(key) and value != {}:
            chosen[kind] = Part(coerce(kind, value, str), home=chosen[kind].home)
    return chosen


def home_of(key: str, known: set[str], parts: Mapping[str, Part]) -> str:
    """The full name of a setting that is known by its last name alone."""
    takes = {kind: can_set(factory(kind, part)) for kind, part in parts.items()}
    homes = [kind for kind, settings in takes.items() if key in settings]
    if len(homes) == 1:
        return f"{homes[0]}.{key}"
    if homes:
        named = " and ".join(f"{kind}={parts[kind].name}" for kind in homes)
        right = f'say which, such as settings={{"{homes[0]}.{key}": ...}}'
        raise ConfigError(f"{key!r} is a setting of {named}; {right}")
    raise ConfigError(f"unknown setting {key!r}{nearest(key, known | {s for own in takes.values() for s in own})}")
