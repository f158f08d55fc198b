"""Skip-grams: the step is that of plain loops in double precision, the draws have the shares they should."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.systems.recsys import kernels
from mutirao.systems.recsys.kernels import compile_kernel
from mutirao.systems.recsys.pretrain import fill_table, skipgram_epoch, word2vec
from mutirao.systems.recsys.ratings import Ratings, gather, plant

RATINGS = plant(60, 40, np.random.default_rng(0))


def mixed(seed: int) -> list[int]:
    """The first numbers of SplitMix64 from `seed`, by Python's whole numbers."""
    out, state, mask = [], seed, 2**64 - 1
    for _ in range(5000):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_the_draws_are_those_of_the_published_generator() -> None:
    assert mixed(1234567)[:3] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**63 - 1), st.integers(1, 4))
def test_an_epoch_is_that_of_plain_loops(lengths: list[int], seed: int, window: int) -> None:
    draw = np.random.default_rng(seed)
    count, d, ends = sum(lengths), 5, np.cumsum(lengths)
    items, windows = draw.integers(0, 6, count).astype(np.int32), draw.integers(1, window + 1, count)
    rates = draw.uniform(0.1, 0.5, count).astype(np.float32)
    table = draw.integers(0, 6, 64).astype(np.int32)
    inner, outer = (draw.normal(size=(6, d)).astype(np.float32) for _ in range(2))
    x, y = inner.astype(np.float64), outer.astype(np.float64)
    compile_kernel(skipgram_epoch)(inner, outer, items, ends, windows, rates, table, 5, np.uint64(seed))

    numbers = iter(mixed(seed))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for k in range(count):
        for near in range(count):
            if near == k or owner[near] != owner[k] or abs(near - k) > windows[k]:
                continue
            targets = [items[k], *(other for _ in range(5) if (other := table[next(numbers) % 64]) != items[k])]
            before, total = x[items[near]].copy(), np.zeros(d)
            for turn, target in enumerate(targets):
                g = rates[k] * ((turn == 0) - 1 / (1 + np.exp(-before @ y[target])))
                total += g * y[target]
                y[target] = y[target] + g * before
            x[items[near]] += total
    np.testing.assert_allclose(inner, x, atol=1e-4)
    np.testing.assert_allclose(outer, y, atol=1e-4)


def test_slots_hold_items_by_popularity_to_the_power_of_three_quarters() -> None:
    counts = np.array([1, 0, 16, 81, 0])
    shares = np.bincount(fill_table(counts), minlength=5) / len(fill_table(counts))
    np.testing.assert_allclose(shares, np.array([1, 0, 8, 27, 0]) / 36, atol=1e-5)
    assert shares[1] == shares[4] == 0, "what nobody took is never drawn"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What each epoch is given, instead of the training itself."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernels, "compile_kernel", lambda function: lambda *given: calls.append(given))
    return calls


def popular(users: int) -> Ratings:
    """Half of all ratings are of one item, the others of one item each."""
    who = np.repeat(np.arange(users), 2)
    what = np.stack([np.zeros(users, np.int64), np.arange(1, users + 1)], 1).ravel()
    return gather(who, what, np.ones(2 * users), np.arange(2 * users, dtype=np.int64))


def test_popular_items_are_left_out_and_rates_fall(seen: list[tuple[Any, ...]]) -> None:
    word2vec(popular(20_000), 4, 5, seed=0)
    assert len(seen) == 25, "a million items in all"
    items, ends, windows, rates = (np.concatenate([call[k] for call in seen]) for k in (2, 3, 4, 5))
    top = np.bincount(items).max() / (25 * 20_000)
    assert top == pytest.approx(np.sqrt(0.001 / 0.5) + 0.001 / 0.5, rel=0.02)
    assert np.bincount(items, minlength=20_001).min() == 25, "a rare item is always kept"
    assert set(windows.tolist()) == {1, 2, 3, 4, 5}
    assert np.bincount(windows)[1:].std() < 0.02 * len(windows)
    assert (np.diff(rates) <= 0).all()
    assert (rates[0], rates[-1]) == pytest.approx((0.025, 0.0001), abs=1e-6)
    assert all(call[3][-1] == len(call[2]) for call in seen)
    assert len({int(call[8]) for call in seen}) == 25, "other draws in each epoch"
    assert len(ends) == 25 * 20_000


def test_the_bytes_are_the_same_each_time_and_skipgram_epoch_the_seed() -> None:
    one, same, other = (word2vec(RATINGS, 6, 3, seed) for seed in (4, 4, 5))
    assert one.tobytes() == same.tobytes()
    assert not np.array_equal(one, other)
    assert np.isfinite(one).all()


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compile_kernel", lambda function: None)
    with pytest.raises(ConfigError, match="needs numba"):
        word2vec(RATINGS, 6, 3, 0)
