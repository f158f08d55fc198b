"""Merging up to a threshold, against the procedure of PACFL's authors written out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from mutirao.clustering.fedclust import Fedclust
from mutirao.clustering.hierarchical import merge


def merged_by_hand(distances: np.ndarray, threshold: float, linkage: str) -> list[set[int]]:
    """Row by row: the least distance, the two rows become one, the others' distances to it are mean, most or least."""
    table = {(i,): {(j,): float(distances[i, j]) for j in range(len(distances))} for i in range(len(distances))}
    how = {"average": lambda a, b: (a + b) / 2, "complete": max, "single": min}[linkage]
    while len(table) > 1:
        least, one, two = min((table[a][b], a, b) for a in table for b in table if a < b)
        if least > threshold:
            break
        both, rest = one + two, [c for c in table if c not in (one, two)]
        table[both] = {c: how(table[one][c], table[two][c]) for c in rest}
        for c in rest:
            table[c][both] = table[both][c]
        del table[one], table[two]
    return [set(c) for c in table]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9999), st.integers(1, 14), st.floats(0.1, 4.0), st.sampled_from(["average", "complete", "single"])
)
def test_clients_are_merged_as_the_authors_do(seed: int, n: int, threshold: float, linkage: str) -> None:
    points = np.random.default_rng(seed).normal(size=(n, 3))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    labels = merge(distances, threshold, linkage=linkage)
    found = [set(np.flatnonzero(labels == g).tolist()) for g in range(labels.max() + 1)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, merged_by_hand(distances, threshold, linkage)))
    assert labels[0] == 0  # groups are numbered as they appear


def test_told_how_many_it_stops_there() -> None:
    draw = np.random.default_rng(0)
    truth = np.repeat(np.arange(3), 5)
    points = 9 * draw.normal(size=(3, 4))[truth] + 0.1 * draw.normal(size=(15, 4))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    assert adjusted_rand_score(truth, merge(distances, 1.0, groups=3)) == 1.0
    assert merge(distances, 1.0, groups=2).max() == 1


@pytest.mark.parametrize("wrong", [{"threshold": 0.0}, {"groups": -1}, {"linkage": "ward"}])
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is "):
        Fedclust(**wrong)  # type: ignore[arg-type]
