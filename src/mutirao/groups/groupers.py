"""The ways to find groups by name: clusterers of signatures, and groupers with a way of their own."""

from mutirao.groups import clusterers
from mutirao.groups.grouper import Alone

NAMES: dict[str, type] = {**clusterers.NAMES, "alone": Alone}
