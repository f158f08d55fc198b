"""All groupers by name: clusterers of signatures, and groupers with a method of their own."""

from dataclasses import dataclass

from mutirao.clustering import clusterers
from mutirao.clustering.base import Alone, Grouper
from mutirao.clustering.cfl import Cfl
from mutirao.clustering.fedclust import Fedclust
from mutirao.clustering.ifca import Ifca
from mutirao.clustering.pacfl import Pacfl


@dataclass(frozen=True)
class Ungrouped(Grouper):
    """No groups: one model for all, and no client uses_warm_up up.

    >>> from mutirao.config import Common, resolve
    >>> resolve(Common, {}).cluster.name, NAMES["none"] is Ungrouped  # by default
    ('none', True)
    """


RIVALS = {part.__name__.lower(): part for part in (Ifca, Cfl, Pacfl, Fedclust)}
NAMES: dict[str, type] = {"none": Ungrouped, **clusterers.NAMES, "alone": Alone, **RIVALS}
