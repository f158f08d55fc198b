"""Samples as small pictures, row under row: what a client trained on, and what somebody else made of its update."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.report.plot_style import INK, blank, save


def draw_samples(rows: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    """Draw each row's flat samples, grey and square where their length is a square number, else as strips."""
    count = max(len(samples) for samples in rows.values())
    figure, axes = blank(0.75 * count + 1.2, 0.85 * len(rows), len(rows), count, squeeze=False)
    low, high = (float(f(next(iter(rows.values())))) for f in (np.min, np.max))
    for line, (name, samples) in zip(axes, rows.items(), strict=True):
        for place, sample in zip(line, samples, strict=False):
            side = math.isqrt(len(sample))
            shape = (side, side) if side * side == len(sample) else (1, len(sample))
            place.imshow(sample.reshape(shape), cmap="gray_r", vmin=low, vmax=high, aspect="equal")
        for place in line:
            place.set_xticks([])
            place.set_yticks([])
            for spine in place.spines.values():
                spine.set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK)
    save(figure, path)
