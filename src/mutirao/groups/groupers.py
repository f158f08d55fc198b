"""The ways to find groups by name: clusterers of signatures, and groupers with a way of their own."""

from mutirao.groups import clusterers
from mutirao.groups.grouper import Alone
from mutirao.groups.rivals.cfl import Cfl
from mutirao.groups.rivals.fedclust import Fedclust
from mutirao.groups.rivals.ifca import Ifca
from mutirao.groups.rivals.pacfl import Pacfl

PARTS = (Alone, Ifca, Cfl, Pacfl, Fedclust)
NAMES: dict[str, type] = {**clusterers.NAMES, **{part.__name__.lower(): part for part in PARTS}}
