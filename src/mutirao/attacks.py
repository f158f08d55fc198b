"""The former place of `mutirao.robustness.attacks`, kept for code that imports from here."""

from typing import TYPE_CHECKING

from mutirao.robustness import attacks as place
from mutirao.robustness.attacks import *  # noqa: F403
from mutirao.robustness.attacks import NAMES as NAMES

if not TYPE_CHECKING:
    __getattr__ = place.__getattr__
