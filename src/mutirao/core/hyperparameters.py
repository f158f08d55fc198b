"""What a server may tell clients to train by, round by round: a name that nobody knows here is refused, not ignored."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from mutirao.config import Scalar
from mutirao.core.agreement import AGREED
from mutirao.errors import Refused

ANY = sys.float_info.max
CORRECTIONS = ("scaffold1", "scaffold2", "feddyn")  # what corrects a client's steps: see `mutirao.training.corrections`
# What the server may tell a client to train by, the type it must have, and the most that is taken.
HYPERPARAMETERS: dict[str, tuple[type, float]] = {
    "lr": (float, ANY),
    "epochs": (int, 10_000),
    "batch_size": (int, 1 << 24),
    "mu": (float, ANY),
    "correct": (str, 0),
    "counted": (int, ANY),  # the round with which the client's update last counted: what a later one left is undone
}
FROM_0 = ("mu", "counted")  # those that may be 0
BY_METHODS = ("mu", "correct")  # of these what no setting of a recipe says: a method does
ABOUT = frozenset({"seed", "round", "extras", "probe_samples"})  # what else a request may say


def read_hyperparameters(config: Mapping[str, Scalar], known: Iterable[str] = HYPERPARAMETERS) -> dict[str, Any]:
    """What a request tells a client to train by; Refused, by name, is what is unknown here or cannot be."""
    told: dict[str, Any] = {}
    for key, value in config.items():
        if key in known:
            told[key] = check_hyperparameter(key, value)
        elif key not in ABOUT and not key.startswith(AGREED):
            right = ", ".join(sorted(known)) or "nothing"
            raise Refused(f"told.{key[:80]}", f"nothing here is set by that; what can be told is {right}")
    return told


def check_hyperparameter(key: str, value: Any) -> Any:
    """A value that was told, as its type; Refused if it is of another, or out of range."""
    kind, most = HYPERPARAMETERS[key]
    if kind is str:
        if value not in CORRECTIONS:
            raise Refused(f"told.{key}", f"it is {str(value)[:40]!r}, but must be one of {', '.join(CORRECTIONS)}")
        return value
    sound = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    enough = sound and (value > 0 or (value == 0 and key in FROM_0))
    if not enough or value > most:
        least, whole = "0 or above" if key in FROM_0 else "above 0", "a whole number" if kind is int else "a number"
        right = f"{whole} {least}" + ("" if most == ANY else f" and at most {most:g}")
        raise Refused(f"told.{key}", f"it is {str(value)[:40]!r}, but must be {right}")
    return kind(value)
