"""How much of a square an outline covers: even-odd rule, exact along each of many scan lines."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LINES = 64  # scan lines through a square: a straight edge is off by at most half a line


def bounds(rings: Sequence[Floats]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of an outline."""
    points = np.concatenate(rings)
    (left, top), (right, bottom) = points.min(0), points.max(0)
    return float(left), float(top), float(right), float(bottom)


def crossings(starts: Floats, ends: Floats, y: float) -> Floats:
    """Where the edges of all rings cross a horizontal line, from left to right; an even number of them."""
    cuts = (starts[:, 1] <= y) != (ends[:, 1] <= y)
    a, b = starts[cuts], ends[cuts]
    return np.sort(a[:, 0] + (y - a[:, 1]) * (b[:, 0] - a[:, 0]) / (b[:, 1] - a[:, 1]))


def covered(rings: Sequence[Floats], lefts: Floats, top: float, width: float, height: float) -> Floats:
    """The area inside the outline of each rectangle of a row, by `LINES` scan lines.

    Inside is what an odd number of edges must be crossed to leave, so holes and crossed outlines need no special case.
    """
    starts = np.concatenate(rings)
    ends = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
    found = np.zeros(len(lefts))
    for y in top + (np.arange(LINES) + 0.5) * height / LINES:
        x = crossings(starts, ends, y)
        for enter, leave in zip(x[::2], x[1::2], strict=True):
            found += np.maximum(0.0, np.minimum(lefts + width, leave) - np.maximum(lefts, enter))
    area: Floats = found * height / LINES
    return area


def area(rings: Sequence[Floats]) -> float:
    """The area inside an outline; a point has none."""
    left, top, right, bottom = bounds(rings)
    if right <= left or bottom <= top:
        return 0.0
    return float(covered(rings, np.array([left]), top, right - left, bottom - top)[0])
