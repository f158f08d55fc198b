"""Presets: standard data sets by name, each a recipe with settings that suit the data."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mutirao.experiments.task import NAMES

HOME = Path(__file__).parent / "standard"


@cache
def presets() -> dict[str, dict[str, Any]]:
    """All presets: what each is `about`, its `recipe`, and its settings."""
    return {file.stem: tomllib.loads(file.read_text("utf-8")) for file in sorted(HOME.glob("*.toml"))}


def expand(name: str) -> tuple[str, dict[str, Any]]:
    """The recipe and settings of a preset; the name of a recipe is returned as it is.

    >>> expand("quickstart")
    ('quickstart', {})
    >>> recipe, table = expand("fashion-mnist")
    >>> recipe, table["data"]
    ('cifar10', 'fashion-mnist')
    """
    if name in NAMES or name not in presets():
        return name, {}
    table = dict(presets()[name])
    del table["about"]
    return str(table.pop("recipe")), table
