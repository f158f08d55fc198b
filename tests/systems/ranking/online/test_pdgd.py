"""PDGD against loops of its own: Plackett-Luce by enumeration, pairs one by one, and no bias where users have none."""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clicking import Scores, chance_of, chance_of_ranking, slow_weights
from mutirao.systems.ranking.online.click_models import Cascade
from mutirao.systems.ranking.online.pdgd import document_weights, sample_rankings


def our_weights(ranking: Sequence[int], scores: Scores, clicks: Sequence[int], places: int) -> dict[int, float]:
    """The same by our code, in a table with more places than documents if `places` says so."""
    seen = np.full((1, places), -np.inf)
    seen[0, : len(ranking)] = [scores[d] for d in ranking]
    unseen = [scores[d] for d in range(len(scores)) if d not in ranking]
    rest = np.array([np.logaddexp.reduce(unseen) if unseen else -np.inf])
    clicked = np.zeros((1, places), bool)
    clicked[0, : len(clicks)] = clicks
    found = document_weights(seen, rest, clicked)[0]
    assert (found[len(ranking) :] == 0).all()
    return dict(zip(ranking, found.tolist(), strict=False))


numbers = st.floats(-8, 8)


@given(st.lists(numbers, min_size=2, max_size=6), st.integers(1, 5), st.integers(0, 31), st.randoms())
def test_weights_are_those_of_pairs_one_by_one(scores: list[float], shown: int, pattern: int, random) -> None:
    ranking = random.sample(range(len(scores)), min(shown, len(scores)))
    clicks = [pattern >> place & 1 for place in range(len(ranking))]
    expected = slow_weights(ranking, scores, clicks)
    found = our_weights(ranking, scores, clicks, places=6)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


def expectation(scores: Scores, grades: Sequence[int], shown: int, user: Cascade) -> dict[int, float]:
    """The exact mean of our weights over all rankings and all clicks."""
    total = dict.fromkeys(range(len(scores)), 0.0)
    for ranking in permutations(range(len(scores)), shown):
        click, stop = ([table[grades[d]] for d in ranking] for table in (user.click, user.stop))
        for clicks in product((0, 1), repeat=shown):
            chance = chance_of_ranking(ranking, scores) * chance_of(clicks, click, stop)
            for document, weight in our_weights(ranking, scores, clicks, shown).items() if chance else ():
                total[document] += chance * weight
    return total


@pytest.mark.parametrize("name", ["navigational", "informational", "near_random"])
@pytest.mark.parametrize("shown", [2, 3, 4])
def test_users_without_a_preference_move_nothing_wherever_documents_stand(name: str, shown: int) -> None:
    scores = [2.0, -1.0, 0.3, 0.0]  # users look from the top: the first is clicked far more often
    moved = expectation(scores, [1, 1, 1, 1], shown, Cascade.of(name, 2))
    assert list(moved.values()) == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("name", ["perfect", "navigational", "informational", "near_random"])
@given(scores=st.lists(st.floats(-3, 3), min_size=3, max_size=3))
@settings(max_examples=15)
def test_what_users_prefer_rises_in_the_mean(name: str, scores: list[float]) -> None:
    moved = expectation(scores, [0, 2, 1], 3, Cascade.of(name, 2))
    assert moved[1] > 0 > moved[0]


def test_rankings_are_drawn_as_often_as_plackett_luce_says() -> None:
    scores, shown, times = [1.0, 0.0, -0.5, 0.2], 2, 60_000
    sizes = np.full(times, len(scores))
    draws = np.random.default_rng(1).random(times * len(scores))
    documents, rest = sample_rankings(np.tile(scores, times), sizes, draws, shown)
    local = documents - 4 * np.arange(times)[:, None]
    for ranking in permutations(range(4), shown):
        expected = chance_of_ranking(ranking, scores)
        found = (local == np.array(ranking)).all(1).mean()
        assert found == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / times))
    unseen = [sum(math.exp(scores[d]) for d in range(4) if d not in shown) for shown in local[:50].tolist()]
    assert np.exp(rest[:50]) == pytest.approx(unseen)


def lists(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(seed)
    for size in (1, 3, 17, 200, 5, 64):
        yield draw.normal(0, 9, size), draw.random(size)


def test_no_list_depends_on_the_others_to_the_last_bit() -> None:
    alone = [sample_rankings(s, np.array([len(s)]), u, 10) for s, u in lists(3)]
    sizes = np.array([len(s) for s, _ in lists(3)])
    scores, draws = (np.concatenate(part) for part in zip(*lists(3), strict=True))
    documents, rest = sample_rankings(scores, sizes, draws, 10)
    begins = np.cumsum(sizes) - sizes
    seen = np.where(documents >= 0, scores[documents], -np.inf)
    clicks = np.random.default_rng(0).random(seen.shape) < 0.4
    clicks &= documents >= 0
    together = document_weights(seen, rest, clicks)
    for i, (own, own_rest) in enumerate(alone):
        assert np.array_equal(own[own >= 0], documents[i][documents[i] >= 0] - begins[i])
        assert own_rest[0] == rest[i]
        assert np.array_equal(document_weights(seen[i : i + 1], own_rest, clicks[i : i + 1])[0], together[i])


def test_scores_far_apart_give_weights_that_are_numbers() -> None:
    seen, clicks = np.array([[900.0, -900.0, 0.0]]), np.array([[False, True, False]])
    found = document_weights(seen, np.array([-np.inf]), clicks)
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(0)
