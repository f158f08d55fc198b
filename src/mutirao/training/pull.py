"""What is added to the gradient of a local step: w <- w - lr (g + b + mu (w - a)).

The correction b and the anchor a are arrays of the request, `correction.NAME` and `anchor.NAME`; methods with client
state add them (`mutirao.training.corrections`). Without an anchor, a is the received model, as in FedProx. Arrays that
are not named are not corrected.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mutirao.core.arrays import Array, Arrays, is_finite
from mutirao.core.fleet import Request

CORRECTION = "correction."
ANCHOR = "anchor."


@dataclass(frozen=True, eq=False)
class Pull:
    """Correction and anchor by the names of the model's arrays; empty if there are none."""

    correction: Arrays
    anchor: Arrays

    @classmethod
    def of(cls, request: Request) -> "Pull":
        """The pull of a request; ValueError if it does not match the request's model."""
        if not request.extras:
            return NOTHING
        correction, anchor = (extras_under(request, prefix) for prefix in (CORRECTION, ANCHOR))
        if correction or anchor:
            return cls(correction, anchor)
        return NOTHING

    def anchors(self, names: Iterable[str], model: Arrays) -> list[Array]:
        """The anchor of each of these arrays, the model's own array where there is none."""
        return [self.anchor.get(name, model[name]) for name in names]

    def corrections(self, names: Iterable[str], model: Arrays) -> list[Array]:
        """The correction of each of these arrays, 0 where there is none."""
        return [self.correction.get(name, np.zeros_like(model[name])) for name in names]


def extras_under(request: Request, prefix: str) -> Arrays:
    """The extras of a request with this prefix, by the names of their arrays."""
    found = {k.removeprefix(prefix): v for k, v in request.extras.items() if k.startswith(prefix)}
    for name, value in found.items():
        mine = request.arrays.get(name)
        if mine is None or mine.shape != value.shape or mine.dtype != value.dtype:
            raise ValueError(f"{prefix}{name[:80]} is not of the shape and type of an array of the model")
    if found and not is_finite(found):
        raise ValueError(f"an array among {prefix}... holds NaN or infinity")
    return found


NOTHING = Pull({}, {})
