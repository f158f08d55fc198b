"""Stain normalization and stain augmentation of images from different laboratories.

Normalization uses published references, never a site's own images, so that every site can do it alone. Both methods
were made for haematoxylin and eosin; what they do to other stains is measured in docs/stain.md. Augmentation shows an
image as another laboratory might have stained and scanned it.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from mutirao.errors import ConfigError
from mutirao.randomness import rng

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

LIGHT = 240  # intensity of glass (Macenko et al.)
DENSE = 0.15  # optical density below which a pixel counts as glass
LEAST = 0.02  # share of an image that must be stained
ANGLE = np.deg2rad(3.0)  # two stains closer than this are one
# Reinhard's space (Ruderman et al., 1998): cones, and the decorrelated logarithms of what they see.
CONES = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
AXES = np.diag([3**-0.5, 6**-0.5, 2**-0.5]) @ np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]])
# HistomicsTK's reference for stained pixels, a TCGA slide (natural logarithms of 0..255).
REFERENCE_MEAN = np.array([8.74108109, -0.12440419, 0.0444982])
REFERENCE_STD = np.array([0.6135447, 0.10989545, 0.0286032])


def stained(pixels: Pixels) -> npt.NDArray[np.bool_]:
    """Which pixels are not glass: their optical density -ln((I + 1) / 240) is at least 0.15 in every channel."""
    density = -np.log((pixels.astype(np.float64) + 1) / LIGHT)
    found: npt.NDArray[np.bool_] = np.all(density >= DENSE, axis=-1)
    return found


def macenko(pixels: Pixels) -> Pixels:
    """Replace the directions and strengths of an image's two stains by published ones, with torchstain.

    Macenko et al., "A method for normalizing histology slides for quantitative analysis", ISBI 2009. An image with
    almost no stain, or a single one, has no such directions and is returned unchanged.

    >>> glass = np.full((32, 32, 3), 245, np.uint8)
    >>> bool((macenko(glass) == glass).all())  # nothing is stained, so nothing is changed
    True
    """
    try:
        from torchstain.numpy.normalizers.macenko import NumpyMacenkoNormalizer
    except ImportError as error:
        raise ConfigError("stain=macenko needs the package torchstain: pip install 'mutirao[slides]'") from error

    if not has_two_stains(pixels):
        return pixels
    with np.errstate(all="ignore"):
        found: Pixels = NumpyMacenkoNormalizer().normalize(pixels, Io=LIGHT, beta=DENSE, stains=False)[0]
    return found


def has_two_stains(pixels: Pixels) -> bool:
    """Whether enough is stained, in two distinct colours, for Macenko's directions to be well defined."""
    inside = pixels[stained(pixels)].astype(np.float64)
    if len(inside) < max(3, LEAST * pixels[..., 0].size):
        return False
    density = -np.log((inside + 1) / LIGHT)
    # Macenko's plane: that of the two directions with the most variance, which `eigh` returns last. The stains are the
    # extreme angles in it.
    _, vectors = np.linalg.eigh(np.cov(density.T))
    flat = density @ vectors[:, 1:]
    low, high = np.percentile(np.arctan2(flat[:, 1], flat[:, 0]), [1, 99])
    return bool(ANGLE < high - low < np.pi - ANGLE)


def reinhard(pixels: Pixels) -> Pixels:
    """Give stained pixels published means and deviations along each axis of l-alpha-beta; glass is unchanged.

    Reinhard et al., "Color transfer between images", IEEE CG&A 2001: x' = (x - mean) / deviation * reference
    deviation + reference mean. An image with almost no stain, or of a single colour, is returned unchanged.

    >>> draw = np.random.default_rng(0)
    >>> cells = (np.array([150, 60, 140]) + draw.integers(-30, 30, (32, 32, 3))).astype(np.uint8)
    >>> cells.reshape(-1, 3).mean(0).round(), reinhard(cells).reshape(-1, 3).mean(0).round()
    (array([150.,  61., 139.]), array([190., 139., 183.]))
    """
    inside = stained(pixels)
    if inside.sum() < max(3, LEAST * inside.size):
        return pixels
    seen = to_axes(pixels[inside])
    mean = seen.mean(0)
    deviation = seen.std(0)
    if deviation.min() < 1e-3:
        return pixels
    out = pixels.copy()
    out[inside] = to_pixels((seen - mean) / deviation * REFERENCE_STD + REFERENCE_MEAN)
    return out


def to_axes(rgb: npt.ArrayLike) -> Floats:
    """Pixels (0..255) in l, alpha, beta: decorrelated logarithms of cone responses."""
    found: Floats = np.log(np.maximum(np.asarray(rgb, np.float64) @ CONES.T, 1.0)) @ AXES.T
    return found


def to_pixels(axes: Floats) -> Pixels:
    """The pixels of l, alpha, beta values, clipped to 0..255."""
    seen = np.exp(np.minimum(axes @ np.linalg.inv(AXES).T, 20.0))
    found: Pixels = np.rint(np.clip(seen @ np.linalg.inv(CONES).T, 0, 255)).astype(np.uint8)
    return found


NORMALIZERS: dict[str, Callable[[Pixels], Pixels]] = {
    "none": lambda pixels: pixels,
    "macenko": macenko,
    "reinhard": reinhard,
}


# Optical densities (rows) of haematoxylin, eosin and DAB (Ruifrok and Johnston, 2001), and back.
STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
UNMIX = np.linalg.inv(STAINS)
STRENGTH = 0.3  # a stain is scaled by 1 +- STRENGTH,
SHIFT = 0.05  # and its density is shifted by up to SHIFT
GAIN = 0.08  # a scanner scales each channel by 1 +- GAIN,
GAMMA = 0.25  # applies an exponent of up to exp(+- GAMMA),
BLUR = 1.2  # and blurs by up to BLUR pixels


def hed(pixels: Pixels, strength: npt.ArrayLike, shift: npt.ArrayLike) -> Pixels:
    """Change each stain's density c to strength * c + shift, where there is any.

    Tellez et al., "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference", IEEE TMI 2018.
    The shift grows with the stain that is present, so that bare glass stays bare.

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> hed(cells, strength=[1.3, 1.0, 1.0], shift=[0.0, 0.0, 0.0])[0, 0]  # more haematoxylin: darker
    array([135,  53, 134], dtype=uint8)
    """
    density = -np.log((pixels.astype(np.float64) + 1) / 256)
    there = np.minimum(density.max(-1, keepdims=True) / 0.3, 1.0)
    changed = (density @ UNMIX * np.asarray(strength) + there * np.asarray(shift)) @ STAINS
    found: Pixels = np.rint(np.clip(256 * np.exp(-changed) - 1, 0, 255)).astype(np.uint8)
    return found


def simulate_scanner(pixels: Pixels, gain: npt.ArrayLike, gamma: float, blur: float) -> Pixels:
    """The image as seen by a scanner with this colour balance, light curve and blur (pixels).

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> simulate_scanner(cells, gain=[1.0, 1.0, 0.8], gamma=1.0, blur=0.0)[0, 0]  # a scanner that sees less blue
    array([150,  60, 112], dtype=uint8)
    """
    soft = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(blur)) if blur > 0 else pixels
    light = (np.asarray(soft, np.float64) / 255) ** gamma * np.asarray(gain)
    found: Pixels = np.rint(np.clip(255 * light, 0, 255)).astype(np.uint8)
    return found


def jitter(pixels: Pixels, name: str) -> Pixels:
    """The same cells as in another, random laboratory, seeded by the name: two sites get the same image.

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> changed = jitter(cells, "recife")
    >>> bool((changed == jitter(cells, "recife")).all()), bool((changed == cells).all())
    (True, False)
    """
    draw = rng(0, 0, "stain", name)
    found = hed(pixels, draw.uniform(1 - STRENGTH, 1 + STRENGTH, 3), draw.uniform(-SHIFT, SHIFT, 3))
    gamma = float(np.exp(draw.uniform(-GAMMA, GAMMA)))
    return simulate_scanner(found, draw.uniform(1 - GAIN, 1 + GAIN, 3), gamma, float(draw.uniform(0, BLUR)))
