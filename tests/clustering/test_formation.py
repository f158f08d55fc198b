"""Forming groups with any clusterer, admitting newcomers, and the rule for those who fit nowhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import Birch
from sklearn.metrics import adjusted_rand_score

from mutirao.clustering import admit, form, quality
from mutirao.clustering.clusterers import NAMES, Dbscan, Hdbscan, Kmeans, One, Optics
from mutirao.clustering.formation import find_shared_keys, place_clients


def people(seed: int = 0, each: int = 8, groups: int = 3, d: int = 6, spread: float = 0.05) -> tuple[dict, dict]:
    draw = np.random.default_rng(seed)
    middles = draw.normal(size=(groups, d))
    truth = {f"c{i:03d}": int(g) for i, g in enumerate(draw.permutation(np.repeat(np.arange(groups), each)))}
    return {c: middles[g] + spread * draw.normal(size=d) for c, g in truth.items()}, truth


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("one", "dbscan")])
def test_every_clusterer_finds_clear_groups(name: str) -> None:
    signatures, truth = people()
    groups = form(signatures, Optics(min_samples=4) if name == "optics" else NAMES[name]())
    assert quality(groups, truth)["rand"] == 1.0


def test_one_and_fixed_eps_and_any_of_scikit_learn() -> None:
    signatures, truth = people()
    assert form(signatures, One()).count == 1
    assert form(signatures, Dbscan(eps=0.5)).count == 3
    assert form(signatures, Kmeans(groups=2)).count == 2
    assert quality(form(signatures, Birch(threshold=0.3, n_clusters=3)), truth)["rand"] == 1.0
    with pytest.raises(ValueError, match="only 24 clients"):
        form(signatures, Kmeans(groups=25))


@pytest.mark.parametrize("name", ["kmeans", "agglomerative", "hdbscan"])
def test_a_cloud_is_one_group_for_those_who_count_themselves(name: str) -> None:
    draw = np.random.default_rng(1)
    assert form({f"c{i}": draw.normal(size=9) for i in range(12)}, NAMES[name]()).count == 1


def test_nobody_and_a_single_client() -> None:
    with pytest.raises(ValueError, match="no clients to group"):
        form({})
    for make in (None, Optics(), Hdbscan()):
        assert form({"ana": [1.0, 2.0]}, make).members() == {"g0": ["ana"]}


def test_who_is_left_out_joins_the_nearest_or_gets_its_own_or_waits() -> None:
    signatures, _ = people(each=6, groups=2)
    far = signatures["c000"] + 3.0
    signatures["zoe"] = far
    home = form({c: s for c, s in signatures.items() if c != "zoe"}).members()
    assert form(signatures, noise="wait").waiting() == ["zoe"]
    assert form(signatures, noise="own").members() == home | {"g2": ["zoe"]}
    joined = form(signatures, noise="nearest")
    assert joined.count == 2
    assert joined.group_of("zoe") in ("g0", "g1")
    assert joined.group_of("nobody") == ""


@settings(max_examples=5, deadline=None)
@given(st.randoms())
def test_the_order_of_clients_does_not_matter(random) -> None:
    signatures, _ = people()
    names = list(signatures)
    random.shuffle(names)
    assert form({c: signatures[c] for c in names}).members() == form(signatures).members()


def test_groups_are_numbered_by_their_first_client() -> None:
    firsts = [who[0] for who in form(people(groups=5)[0]).members().values()]
    assert firsts == sorted(firsts)
    many = form({f"c{i:03d}": [i * 1.0] for i in range(12)}, NAMES["agglomerative"](groups=12))
    assert many.names[:2] == ["g00", "g01"]


def test_many_clients_are_grouped_by_a_sample_of_them() -> None:
    signatures, truth = people(each=200, groups=4)
    groups = form(signatures, most=60)
    assert quality(groups, truth)["rand"] == 1.0
    assert not groups.waiting()


def test_quality_knows_how_far_apart_groups_are() -> None:
    near, far = people(spread=0.2)[0], people(spread=0.01)[0]
    a, b = quality(form(near, Kmeans(3))), quality(form(far, Kmeans(3)))
    assert a["silhouette"] < b["silhouette"]
    assert a["within"] > b["within"]
    assert b["between"] > b["within"]
    assert "rand" not in a


@pytest.mark.parametrize(("d", "directions", "spread"), [(6, False, 0.05), (400, True, 0.5)])
def test_newcomers_join_their_own_and_strangers_none(d: int, directions: bool, spread: float) -> None:
    draw = np.random.default_rng(5)
    middles = draw.normal(size=(5, d))

    def person(g: int) -> np.ndarray:
        return middles[g] + spread * draw.normal(size=d)

    groups = form({f"c{i:02d}": person(i % 4) for i in range(40)}, directions=directions)
    assert groups.count == 4
    home = {g: groups.group_of(f"c{g:02d}") for g in range(4)}
    found = admit(groups, {f"n{i}": person(i % 4) for i in range(20)} | {f"x{i}": person(4) for i in range(10)})
    assert all(found[f"n{i}"].group == home[i % 4] for i in range(20))
    assert all(found[f"n{i}"].confidence > 0.1 for i in range(20))
    assert all(found[f"x{i}"].group == "" and found[f"x{i}"].quarantine for i in range(10))
    assert admit(groups, {}) == {}


def test_a_newcomer_never_moves_the_groups() -> None:
    signatures, _ = people()
    groups = form(signatures)
    grown = groups.with_admitted({"new": 1, "odd": -1})
    assert grown.group_of("new") == "g1"
    assert grown.waiting() == ["odd"]
    probe = np.zeros((1, 6))
    assert place_clients(grown, probe).distance == place_clients(groups, probe).distance
    assert quality(grown)["groups"] == 3


def test_one_group_has_no_second_to_compare_with() -> None:
    draw = np.random.default_rng(0)
    groups = form({f"c{i}": draw.normal(size=5) for i in range(12)})
    found = admit(groups, {"in": np.zeros(5), "out": np.full(5, 40.0)})
    assert (found["in"].group, found["in"].confidence) == ("g0", 1.0)
    assert found["out"].quarantine.startswith("fits no group")


def test_one_key_is_one_client() -> None:
    keys = {"ana": "k1", "bia": "k2", "bia2": "k2", "bia3": "k2"}
    assert set(find_shared_keys(["bia3", "bia2", "bia", "ana", "leo"], keys)) == {"bia2", "bia3"}


def test_labels_of_large_and_small_agree_on_where_the_groups_are() -> None:
    signatures, truth = people(seed=3, each=40, groups=4, spread=0.1)
    whole, sampled = form(signatures), form(signatures, most=40)
    assert adjusted_rand_score(whole.labels, sampled.labels) == 1.0
    assert quality(whole, truth)["rand"] == 1.0
