"""GeoRisk and ZRisk against the definition written out with loops, and the risks of ragged batches."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from mutirao.risk import batch_risks, geo_risk, ideal_risk, z_risk

Matrix = npt.NDArray[np.float64]


def by_hand(m: Matrix, aversion: float) -> tuple[list[float], list[float]]:
    total, z_risks, geo_risks = m.sum(), [], []
    for row in m:
        z_sum = 0.0
        for i, value in enumerate(row):
            expected = row.sum() * m[:, i].sum() / total if total else 0.0
            if expected > 0:
                z = (value - expected) / math.sqrt(expected)
                z_sum += z if z < 0 else (1 + aversion) * z
        z_risks.append(z_sum)
        geo_risks.append(math.sqrt(row.mean() * norm.cdf(z_sum / len(row))))
    return z_risks, geo_risks


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return (rng.integers(0, 17, (rows, columns)) * (rng.random((rows, columns)) < draw(st.floats(0, 1)))).astype(float)


@given(matrices(), st.floats(0, 10))
@settings(deadline=None)
def test_risks_equal_the_definition(m: Matrix, aversion: float) -> None:
    z, geo = by_hand(m, aversion)
    np.testing.assert_allclose(z_risk(m, aversion), z, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(geo_risk(m, aversion), geo, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("m", [np.zeros((3, 4)), np.ones((1, 4)), np.ones((4, 1)), np.full((2, 2), 16.0)])
def test_edges(m: Matrix) -> None:
    z, geo = by_hand(m, 2.0)
    np.testing.assert_allclose(z_risk(m, 2.0), z, atol=1e-9)
    np.testing.assert_allclose(geo_risk(m, 2.0), geo, atol=1e-9)
    assert z_risk(m, 2.0) == pytest.approx(np.zeros(len(m)), abs=1e-9)  # all alike: nobody is at risk


@given(matrices())
@settings(deadline=None)
def test_the_ideal_client_has_no_z_risk(m: Matrix) -> None:
    ideal = m.mean(0)
    _, geo = by_hand(np.vstack([ideal] * 3), 2.0)
    assert float(ideal_risk(m)) == pytest.approx(geo[0], abs=1e-9)


def ragged(errors: list[list[list[int]]], aversion: float) -> list[float]:
    """Risks batch by batch as the paper has them, with loops."""
    risks: list[list[float]] = [[] for _ in errors]
    for b in range(max((len(e) for e in errors), default=0)):
        here = [k for k, e in enumerate(errors) if len(e) > b]
        width = min(len(errors[k][b]) for k in here)
        m = np.array([errors[k][b][:width] for k in here], float)
        _, geo = by_hand(m, aversion)
        for k, value in zip(here, geo, strict=True):
            risks[k].append(math.sqrt(0.5 * m.mean()) - value)
    return [float(np.median(r)) if r else 0.0 for r in risks]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(deadline=None)
def test_ragged_batches_equal_the_loops(seed: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    errors = [
        [rng.integers(0, 17, rng.integers(1, 5)).tolist() for _ in range(rng.integers(0, 6))] for _ in range(clients)
    ]
    sent = [np.array([x for batch in e for x in batch], np.uint8) for e in errors]
    sizes = [np.array([len(batch) for batch in e], np.int32) for e in errors]
    np.testing.assert_allclose(batch_risks(sent, sizes, 2.0), ragged(errors, 2.0), atol=1e-9)
