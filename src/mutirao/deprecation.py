"""Former names of public functions and classes, which keep working for one minor release and warn."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

REMOVED_IN = "0.3"


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds what has another name now.

    >>> find = former_names("mutirao.metrics", {"wobble_in": "final_std"})
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     found = find("wobble_in")
    >>> found.__name__, str(caught[0].message)
    ('final_std', 'mutirao.metrics.wobble_in is called final_std now; the former name goes with 0.3')
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is called {names[name]} now; the former name goes with {REMOVED_IN}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), names[name])

    return find
