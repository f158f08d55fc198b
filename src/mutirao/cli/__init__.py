"""The command line: a thin shell over the library."""

from mutirao.cli.main import main

__all__ = ["main"]
