"""The picture of what follows power laws in ratings."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mutirao.drawing.plots import draw_loglog
from mutirao.recsys.expansion import Floats, Laws


def draw_laws(sets: Mapping[str, Laws], path: Path) -> None:
    """Draw the laws of several sets over each other, ranks as shares and values in means: sizes do not matter."""
    panels: dict[str, dict[str, tuple[Floats, Floats]]] = {"activity of users": {}, "popularity of items": {}}
    for name, laws in sets.items():
        for title, values in zip(panels, (laws.activity, laws.popularity), strict=True):
            panels[title][name] = (np.arange(1, len(values) + 1) / len(values), values / values.mean())
    spectra = {name: (np.arange(1.0, len(w.spectrum) + 1), w.spectrum / w.spectrum[0]) for name, w in sets.items()}
    axes = {
        "activity of users": ("rank of the user, as a share", "ratings / mean"),
        "popularity of items": ("rank of the item, as a share", "ratings / mean"),
        "singular values": ("number", "value / largest"),
    }
    draw_loglog(panels | {"singular values": spectra}, axes, path)
