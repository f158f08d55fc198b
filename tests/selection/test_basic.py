"""Who may be selected, how many, and how fairly, if nothing is known of clients."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from choosing import rng, roster_of
from mutirao.config import Part, build, complete_part
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.selection import (
    NAMES,
    AoI,
    AoIU,
    Entropy,
    FedCS,
    Oort,
    PowerOfChoice,
    RoundRobin,
    Uniform,
    everyone,
    how_many,
)

ids = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=20, unique=True)
counts = st.one_of(st.integers(1, 30), st.floats(0, 1, exclude_min=True))


@given(ids, st.data(), counts, st.integers(0, 99))
def test_only_present_clients_are_chosen_each_at_most_once(
    names: list[str], data: st.DataObject, count: int | float, seed: int
) -> None:
    present = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    roster = roster_of(present, [n for n in names if n not in present])
    chosen = Uniform(count)(roster, 1, rng(seed))
    assert set(chosen) <= set(present)
    assert len(set(chosen)) == len(chosen) == how_many(count, len(present))
    assert sorted(everyone(roster, 1, rng(seed))) == sorted(present)


@pytest.mark.parametrize(
    ("count", "present", "expected"),
    [
        (1, 10, 1),  # a whole number is a count
        (1.0, 10, 10),  # and a float a share: 1.0 is all
        (5, 3, 3),  # more than there are: all
        (0.2, 10, 2),
        (0.26, 10, 3),  # rounded to the nearest
        (0.24, 10, 2),
        (0.001, 10, 1),  # at least one
        (0.5, 1, 1),
        (10**9, 7, 7),
    ],
)
def test_count_or_share(count: int | float, present: int, expected: int) -> None:
    chosen = Uniform(count)(roster_of([f"c{i}" for i in range(present)]), 1, rng())
    assert len(chosen) == expected


@pytest.mark.parametrize("count", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "all", None])
def test_what_is_no_count_is_refused_in_one_line(count: Any) -> None:
    with pytest.raises(ValueError, match=r"^count is [^\n]+, but must be a whole number [^\n]+$"):
        Uniform(count)


def test_the_same_generator_gives_the_same_choice_whoever_came_first() -> None:
    names = [f"c{i:02d}" for i in range(50)]
    one, two = roster_of(names), roster_of(names[::-1])
    assert Uniform(7)(one, 1, rng(3)) == Uniform(7)(two, 1, rng(3))
    assert Uniform(7)(one, 1, rng(3)) != Uniform(7)(one, 1, rng(4))


def test_every_client_is_as_likely_as_any_other() -> None:
    """Twenty clients, five a round, 4,000 rounds: each is expected 1,000 times, with a deviation of 27."""
    roster = roster_of([f"c{i:02d}" for i in range(20)])
    source, times = rng(1), dict.fromkeys(roster.ids, 0)
    for t in range(4000):
        for c in Uniform(5)(roster, t, source):
            times[c] += 1
    assert all(abs(n - 1000) < 5 * 27.4 for n in times.values())


def test_nobody_present_gives_nobody() -> None:
    roster = roster_of([], ["ana"])
    assert Uniform(3)(roster, 1, rng()) == []
    assert everyone(roster, 1, rng()) == []


def test_choosing_among_a_million_is_quick() -> None:
    names = [f"c{i:06d}" for i in range(1_000_000)]
    roster = Roster(ids=names, present=np.ones(len(names), np.bool_))
    assert len(Uniform(100)(roster, 1, rng())) == 100
    assert len(Uniform(0.001)(roster, 1, rng())) == 1000


def test_parts_are_found_by_name_and_take_the_recipes_count_if_the_user_says_nothing() -> None:
    assert set(NAMES) >= {"everyone", "uniform"}
    assert build("select", Part("uniform"), count=7) == Uniform(7)
    assert build("select", Part("uniform", {"count": 0.5}), count=7) == Uniform(0.5)
    assert build("select", Part("everyone"), count=7) is everyone
    assert complete_part("select", Part("uniform", {"count": 3})) == Part("uniform", {"count": 3})
    with pytest.raises(ConfigError, match="select=uniform: count is 0"):
        build("select", Part("uniform", {"count": 0}))


@pytest.mark.parametrize("select", [AoI(3), Entropy(3, classes=10), AoIU(3), PowerOfChoice(3), Oort(3), FedCS(3)])
def test_equals_are_drawn_by_lot_each_as_likely(select: Any) -> None:
    """Chi-square over 12 equal clients of whom 3 are drawn 3,000 times."""
    roster = roster_of([f"c{i:02d}" for i in range(12)])
    source, times = rng(5), np.zeros(12)
    for _ in range(3000):
        for c in select(roster, 1, source):
            times[roster.row(c)] += 1
    assert times.sum() == 9000
    assert chisquare(times).pvalue > 1e-4


def test_round_robin_goes_by_name_and_lets_latecomers_catch_up() -> None:
    roster = roster_of(["ana", "bia", "caio", "dora"])
    order = []
    for t in range(1, 5):
        chosen = RoundRobin(2)(roster, t, rng(t))
        roster.mark(t, chosen, {})
        order.append(chosen)
    assert order == [["ana", "bia"], ["caio", "dora"]] * 2
    roster.meet([*roster.ids, "zoe"])
    assert RoundRobin(1)(roster, 5, rng()) == ["zoe"]
