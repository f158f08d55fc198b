"""The command line: a thin shell over the library."""

import sys

if sys.argv[:1] == ["-m"] and "mutirao.cli" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # python -m mutirao.cli: Python put the working folder first

from mutirao.cli.main import main

__all__ = ["main"]
