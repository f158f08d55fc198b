"""What is known of a recipe by name alone is known at once: its module needs neither torch nor anything as heavy."""

import subprocess
import sys

from mutirao.systems.images.backbones import BACKBONES
from mutirao.systems.images.choices import BACKBONE_NAMES, DEPTHS, NETWORK_NAMES
from mutirao.systems.images.networks import NETWORKS
from mutirao.systems.ranking import recipe
from mutirao.systems.ranking.losses import LOSSES

HEAVY = "torch scipy sklearn PIL matplotlib numba flwr"
IMPORTS = f"""
import sys
from dataclasses import fields
from importlib import import_module
from mutirao.config import Part
from mutirao.experiments.task import NAMES, find

homes = {{f.default.home for name in NAMES for f in fields(find(name).config) if isinstance(f.default, Part)}}
assert "mutirao.systems.recsys.initial_items" in homes
for home in homes - {{""}}:
    import_module(home)
print(*sorted(set("{HEAVY}".split()) & set(sys.modules)))
"""


def test_every_recipe_and_the_homes_of_its_parts_are_imported_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_light_names_are_those_of_what_they_stand_for() -> None:
    assert tuple(NETWORKS) == NETWORK_NAMES
    assert tuple(BACKBONES) == BACKBONE_NAMES
    assert set(DEPTHS.values()) == {"features", "maps", "pixels"}
    choices = recipe.Config.__dataclass_fields__["loss"].metadata["choices"]
    assert choices == ("grades", *LOSSES)
