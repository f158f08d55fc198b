"""PACFL: subspaces and the angles between them, against SciPy's and by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from mutirao.clustering.pacfl import Pacfl, Subspace, angles, leading
from mutirao.training.samples import Samples


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(2, 5), st.integers(1, 3))
def test_angles_are_the_principal_ones_and_their_sum_goes_vector_by_vector(seed: int, n: int, p: int) -> None:
    draw = np.random.default_rng(seed)
    bases = np.stack([np.linalg.qr(draw.normal(size=(8, p)))[0].T for _ in range(n)])
    smallest, total = angles(bases), angles(bases, "sum")
    for i in range(n):
        for j in range(n):
            if i != j:
                assert smallest[i, j] == pytest.approx(
                    np.degrees(subspace_angles(bases[i].T, bases[j].T).min()), abs=1e-5
                )
                by_hand = sum(np.degrees(np.arccos(min(1.0, abs(bases[i, k] @ bases[j, k])))) for k in range(p))
                assert total[i, j] == pytest.approx(by_hand, abs=1e-5)
    assert np.diag(smallest).tolist() == [0.0] * n


def test_the_vectors_are_the_leading_ones_of_the_data_matrix() -> None:
    x = np.random.default_rng(1).normal(size=(40, 6)) * [9, 5, 3, 1, 1, 1]
    values, columns = np.linalg.eigh(x.T @ x)  # of D D', with D the samples in columns
    wanted = columns[:, np.argsort(-values)[:3]].T
    assert np.abs(np.sum(leading(x, 3) * wanted, axis=1)) == pytest.approx(np.ones(3))
    assert leading(-x, 3) == pytest.approx(leading(x, 3))  # the sign means nothing
    samples = Samples(x.reshape(40, 2, 3).astype(np.float32), np.zeros(40, np.int64), np.arange(30))
    assert Subspace(2)(samples) == pytest.approx(leading(x[:30], 2).ravel(), abs=1e-5)
    with pytest.raises(ValueError, match="has 2 samples of 6 numbers, too few for 3 singular vectors"):
        leading(x[:2], 3)


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^vectors is 0"):
        Pacfl(vectors=0)
    with pytest.raises(ValueError, match=r"^angle is 'largest', but must be one of smallest, sum"):
        Pacfl(angle="largest")
    assert Pacfl(vectors=4).signature == Subspace(4)
