"""Adaptive clipping against the paper's formulas, and against lengths whose quantiles are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays, flat
from mutirao.core.fleet import Reply
from mutirao.core.sparse_rows import ROWS, to_dense
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.privacy.central_noise import CLIP, RELEASES, AdaptiveClip, NoisyMean, clip_update

START: Arrays = {"w": np.zeros(30)}


def replies_of(lengths: list[float], seed: int = 0) -> dict[str, Reply]:
    draw = np.random.default_rng(seed)
    ways = draw.normal(size=(len(lengths), 30))
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    return {f"c{i:03d}": Reply({"w": way * n}) for i, (way, n) in enumerate(zip(ways, lengths, strict=True))}


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20),
    st.floats(0.05, 50.0),
    st.floats(0.05, 0.95),
    st.floats(0.01, 1.0),
)
def test_the_clip_moves_as_published(lengths: list[float], clip: float, quantile: float, lr: float) -> None:
    """Algorithm 1 of the paper: C <- C exp(-eta_C (b - gamma)), b the share with |d_k| <= C."""
    adaptive_clip, memory = AdaptiveClip(quantile, lr, 1e-9), {}
    NoisyMean(FedAvg(), 1e-12, clip, 1.0, len(lengths), adaptive_clip)(START, replies := replies_of(lengths), memory)
    share = np.mean([np.linalg.norm(r.arrays["w"]) <= clip for r in replies.values()])
    assert memory[CLIP] == pytest.approx([clip, clip * math.exp(-lr * (share - quantile))], rel=1e-6)


@given(st.floats(0.1, 5.0), st.floats(1.01, 50.0))
def test_updates_and_count_together_cost_what_the_noise_says(noise: float, more: float) -> None:
    """Two Gaussian releases of sensitivity 1 (over z_u) and 1/2 (over sigma_b) compose to one with noise z."""
    count_noise = more * noise / 2
    update_noise = AdaptiveClip(0.5, 0.2, count_noise).update_noise(noise)
    assert update_noise == pytest.approx((noise**-2 - (2 * count_noise) ** -2) ** -0.5)  # the paper's z_delta
    both = add_releases(add_releases(None, update_noise, 1.0, 1), 2 * count_noise, 1.0, 1)
    assert epsilon(both, 1e-5) == pytest.approx(epsilon(add_releases(None, noise, 1.0, 1), 1e-5), rel=1e-6)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("begin", [0.3, 30.0])
def test_the_clip_settles_at_the_quantile_of_known_lengths(quantile: float, begin: float) -> None:
    lengths = np.random.default_rng(1).lognormal(1.0, 0.5, 200)
    part = NoisyMean(FedAvg(), 0.5, begin, 1.0, 200, AdaptiveClip(quantile, 0.2, 10.0))
    memory: Arrays = {}
    clips = []
    for _ in range(200):
        part(START, replies_of(lengths.tolist()), memory)
        clips.append(memory[CLIP][1])
    share = np.mean(lengths[:, None] <= clips[100:])
    assert share == pytest.approx(quantile, abs=0.05)
    assert memory[RELEASES].tolist() == [[0.5, 1.0, 200.0]]  # the count is paid for by noisier updates


def test_the_noise_on_the_updates_is_that_of_the_clip_of_the_round() -> None:
    start: Arrays = {"w": np.zeros(20_000)}
    part, memory = NoisyMean(FedAvg(), 2.0, 1.0, 1.0, 5.0, AdaptiveClip(0.5, 0.2, 3.0)), {CLIP: np.array([9.0, 4.0])}
    out = part(start, {}, memory).arrays["w"]
    assert np.std(out) == pytest.approx(AdaptiveClip(0.5, 0.2, 3.0).update_noise(2.0) * 4.0 / 5.0, rel=0.03)
    assert memory[CLIP][0] == 4.0


@settings(max_examples=50)
@given(st.sets(st.integers(0, 7), min_size=1), st.floats(0.1, 10.0), st.integers(0, 5))
def test_rows_are_clipped_and_added_as_the_whole_table_would_be(rows: set[int], clip: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    current: Arrays = {"items": draw.normal(size=(8, 3)), "b": draw.normal(size=2).astype(np.float32)}
    some = np.array(sorted(rows), np.int32)
    sent: Arrays = {"items": draw.normal(size=(len(some), 3)), "items" + ROWS: some, "b": np.zeros(2, np.float32)}
    full = to_dense(current, sent)
    assert clip_update(current, sent, clip)[1] == pytest.approx(clip_update(current, full, clip)[1])
    part = NoisyMean(FedAvg(), 1e-12, clip, 1.0, 2.0)
    by_rows, by_table = (part(current, {"ana": Reply(a), "bia": Reply(a)}, {}).arrays for a in (sent, full))
    np.testing.assert_allclose(flat(by_rows), flat(by_table), atol=1e-6)
