"""Where there are cells and where only glass, seen from afar.

A cervical smear is not tissue: single cells lie far apart on clear glass. Otsu's threshold alone fails on it, since
hardly any pixel belongs to a cell; so it is held within a few deviations of what the glass itself shows. What was never
scanned is filled with pure white by most scanners, and is no glass: it would make the glass itself look stained.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from mutirao.systems.cytology.slides.readers import Pixels, Slide

Mask = npt.NDArray[np.bool_]
STRAIGHT = 24  # pixels of an overview: an edge that runs straight for longer is none of a cell's


def otsu(values: npt.ArrayLike) -> int:
    """The threshold t that parts bytes into <= t and > t with the largest variance between both (Otsu, 1979)."""
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
    """Otsu's threshold, held between 5 and 12 deviations above the glass.

    The glass is what Otsu leaves below, at its median; its deviation is estimated from the pixels at or below that
    (robustly: 1.4826 times their median distance to it), because pale cytoplasm lies only above.
    """
    t = otsu(stained)
    below = stained[stained <= t].astype(np.float64)
    glass = float(np.median(below))
    distances = glass - below[below <= glass]
    deviation = max(1.4826 * float(np.median(distances)), 0.7)
    return float(np.clip(t, glass + 5 * deviation, glass + 12 * deviation))


def unscanned(picture: Pixels) -> Mask:
    """Where a scanner filled in white: areas of pure white whose edges are mostly straight, upright or level.

    Glass that is overexposed is pure white, too, but around cells, whose edges are round: that is no filling.
    """
    white = ndimage.binary_opening(picture.min(2) >= 254, np.ones((5, 5), bool))  # solid: no lonely bright pixels
    upright, level = white[:, 1:] != white[:, :-1], white[1:] != white[:-1]
    straight = ndimage.binary_opening(upright, np.ones((STRAIGHT, 1), bool)).sum()
    straight += ndimage.binary_opening(level, np.ones((1, STRAIGHT), bool)).sum()
    return white if 2 * straight > upright.sum() + level.sum() else np.zeros_like(white)


@dataclass(frozen=True)
class Masked:
    """The slide from afar, where it has cells, and how many of its finest pixels one pixel here covers."""

    picture: Pixels
    mask: Mask
    scale: float

    def share(self, x: int, y: int, side: int) -> float:
        """The share of a square of the slide (finest pixels) that is not glass."""
        left, top = int(x / self.scale), int(y / self.scale)
        right, bottom = max(left + 1, round((x + side) / self.scale)), max(top + 1, round((y + side) / self.scale))
        part = self.mask[top:bottom, left:right]
        return float(part.mean()) if part.size else 0.0


def mask_slide(slide: Slide, mpp: float = 6.0) -> Masked:
    """Find the cells on an overview of about `mpp` micrometres a pixel; lonely pixels are dust and count as glass."""
    picture = slide.overview(mpp)
    stained = stain(picture)
    filled = unscanned(picture)
    found = (stained > threshold(stained[~filled])) & ~filled if not filled.all() else np.zeros_like(filled)
    padded = np.pad(found, 1)
    height, width = found.shape
    neighbours = np.zeros(found.shape, np.uint8)
    for dy in range(3):
        for dx in range(3):
            neighbours += padded[dy : dy + height, dx : dx + width]
    return Masked(picture, found & (neighbours > 2), slide.size[0] / width)
