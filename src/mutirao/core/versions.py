"""The installed versions of Python and of the packages on which results depend."""

import importlib.metadata
import sys

PACKAGES = ("mutirao", "flwr", "torch", "numpy")  # must be the same for results to repeat bit for bit


def versions() -> dict[str, str]:
    """The versions of Python and of these packages, without importing them; empty if not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found
