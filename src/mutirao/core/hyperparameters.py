"""Hyperparameters that a server may send clients round by round; an unknown name is refused, not ignored."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from mutirao.config import Scalar
from mutirao.core.agreement import AGREED
from mutirao.errors import Refused

ANY = sys.float_info.max
CORRECTIONS = ("scaffold1", "scaffold2", "feddyn")  # of a client's steps: see `mutirao.training.corrections`
# The hyperparameters that a server may send, with their types and largest values.
HYPERPARAMETERS: dict[str, tuple[type, float]] = {
    "lr": (float, ANY),
    "epochs": (int, 10_000),
    "batch_size": (int, 1 << 24),
    "mu": (float, ANY),
    "correct": (str, 0),
    "counted": (int, ANY),  # the last round in which the client's update counted: the effects of later ones are undone
}
FROM_0 = ("mu", "counted")  # may be 0
BY_METHODS = ("mu", "correct")  # sent by methods; no setting of a recipe
ABOUT = frozenset({"seed", "round", "extras", "probe_samples"})  # other settings of a request


def read_hyperparameters(config: Mapping[str, Scalar], known: Iterable[str] = HYPERPARAMETERS) -> dict[str, Any]:
    """The hyperparameters in a request; raises Refused, with the name, if one is unknown or out of range."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in known:
            found[key] = check_hyperparameter(key, value)
        elif key not in ABOUT and not key.startswith(AGREED):
            right = ", ".join(sorted(known)) or "nothing"
            raise Refused(f"told.{key[:80]}", f"not a hyperparameter of this client; supported: {right}")
    return found


def check_hyperparameter(key: str, value: Any) -> Any:
    """A hyperparameter as its type; raises Refused if it has another, or is out of range."""
    kind, most = HYPERPARAMETERS[key]
    if kind is str:
        if value not in CORRECTIONS:
            raise Refused(f"told.{key}", f"it is {str(value)[:40]!r}, but must be one of {', '.join(CORRECTIONS)}")
        return value
    # In Python True is an int, but it is no number of epochs.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        is_number = is_number and isinstance(value, int)
    is_large_enough = is_number and (value > 0 or (value == 0 and key in FROM_0))
    if not is_large_enough or value > most:
        what = "a whole number" if kind is int else "a number"
        least = "0 or above" if key in FROM_0 else "above 0"
        right = f"{what} {least}"
        if most != ANY:
            right += f" and at most {most:g}"
        raise Refused(f"told.{key}", f"it is {str(value)[:40]!r}, but must be {right}")
    return kind(value)
