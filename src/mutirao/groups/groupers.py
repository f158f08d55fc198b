"""The ways to find groups by name: clusterers of signatures, and groupers with a way of their own."""

from dataclasses import dataclass

from mutirao.groups import clusterers
from mutirao.groups.grouper import Alone, Grouper


@dataclass(frozen=True)
class Ungrouped(Grouper):
    """No groups: one model for all, and no client warms up."""


NAMES: dict[str, type] = {"none": Ungrouped, **clusterers.NAMES, "alone": Alone}
