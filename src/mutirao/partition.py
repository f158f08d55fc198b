"""The former place of `mutirao.partitioning`, kept for code that imports from here."""

from mutirao.partitioning import *  # noqa: F403
from mutirao.partitioning import NAMES as NAMES
