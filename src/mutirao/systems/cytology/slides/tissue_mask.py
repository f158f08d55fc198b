"""Mask of cells on glass, computed on an overview of a slide.

A cervical smear is not tissue: single cells lie far apart on clear glass. Otsu's threshold alone fails on it, since
hardly any pixel belongs to a cell; so it is limited to a few deviations above the glass. Most scanners fill areas that
were not scanned with pure white, which is not glass: with it, the glass itself would look stained.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from mutirao.systems.cytology.slides.readers import Pixels, Slide

Mask = npt.NDArray[np.bool_]
STRAIGHT = 24  # pixels of an overview: a longer straight edge is not that of a cell


def otsu(values: npt.ArrayLike) -> int:
    """The threshold t that splits bytes into <= t and > t with the largest variance between them (Otsu, 1979)."""
    counts = np.bincount(np.asarray(values, np.uint8).ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(counts)
    sums = np.cumsum(counts * np.arange(256))
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return int(np.nanargmax(np.where(np.isfinite(between), between, -1.0)))


def stain(picture: Pixels) -> npt.NDArray[np.uint8]:
    """How far a pixel is from white: saturation (max - min) and darkness (255 - max) together, that is 255 - min."""
    darkest: npt.NDArray[np.uint8] = picture.min(2)
    return 255 - darkest


def threshold(stained: npt.NDArray[np.uint8]) -> float:
    """Otsu's threshold, limited to between 5 and 12 deviations above the glass.

    The glass is the median below Otsu's threshold; its deviation is estimated from the pixels at or below that
    (robustly: 1.4826 times their median distance to it), because pale cytoplasm is only above it.
    """
    t = otsu(stained)
    below = stained[stained <= t].astype(np.float64)
    glass = float(np.median(below))
    distances = glass - below[below <= glass]
    deviation = max(1.4826 * float(np.median(distances)), 0.7)
    return float(np.clip(t, glass + 5 * deviation, glass + 12 * deviation))


def unscanned(picture: Pixels) -> Mask:
    """Areas that were not scanned: pure white with mostly straight, vertical or horizontal edges.

    Overexposed glass is pure white, too, but its edges run around cells, and are round.
    """
    white = ndimage.binary_opening(picture.min(2) >= 254, np.ones((5, 5), bool))  # solid: no lonely bright pixels
    vertical = white[:, 1:] != white[:, :-1]
    horizontal = white[1:] != white[:-1]
    straight = ndimage.binary_opening(vertical, np.ones((STRAIGHT, 1), bool)).sum()
    straight += ndimage.binary_opening(horizontal, np.ones((1, STRAIGHT), bool)).sum()
    if 2 * straight > vertical.sum() + horizontal.sum():
        return white
    return np.zeros_like(white)


@dataclass(frozen=True)
class Masked:
    """An overview of a slide, its mask of cells, and the finest pixels that one of its pixels covers."""

    picture: Pixels
    mask: Mask
    scale: float

    def share(self, x: int, y: int, side: int) -> float:
        """The share of a square of the slide (finest pixels) that is not glass."""
        left = int(x / self.scale)
        top = int(y / self.scale)
        right = max(left + 1, round((x + side) / self.scale))
        bottom = max(top + 1, round((y + side) / self.scale))
        part = self.mask[top:bottom, left:right]
        if part.size:
            return float(part.mean())
        return 0.0


def mask_slide(slide: Slide, mpp: float = 6.0) -> Masked:
    """Find the cells on an overview of about `mpp` micrometres a pixel; isolated pixels are dust and count as glass."""
    picture = slide.overview(mpp)
    stained = stain(picture)
    filled = unscanned(picture)
    found = np.zeros_like(filled)
    if not filled.all():
        found = (stained > threshold(stained[~filled])) & ~filled
    padded = np.pad(found, 1)
    height, width = found.shape
    neighbours = np.zeros(found.shape, np.uint8)
    for dy in range(3):
        for dx in range(3):
            neighbours += padded[dy : dy + height, dx : dx + width]
    return Masked(picture, found & (neighbours > 2), slide.size[0] / width)
