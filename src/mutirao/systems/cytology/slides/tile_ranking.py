"""Rank tiles by sharpness and content: local variance and entropy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides.readers import Pixels

Floats = npt.NDArray[np.float64]
WINDOW = 8


def tile_measures(tile: Pixels) -> tuple[float, float]:
    """Local variance (the mean over windows of 8 x 8 of their grey levels' variance) and entropy (bits a pixel).

    Blurred tiles have little local variance, bare ones little entropy: -sum p log2 p of the 256 grey levels.
    """
    grey = Image.fromarray(tile).convert("L")
    counts = np.asarray(grey.histogram(), np.float64)
    p = counts[counts > 0] / counts.sum()
    values = np.asarray(grey, np.float32)
    high, wide = (n // WINDOW * WINDOW for n in values.shape)
    windows = values[:high, :wide].reshape(high // WINDOW, WINDOW, wide // WINDOW, WINDOW)
    variance = np.einsum("abcd,abcd->ac", windows, windows) / WINDOW**2 - windows.mean((1, 3)) ** 2
    return float(np.maximum(variance, 0).mean()), float(max(0.0, -(p * np.log2(p)).sum()))


@dataclass(frozen=True)
class Choice:
    """Which tiles are kept: those above both thresholds; of these the best `quantile` (a share) or `top` (a count).

    >>> score, why = Choice(top=1)(variance=[20.0, 5.0, 0.1], entropy=[4.0, 3.0, 0.0])
    >>> why
    ['', 'rank', 'variance']
    """

    min_variance: float = 0.5
    min_entropy: float = 0.1
    quantile: float = 1.0
    top: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ConfigError(f"quantile: {self.quantile!r} is not a share above 0 and up to 1")
        if self.top < 0 or self.min_variance < 0 or self.min_entropy < 0:
            raise ConfigError("top, min_variance and min_entropy cannot be below 0")

    def __call__(self, variance: Sequence[float], entropy: Sequence[float]) -> tuple[Floats, list[str]]:
        """A score in [0, 1] for each tile, and the reason to drop it (empty: it is kept)."""
        v = np.asarray(variance, np.float64)
        e = np.asarray(entropy, np.float64)
        scores = (shares_below(v) + shares_below(e)) / 2
        why = np.full(len(v), "", object)
        why[e < self.min_entropy] = "entropy"
        why[v < self.min_variance] = "variance"
        left = np.flatnonzero(why == "")
        ranked = left[np.argsort(-scores[left], kind="stable")]
        keep = len(ranked) if self.quantile == 1 else int(np.ceil(self.quantile * len(ranked)))
        keep = min(keep, self.top) if self.top else keep
        why[ranked[keep:]] = "rank"
        return scores, [str(w) for w in why]


def shares_below(values: Floats) -> Floats:
    """For each value the share of the others below it, ties counting half; a single value has 1."""
    from scipy.stats import rankdata

    n = len(values)
    if n > 1:
        return (rankdata(values) - 1) / (n - 1)
    return np.ones(n)
