"""The former place of `mutirao.robustness.attacks`, kept for code that imports from here."""

from mutirao.robustness.attacks import *  # noqa: F403
from mutirao.robustness.attacks import NAMES as NAMES
