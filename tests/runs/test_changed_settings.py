"""What of a configuration is not the default: nothing of a recipe as it is, and a user's own defaults are kept."""

import tomllib
from pathlib import Path

import pytest

from iris import IrisConfig, iris_task
from mutirao.config import dump, resolve
from mutirao.experiments.task import NAMES, Recipe, find
from mutirao.runs.changed_settings import changed_settings, own_defaults
from mutirao.runs.execute import execute
from mutirao.runs.reader import Record


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_as_it_is_differs_in_nothing(recipe: str) -> None:
    assert changed_settings(tomllib.loads(dump(recipe, resolve(find(recipe).config, {}, ())))) == {}


def test_a_setting_of_earlier_versions_differs_only_where_it_is_not_the_constant_of_now() -> None:
    old = {"recipe": "groups", "tolerance": 0.002, "devices": {"name": "fedcs", "slowest": 10.0, "jitter": 0.1}}
    assert changed_settings(old) == {"devices": "fedcs"}
    old |= {"tolerance": 0.01, "devices": {"name": "fedcs", "slowest": 5.0}}
    assert changed_settings(old) == {"tolerance": 0.01, "devices": "fedcs", "devices.slowest": 5.0}


def test_the_defaults_of_ones_own_recipe_are_kept_and_told_without_loading_it(tmp_path: Path) -> None:
    execute(Recipe(IrisConfig, iris_task), {"rounds": 2, "lr": 0.03}, tmp_path / "run")
    record = Record.of(tmp_path / "run")
    assert record.events[0]["defaults"] == own_defaults(IrisConfig) != {}
    record.config["recipe"] = "gone:recipe"  # as on a machine without it
    assert changed_settings(record.config, record.events[0]["defaults"])["lr"] == 0.03
