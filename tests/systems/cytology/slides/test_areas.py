"""Areas by scan lines, against clipping by hand and against areas that are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from mutirao.systems.cytology.slides.annotations import LINES, Floats, area, covered


def shoelace(ring: Floats) -> float:
    x, y = ring[:, 0], ring[:, 1]
    return abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2


def clipped(ring: Floats, side: float) -> float:
    """The area of a convex polygon within [0, side]^2: cut by one edge of the square after the other."""
    points = [tuple(p) for p in ring]
    for axis, limit, sign in ((0, 0.0, 1), (0, side, -1), (1, 0.0, 1), (1, side, -1)):
        out = []
        for a, b in zip(points, points[1:] + points[:1], strict=True):
            inside_a, inside_b = sign * (a[axis] - limit) >= 0, sign * (b[axis] - limit) >= 0
            if inside_a:
                out.append(a)
            if inside_a != inside_b:
                t = (limit - a[axis]) / (b[axis] - a[axis])
                out.append((a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])))
        points = out
        if not points:
            return 0.0
    return shoelace(np.array(points))


@given(st.integers(0, 10_000))
def test_the_share_of_a_square_that_a_convex_outline_covers(seed: int) -> None:
    cloud = np.random.default_rng(seed).uniform(-60, 160, (12, 2))
    ring = cloud[ConvexHull(cloud).vertices]
    found = covered([ring], np.array([0.0, 100.0]), 0.0, 100.0, 100.0) / 1e4
    assert abs(found[0] - clipped(ring, 100) / 1e4) < 1 / LINES
    moved = clipped(ring - [100, 0], 100)
    assert abs(found[1] - moved / 1e4) < 1 / LINES


def test_holes_and_crossed_outlines_count_by_even_and_odd() -> None:
    outer = np.array([[0, 0], [100, 0], [100, 100], [0, 100]], float)
    hole = np.array([[25, 25], [75, 25], [75, 75], [25, 75]], float)
    assert area([outer]) == pytest.approx(1e4)
    assert area([outer, hole]) == pytest.approx(7500)
    assert area([outer, hole[::-1]]) == pytest.approx(7500)  # whichever way round it was drawn
    bow = np.array([[0, 0], [100, 100], [100, 0], [0, 100]], float)
    assert area([bow]) == pytest.approx(5000)  # the signed area would be 0
    closed = np.concatenate([outer, outer[:1]])  # GeoJSON repeats the first point
    assert area([closed]) == pytest.approx(1e4)
    assert area([np.array([[5.0, 5.0]])]) == 0
