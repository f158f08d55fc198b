"""Which versions of Python and of the packages that matter are installed here."""

import importlib.metadata
import sys

PACKAGES = ("mutirao", "flwr", "torch", "numpy")  # those that must agree for results to repeat


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter, without importing them; empty: not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found
