"""The former place of `mutirao.partitioning`, kept for code that imports from here."""

from typing import TYPE_CHECKING

from mutirao import partitioning as place
from mutirao.partitioning import *  # noqa: F403
from mutirao.partitioning import NAMES as NAMES

if not TYPE_CHECKING:
    __getattr__ = place.__getattr__
