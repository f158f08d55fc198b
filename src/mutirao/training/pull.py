"""What pulls a client's steps besides its gradient: w <- w - lr (g + b + mu (w - a)).

The correction b and the anchor a are arrays of the request, `correction.NAME` and `anchor.NAME`; a method that keeps
something at the client puts them there on the way (`mutirao.training.corrections`). Without an anchor it is the model
that was received, as in FedProx. What is not named is not corrected.
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
    """The correction and the anchor by the names of the model's arrays; empty: none."""

    correction: Arrays
    anchor: Arrays

    @classmethod
    def of(cls, request: Request) -> "Pull":
        """Those that a request holds; ValueError if they do not fit the model that comes with it."""
        if not request.extras:
            return NOTHING
        correction, anchor = (extras_under(request, prefix) for prefix in (CORRECTION, ANCHOR))
        if correction or anchor:
            return cls(correction, anchor)
        return NOTHING

    def corrections(self, names: Iterable[str], like: Iterable[Array]) -> list[Array]:
        """The correction of each of these arrays, 0 where there is none."""
        return [self.correction.get(n, np.zeros_like(x)) for n, x in zip(names, like, strict=True)]


def extras_under(request: Request, prefix: str) -> Arrays:
    """The extras of a request whose names begin so, by the names of the arrays they are for."""
    found = {k.removeprefix(prefix): v for k, v in request.extras.items() if k.startswith(prefix)}
    for name, value in found.items():
        mine = request.arrays.get(name)
        if mine is None or mine.shape != value.shape or mine.dtype != value.dtype:
            raise ValueError(f"{prefix}{name[:80]} is not of the shape and type of an array of the model")
    if found and not is_finite(found):
        raise ValueError(f"an array among {prefix}... holds NaN or infinity")
    return found


NOTHING = Pull({}, {})
