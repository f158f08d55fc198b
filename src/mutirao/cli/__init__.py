"""The command line: a thin shell over the library."""

import os
import signal
import sys
import threading
from typing import Any, NoReturn

if sys.argv[:1] == ["-m"] and "mutirao.cli" in sys.orig_argv and not sys.flags.safe_path:
    # For `python -m mutirao.cli` Python puts the working folder first, where a file could replace any module.
    del sys.path[0]


def _stop(*_: Any) -> NoReturn:
    """End at once on Ctrl-C: nothing has begun, and an import that is interrupted would show its insides."""
    os.write(2, b"error: stopped\n")
    os._exit(130)


_usual = signal.getsignal(signal.SIGINT)
_own = threading.current_thread() is threading.main_thread() and _usual is signal.default_int_handler
if _own:
    signal.signal(signal.SIGINT, _stop)

from mutirao.cli.main import main  # noqa: E402

if _own:
    signal.signal(signal.SIGINT, _usual)

__all__ = ["main"]
