"""The picture of what follows power laws in ratings."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mutirao.drawing.looks import BRIGHT, add_legend, blank, save, tidy
from mutirao.drawing.plots import STYLES
from mutirao.recsys.expansion import Laws


def draw_laws(sets: Mapping[str, Laws], path: Path) -> None:
    """Draw the laws of several sets over each other, ranks as shares and values in means: sizes do not matter."""
    figure, (users, items, spectrum) = blank(3.9 * 3, 3.5, 1, 3)
    users.set(title="activity of users", xlabel="rank of the user, as a share", ylabel="ratings / mean")
    items.set(title="popularity of items", xlabel="rank of the item, as a share", ylabel="ratings / mean")
    spectrum.set(title="singular values", xlabel="number", ylabel="value / largest")
    for i, (name, laws) in enumerate(sets.items()):
        for axes, y in ((users, laws.activity), (items, laws.popularity), (spectrum, laws.spectrum)):
            some = np.unique(np.geomspace(1, len(y), 300).round().astype(np.intp))  # evenly spaced on the axis
            x, unit = (some, y[0]) if axes is spectrum else (some / len(y), y.mean())
            look = {"color": BRIGHT[i % len(BRIGHT)], "linestyle": STYLES[i % 3], "linewidth": 1.8}
            axes.plot(x, y[some - 1] / unit, label=name, **look)
    for axes in (users, items, spectrum):
        axes.set(xscale="log", yscale="log")
        tidy(axes, grid="both")
        add_legend(axes, loc="lower left")
    save(figure, path)
