"""Choosing eps: the scan against DBSCAN itself, and the choice on clouds with and without groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import minimum_spanning_tree
from sklearn.cluster import DBSCAN
from sklearn.metrics import adjusted_rand_score

from mutirao.clustering.auto import (
    divide,
    divide_again,
    k_distances,
    knee,
    margin,
    merge_nearest,
    min_samples_for,
    normalise,
    pairwise,
    scan,
)


def cloud(seed: int, n: int, d: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d))


def blobs(seed: int, each: int, groups: int, d: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(groups), each)
    return draw.normal(size=(groups, d))[truth] + spread * draw.normal(size=(len(truth), d)), truth


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(3, 60),
    d=st.integers(1, 6),
    min_samples=st.integers(2, 9),
    shape=st.sampled_from(["cloud", "blobs", "grid"]),
)
def test_the_scan_finds_what_dbscan_finds_for_every_eps(
    seed: int, n: int, d: int, min_samples: int, shape: str
) -> None:
    points = cloud(seed, n, d) if shape != "blobs" else blobs(seed, -(-n // 3), 3, d, 0.2)[0]
    points = np.round(points) if shape == "grid" else points  # many clients at equal distances, or on one another
    found = scan(points, min_samples)
    assert bool(found) == (len(points) >= min_samples)
    assert [r.high for r in found[:-1]] == [r.low for r in found[1:]]
    for r in found:
        for share in (0.001, 0.5, 0.999):
            eps = r.low + share * (1 if np.isinf(r.high) else r.high - r.low)
            labels = DBSCAN(eps=eps, min_samples=min_samples).fit_predict(points)
            assert (r.groups, r.noise) == (labels.max() + 1, pytest.approx(np.mean(labels < 0)))
    if found and found[0].low > 0:  # and below the first range there is nothing
        assert (DBSCAN(eps=0.999 * found[0].low, min_samples=min_samples).fit_predict(points) < 0).all()


def test_a_client_at_the_border_is_in_its_group_and_a_lone_core_point_is_one() -> None:
    """A star: its middle has four neighbours within 1, none of which has more than two."""
    star = np.array([[0.0, 0], [1, 0], [-1, 0], [0, 1], [0, -1], [9, 9]])
    first = scan(star, 5)[0]
    assert (first.low, first.groups, first.noise) == (1.0, 1, pytest.approx(1 / 6))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 5))
def test_the_tree_is_as_short_as_that_of_scipy(seed: int, n: int, k: int) -> None:
    points = cloud(seed, n, 3)
    distances = pairwise(points)
    core = k_distances(distances, k)
    reach = np.maximum(distances, np.maximum(core[:, None], core[None]))
    np.fill_diagonal(reach, 0)
    lengths = merge_nearest(distances, k)[:, 2]
    assert lengths.sum() == pytest.approx(minimum_spanning_tree(reach).sum())
    assert (np.diff(lengths) >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 6, 10, 30, 100])
@pytest.mark.parametrize("d", [2, 9, 300])
def test_a_cloud_is_one_group(n: int, d: int) -> None:
    for seed in range(8):
        assert not divide(cloud(seed, n, d))[0].holds
        assert d == 2 or divide_again(cloud(seed, n, d), directions=True)[0].tolist() == [0] * n


@pytest.mark.parametrize(
    ("each", "groups", "d", "spread"), [(2, 5, 9, 0.05), (5, 2, 9, 0.1), (20, 5, 9, 0.2), (10, 3, 500, 0.7)]
)
def test_groups_are_found(each: int, groups: int, d: int, spread: float) -> None:
    for seed in range(4):
        points, truth = blobs(seed, each, groups, d, spread)
        assert adjusted_rand_score(truth, divide_again(points, directions=d > 9)[0]) == 1.0


@pytest.mark.parametrize("d", [2, 9, 300])
def test_clouds_without_groups_that_are_not_round_are_one_group_too(d: int) -> None:
    draw = np.random.default_rng(d)
    for n in (6, 10, 40):
        for points in (draw.uniform(size=(n, d)), draw.standard_t(3, (n, d)), draw.dirichlet(np.full(d, 0.5), n)):
            assert not divide(points)[0].holds


def test_pairs_are_found_though_one_of_them_is_loose() -> None:
    corners, towards = 2 * np.eye(5), np.ones(5) / np.sqrt(5)
    points = np.concatenate([[c, c + 0.3 * towards] for c in corners])
    points[-1] = 1.95 * corners[-1]  # eps has to pass 1.9, and other groups are 2.8 away
    found, _ = divide(points)
    assert (found.groups, found.holds) == (5, True)
    assert found.stability < 2.4  # one loose pair must not hide four tight ones
    assert found.clearness > 3.0
    assert divide_again(points, directions=False)[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 6))
def test_the_margin_is_the_quartile_of_the_logarithm_of_far_by_near(seed: int, groups: int, each: int) -> None:
    points, truth = blobs(seed, each, groups, 3, 0.5)
    distances, ratios = pairwise(points), []
    for i, g in enumerate(truth):
        near = distances[i][(truth == g) & (np.arange(len(truth)) != i)].mean()
        far = min(distances[i][truth == other].mean() for other in range(groups) if other != g)
        ratios.append(np.log(far / near))
    alone = np.vstack([points, np.full(3, 99.0)])  # who is in no group does not count
    assert margin(alone, np.append(truth, -1)) == pytest.approx(np.quantile(ratios, 0.25))
    assert margin(points, np.zeros(len(points), int)) == 0.0


def test_a_group_within_a_group_is_found() -> None:
    points, truth = blobs(3, 12, 2, 4, 0.02)
    points, truth = np.vstack([points, points + 40]), np.concatenate([truth, truth + 2])
    labels, looked = divide_again(points, directions=False)
    assert adjusted_rand_score(truth, labels) == 1.0
    assert looked[0].holds


def test_an_outlier_is_left_out_and_makes_no_group() -> None:
    points, truth = blobs(0, 10, 2, 5, 0.05)
    labels, _ = divide_again(np.vstack([points, np.full(5, 100.0)]), directions=False)
    assert labels[-1] == -1
    assert adjusted_rand_score(truth, labels[:-1]) == 1.0


def test_copies_of_a_few_clients_make_no_groups_where_groups_must_be_larger() -> None:
    points, truth = blobs(1, 10, 2, 6, 0.1)
    for liar, victim in ((0, 5), (1, 6), (2, 7), (10, 15), (11, 16), (12, 15)):
        points[liar] = points[victim] + 1e-6
    labels, looked = divide_again(points, directions=False, min_samples=5)
    assert adjusted_rand_score(truth, labels) == 1.0
    assert {d.min_samples for d in looked} == {5}


def test_equal_clients_are_one_group_and_lone_clients_too() -> None:
    assert divide_again(np.ones((7, 3)), directions=False)[0].tolist() == [0] * 7
    assert divide_again(np.ones((7, 3)), directions=True)[0].tolist() == [0] * 7
    assert divide_again(np.ones((1, 3)), directions=False)[0].tolist() == [0]


def test_the_knee_is_where_the_distances_rise() -> None:
    points = np.concatenate([np.linspace(0, 1, 50), [5.0, 9.0]])[:, None]
    assert 1 / 49 - 1e-9 <= knee(points, 2) < 4.0


def test_more_clients_need_more_neighbours() -> None:
    assert [min_samples_for(n) for n in (1, 4, 10, 100, 1000, 100_000)] == [2, 2, 2, 3, 5, 8]


def test_directions_have_length_one_and_ignore_scale() -> None:
    points = cloud(0, 9, 4)
    turned = normalise(points, directions=True)
    assert np.linalg.norm(turned, axis=1) == pytest.approx(np.ones(9))
    assert normalise(7 * points, directions=True) == pytest.approx(turned)
    assert normalise(points, directions=False) is points
