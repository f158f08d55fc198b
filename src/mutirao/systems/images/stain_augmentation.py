"""Stain augmentation: one picture as other laboratories might have stained and scanned it."""

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from mutirao.randomness import rng

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

# Optical densities (rows) of haematoxylin, eosin and DAB (Ruifrok and Johnston, 2001), and back.
STAINS = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
UNMIX = np.linalg.inv(STAINS)
STRENGTH, SHIFT = 0.3, 0.05  # of a stain: a factor of 1 +- STRENGTH, and a density more or less
GAIN, GAMMA, BLUR = 0.08, 0.25, 1.2  # of a scanner: of each channel, the exponent of light, pixels


def hed(pixels: Pixels, strength: npt.ArrayLike, shift: npt.ArrayLike) -> Pixels:
    """The picture with each stain's density c changed to strength * c + shift, where there is any.

    Tellez et al., "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference", IEEE TMI 2018.
    The shift grows with the stain there is, so that bare glass stays bare.

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> hed(cells, strength=[1.3, 1.0, 1.0], shift=[0.0, 0.0, 0.0])[0, 0]  # more haematoxylin: darker
    array([135,  53, 134], dtype=uint8)
    """
    density = -np.log((pixels.astype(np.float64) + 1) / 256)
    there = np.minimum(density.max(-1, keepdims=True) / 0.3, 1.0)
    changed = (density @ UNMIX * np.asarray(strength) + there * np.asarray(shift)) @ STAINS
    found: Pixels = np.rint(np.clip(256 * np.exp(-changed) - 1, 0, 255)).astype(np.uint8)
    return found


def scan(pixels: Pixels, gain: npt.ArrayLike, gamma: float, blur: float) -> Pixels:
    """The picture as seen by a scanner with this focus (pixels), light curve and colour balance.

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> scan(cells, gain=[1.0, 1.0, 0.8], gamma=1.0, blur=0.0)[0, 0]  # a scanner that sees less blue
    array([150,  60, 112], dtype=uint8)
    """
    soft = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(blur)) if blur > 0 else pixels
    light = (np.asarray(soft, np.float64) / 255) ** gamma * np.asarray(gain)
    found: Pixels = np.rint(np.clip(255 * light, 0, 255)).astype(np.uint8)
    return found


def jitter(pixels: Pixels, name: str) -> Pixels:
    """Another laboratory's picture of the same cells, drawn by the name alone: two sites get the same.

    >>> cells = np.full((8, 8, 3), (150, 60, 140), np.uint8)
    >>> changed = jitter(cells, "recife")
    >>> bool((changed == jitter(cells, "recife")).all()), bool((changed == cells).all())
    (True, False)
    """
    draw = rng(0, 0, "stain", name)
    found = hed(pixels, draw.uniform(1 - STRENGTH, 1 + STRENGTH, 3), draw.uniform(-SHIFT, SHIFT, 3))
    gamma = float(np.exp(draw.uniform(-GAMMA, GAMMA)))
    return scan(found, draw.uniform(1 - GAIN, 1 + GAIN, 3), gamma, float(draw.uniform(0, BLUR)))
