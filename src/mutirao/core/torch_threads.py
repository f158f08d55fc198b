"""Limit torch to one thread, without importing torch."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: results do not depend on the number of cores, and small models are faster.

    Nothing happens if torch has not been imported. The number of torch threads is set per thread.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None and hasattr(torch, "get_num_threads") else 1
    if torch is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
