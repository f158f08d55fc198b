"""What is drawn beside the items taken: the same with numba and without, evenly, in rising order, with partners."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mutirao.systems.recsys.local_training import UserExamples, add_negatives

ITEMS = 30
USERS = st.lists(st.sets(st.integers(0, ITEMS - 1), min_size=2, max_size=ITEMS - 1), min_size=1, max_size=5)


def works(tastes: list[set[int]], seed: int) -> list[UserExamples]:
    return [
        UserExamples(np.array(sorted(t), np.int32), np.ones(len(t), np.float32), (seed + k) % 2**63, 1 + len(t) // 3)
        for k, t in enumerate(tastes)
    ]


@given(USERS, st.integers(0, 2**63 - 1), st.integers(1, 4))
def test_both_ways_of_drawing_give_the_same_and_what_was_asked_for(
    tastes: list[set[int]], seed: int, negatives: int
) -> None:
    fast, plain = (
        add_negatives(works(tastes, seed), ITEMS, negatives, 0.25, 0.125, 0.0, compiled=way) for way in (True, False)
    )
    for taste, work, one, other in zip(tastes, works(tastes, seed), fast, plain, strict=True):
        for name in ("rows", "y", "support", "weights", "partner"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (np.diff(one.rows) > 0).all(), "in rising order, without any twice"
        assert set(one.rows[one.y == 1].tolist()) == taste
        assert (one.y == 0).sum() == min(negatives * len(taste), ITEMS - len(taste))
        assert one.support[one.y == 1].sum() == work.support_size
        drawn = np.flatnonzero(one.y == 0)
        assert (one.y[one.partner[drawn]] == 1).all(), "a partner was taken"
        np.testing.assert_array_equal(one.support[drawn], one.support[one.partner[drawn]])
        assert np.ptp(np.bincount(one.partner[drawn], minlength=len(one.rows))[one.y == 1]) <= 1
        np.testing.assert_array_equal(one.weights, np.where(one.y > 0, 1, np.where(one.support, 0.125, 0.25)))


def test_what_is_drawn_for_one_does_not_depend_on_who_else_is_there() -> None:
    tastes = [{1, 2, 3}, {4, 5}, {7, 8, 9, 20}]
    together = add_negatives(works(tastes, 5), ITEMS, 2, 1.0, 1.0, 0.0, compiled=True)
    for k, taste in enumerate(tastes):
        (alone,) = add_negatives(works([taste], 5 + k), ITEMS, 2, 1.0, 1.0, 0.0, compiled=True)
        np.testing.assert_array_equal(alone.rows, together[k].rows)
        np.testing.assert_array_equal(alone.support, together[k].support)


def test_others_and_support_are_drawn_evenly() -> None:
    many = add_negatives(works([{3, 4, 5, 6}] * 3000, 0), ITEMS, 2, 1.0, 1.0, 0.0, compiled=True)
    often = np.bincount(np.concatenate([w.rows for w in many]), minlength=ITEMS) / 3000
    assert (often[3:7] == 1).all()
    assert np.abs(np.delete(often, [3, 4, 5, 6]) - 8 / 26).max() < 0.05
    chosen = np.mean([w.support[w.y == 1] for w in many], axis=0)
    assert np.abs(chosen - 0.5).max() < 0.05


def test_what_is_older_counts_less_in_the_support() -> None:
    (work,) = works([{3, 4, 5, 6}], 0)
    (made,) = add_negatives([work._replace(ages=np.array([3, 2, 1, 0]))], ITEMS, 1, 1.0, 0.5, 2.0, compiled=True)
    counts = dict(zip(made.rows.tolist(), made.weights.tolist(), strict=True))
    for row, age in zip([3, 4, 5, 6], [3, 2, 1, 0], strict=True):
        known = made.support[made.rows.tolist().index(row)]
        assert counts[row] == np.float32(2 ** (-age / 2) if known else 1)
