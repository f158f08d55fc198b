"""Kappas against scikit-learn and against pairs counted one by one; intervals over slides; one class out of many."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from mutirao.errors import ConfigError
from mutirao.metrics import confusion
from mutirao.randomness import rng
from mutirao.systems.cytology.slides.reader_agreement import agreement_page, cohen, compare_readers, fleiss, votes_of
from mutirao.systems.cytology.slides.tile_labels import combine_labels

CLASSES = ("a", "b", "c")


def by_pairs(given_: np.ndarray) -> float:  # type: ignore[type-arg]
    """Fleiss' kappa by its meaning: pairs of readers that agree, against pairs of labels drawn from the pile."""
    agree = [np.mean([row[i] == row[j] for i, j in combinations(range(len(row)), 2)]) for row in given_]
    pile = given_.ravel()
    chance = sum(np.mean(pile == k) ** 2 for k in np.unique(pile))
    return float((np.mean(agree) - chance) / (1 - chance))


@given(st.integers(0, 10_000), st.integers(2, 60))
def test_cohens_kappa_is_scikit_learns(seed: int, n: int) -> None:
    a, b = np.random.default_rng(seed).integers(0, 3, (2, n))
    found = float(cohen(confusion(a, b, 3)))
    if len({*a, *b}) > 1:
        assert found == pytest.approx(cohen_kappa_score(a, b))
    else:
        assert np.isnan(found)


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(3, 6))
def test_fleiss_kappa_is_that_of_pairs_counted_one_by_one(seed: int, n: int, readers: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, 3, (n, readers))
    drawn[0] = [0, 1, *[2] * (readers - 2)]
    assert float(fleiss(votes_of(drawn, 3).sum(0))) == pytest.approx(by_pairs(drawn))


def test_fleiss_own_example() -> None:
    """Fleiss (1971), the table of ten subjects and fourteen raters: kappa 0.210 (0.2099)."""
    table = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    given_ = np.array([np.repeat(range(5), row) for row in table])
    assert float(fleiss(votes_of(given_, 5).sum(0))) == pytest.approx(0.2099, abs=5e-5)


def labels(seed: int, readers: int, n: int = 400) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    draw = np.random.default_rng(seed)
    slides = {f"t{i}": f"s{i % 8}" for i in range(n)}
    truth = draw.integers(0, 3, n)
    odd = draw.random(8) < 0.5  # slides on which readers guess
    out = {}
    for k in range(readers):
        guess = np.where(odd[np.arange(n) % 8], draw.integers(0, 3, n), truth)
        out[f"r{k}"] = {f"t{i}": CLASSES[c] for i, c in enumerate(guess)}
    return out, slides


def test_an_interval_over_slides_is_wider_than_one_over_tiles_and_holds_the_kappa() -> None:
    given_, slides = labels(3, 2)
    over_slides = compare_readers(given_, slides, CLASSES, rng(0, 0, "agreement"))
    over_tiles = compare_readers(given_, dict.fromkeys(slides, ""), CLASSES, rng(0, 0, "agreement"))
    a, b = (list(given_[r].values()) for r in ("r0", "r1"))
    assert over_slides.kappa.value == over_tiles.kappa.value == pytest.approx(cohen_kappa_score(a, b))
    assert over_slides.kappa.low < over_slides.kappa.value < over_slides.kappa.high
    assert over_slides.resampled == "8 slides"
    assert "fewer than two slides" in over_tiles.resampled
    width = [k.kappa.high - k.kappa.low for k in (over_slides, over_tiles)]
    assert width[0] > 2 * width[1]
    again = compare_readers(given_, slides, CLASSES, rng(0, 0, "agreement"))
    assert again.kappa == over_slides.kappa


def test_three_readers_have_fleiss_kappa_their_pairs_and_a_page_of_what_they_differ_on(tmp_path: Path) -> None:
    given_, slides = labels(4, 3, 60)
    del given_["r2"]["t5"]
    found = compare_readers(given_, slides, CLASSES, rng(0, 0, "agreement"))
    assert found.kind == "Fleiss' kappa"
    assert found.kappa.value == pytest.approx(by_pairs(found.given))
    assert len(found.pairs) == 3
    assert (len(found.tiles), found.partly) == (59, 1)
    unequal = [t for t in found.tiles if len({g[t] for g in given_.values()}) > 1]
    assert [found.tiles[i] for i in found.differing] == unequal
    page = agreement_page(found, {t: tmp_path / t for t in slides}, "<tiles>")
    assert page.count("<li>") == len(unequal)
    assert "&lt;tiles&gt;" in page
    assert "<tiles>" not in page


def test_readers_who_cannot_be_compared_are_refused_and_one_class_has_no_kappa() -> None:
    slides = {"t": "", "u": ""}
    for given_ in ({"ana": {"t": "a"}}, {"ana": {"t": "a"}, "rui": {"u": "a"}}, {"ana": {"t": "z"}, "rui": {"t": "a"}}):
        with pytest.raises(ConfigError):
            compare_readers(given_, slides, CLASSES, rng(0, 0, "agreement"))
    same = compare_readers({"ana": {"t": "a"}, "rui": {"t": "a"}}, slides, CLASSES, rng(0, 0, "agreement"))
    assert str(same.kappa) == "not defined: all labels are of one class"
    assert same.kappa.facts()["value"] is None  # JSON knows no NaN


def test_ties_and_disputes_have_no_class() -> None:
    three = {"ana": {"t": "a", "u": "a", "v": "a"}, "rui": {"t": "a", "u": "b", "w": "b"}, "eva": {"t": "b", "u": "c"}}
    chosen, without = combine_labels(three, ["t", "u", "v", "w", "x"], "majority")
    assert chosen == {"t": "a", "v": "a", "w": "b"}
    assert without == {"disputed": 1, "unlabelled": 1}
    chosen, without = combine_labels(three, ["t", "u", "v", "w", "x"], "agreed")
    assert chosen == {}
    assert without == {"disputed": 2, "not labelled by all": 2, "unlabelled": 1}
