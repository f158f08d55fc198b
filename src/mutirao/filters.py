"""The former place of `mutirao.robustness.filters`, kept for code that imports from here."""

from mutirao.robustness.filters import *  # noqa: F403
from mutirao.robustness.filters import NAMES as NAMES
