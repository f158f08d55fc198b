"""Stain normalisation and augmentation: against formulas written out, on edge cases, and as part of what is cached."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mutirao.systems.images.features import Extractor
from mutirao.systems.images.stain import (
    NORMALIZERS,
    REFERENCE_MEAN,
    REFERENCE_STD,
    STAINS,
    hed,
    jitter,
    macenko,
    reinhard,
    simulate_scanner,
    stained,
    to_axes,
    to_pixels,
)

WHITE = np.full((24, 24, 3), 250, np.uint8)


def tissue(seed: int = 0, side: int = 32) -> np.ndarray:
    """Two stains of any strength at every pixel, as light that passes."""
    draw = np.random.default_rng(seed)
    mixed = draw.uniform(0.2, 1.2, (side, side, 2)) @ np.array([[0.62, 0.68, 0.38], [0.20, 0.85, 0.45]])
    return np.clip(240 * np.exp(-mixed), 0, 255).astype(np.uint8)


def macenko_written_out(pixels: np.ndarray) -> np.ndarray:
    """Macenko et al. (2009) by singular values, as the paper has it, to the usual reference."""
    light = pixels.reshape(-1, 3).astype(float)
    density = -np.log((light + 1) / 240)
    seen = density[(density >= 0.15).all(1)]
    plane = np.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][:2]
    plane[0] *= np.sign(seen.mean(0) @ plane[0])
    along, across = seen @ plane[0], seen @ plane[1]
    angles = np.percentile(np.arctan2(across, along), [1, 99])
    ends = np.cos(angles)[:, None] * plane[0] + np.sin(angles)[:, None] * plane[1]
    ends = ends[np.argsort(-ends[:, 0])]
    strengths = density @ np.linalg.pinv(ends)
    scaled = strengths / np.percentile(strengths, 99, axis=0) * [1.9705, 1.0308]
    look = np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]])
    return np.minimum(240 * np.exp(-scaled @ look), 255).astype(np.uint8).reshape(pixels.shape)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_macenko_is_the_papers(seed: int) -> None:
    found, expected = macenko(tissue(seed)), macenko_written_out(tissue(seed))
    assert np.abs(found.astype(int) - expected).max() <= 1  # a byte is cut off here or there
    assert not np.array_equal(found, tissue(seed))


def test_reinhard_gives_stained_pixels_the_reference_and_leaves_glass() -> None:
    picture = tissue(3)
    picture[:6] = 250
    found = reinhard(picture)
    assert np.array_equal(found[:6], picture[:6])
    rgb = picture[6:].reshape(-1, 3)[stained(picture[6:]).ravel()].astype(float)
    lms = np.stack([0.3811 * rgb[:, 0] + 0.5783 * rgb[:, 1] + 0.0402 * rgb[:, 2],
                    0.1967 * rgb[:, 0] + 0.7244 * rgb[:, 1] + 0.0782 * rgb[:, 2],
                    0.0241 * rgb[:, 0] + 0.1288 * rgb[:, 1] + 0.8444 * rgb[:, 2]], 1)  # fmt: skip
    long, middle, short = np.log(lms).T
    axes = np.stack(
        [(long + middle + short) / 3**0.5, (long + middle - 2 * short) / 6**0.5, (long - middle) / 2**0.5], 1
    )
    assert np.allclose(axes, to_axes(rgb), atol=1e-9)
    wanted = (axes - axes.mean(0)) / axes.std(0) * REFERENCE_STD + REFERENCE_MEAN
    assert np.array_equal(found[6:].reshape(-1, 3)[stained(picture[6:]).ravel()], to_pixels(wanted))


EDGES = {
    "white": WHITE,
    "black": np.zeros_like(WHITE),
    "one colour": np.full_like(WHITE, 1) * np.array([120, 40, 160], np.uint8),
    "almost no stain": np.where(np.arange(24 * 24).reshape(24, 24, 1) < 5, 60, WHITE).astype(np.uint8),
    "one stain": (240 * np.exp(-np.linspace(0.3, 1, 576).reshape(24, 24, 1) * [0.65, 0.7, 0.29])).astype(np.uint8),
}


@pytest.mark.parametrize("how", ["macenko", "reinhard"])
@pytest.mark.parametrize("edge", ["white", "black", "one colour", "almost no stain"])
def test_a_picture_without_two_stains_stays_as_it_is(how: str, edge: str) -> None:
    assert np.array_equal(NORMALIZERS[how](EDGES[edge]), EDGES[edge])


def test_a_single_stain_of_many_strengths_has_no_second_direction() -> None:
    assert np.array_equal(macenko(EDGES["one stain"]), EDGES["one stain"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 255), st.sampled_from(sorted(NORMALIZERS)))
def test_whatever_the_pixels_no_normalisation_fails(seed: int, most: int, how: str) -> None:
    pixels = np.random.default_rng(seed).integers(0, most + 1, (8, 8, 3)).astype(np.uint8)
    with np.errstate(all="raise"):
        found = NORMALIZERS[how](pixels)
    assert found.shape == pixels.shape
    assert found.dtype == np.uint8


def test_hed_changes_each_stain_by_itself() -> None:
    picture = np.clip(256 * np.exp(-0.8 * STAINS[0]) - 1, 0, 255).astype(np.uint8).reshape(1, 1, 3)
    amounts = np.linalg.solve(STAINS.T, -np.log((picture[0, 0].astype(float) + 1) / 256))
    expected = 256 * np.exp(-STAINS.T @ (amounts * [1.5, 1, 1])) - 1
    assert np.abs(hed(picture, [1.5, 1, 1], 0)[0, 0] - expected).max() <= 0.5
    assert np.array_equal(hed(tissue(), 1, 0), tissue())
    assert np.array_equal(hed(np.full((2, 2, 3), 255, np.uint8), 1.3, 0.05), np.full((2, 2, 3), 255, np.uint8))


def test_a_scanner_has_gain_gamma_and_focus() -> None:
    picture = tissue()
    assert np.array_equal(simulate_scanner(picture, 1, 1, 0), picture)
    assert np.array_equal(simulate_scanner(picture, 1, 2.0, 0), np.rint(255 * (picture / 255) ** 2).astype(np.uint8))
    assert simulate_scanner(picture, 1, 1, 2.0).std() < picture.std()
    assert np.array_equal(jitter(picture, "a"), jitter(picture, "a"))
    assert not np.array_equal(jitter(picture, "a"), jitter(picture, "b"))


def test_the_extractor_normalises_every_view_augments_all_but_the_first_and_keeps_them_apart(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(tissue(1, 40)).save(out, "PNG")
    views = {
        how: Extractor("cnn", views=3, depth="pixels", size=40, stain=how[0], augment=how[1]).of_content(out.getvalue())
        for how in (("none", "none"), ("macenko", "none"), ("none", "stain"), ("macenko", "stain"))
    }
    plain, normal, augmented, both = views.values()
    assert np.array_equal(normal[0].transpose(1, 2, 0), macenko(tissue(1, 40)))
    assert np.array_equal(augmented[0], plain[0])
    assert np.array_equal(both[0], normal[0])
    assert not np.array_equal(augmented[1], plain[1])
    made = [Extractor(weights="random", stain=s, augment=a) for s in ("none", "macenko") for a in ("none", "stain")]
    assert len({extract.folder.name for extract in made}) == 4
    assert len({extract.preprocessing() for extract in made}) == 4  # sites that differ in it do not agree
