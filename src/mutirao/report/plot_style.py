"""How all pictures look: their colours, their type and grid, and how they are written whole to a file."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mutirao.errors import ConfigError
from mutirao.io import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

FORMATS = ("png", "svg", "pdf")
# Paul Tol's "bright" and "muted" schemes: distinct for the colour-blind, too.
BRIGHT = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")
MUTED = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
INK = "#333333"
PALE = "#E4E4E4"


def blank(wide: float, tall: float, *grid: int, **options: Any) -> tuple["Figure", Any]:
    """An empty figure of so many inches and its axes: one, or as many as the grid of rows and columns has."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, tall), layout="constrained", facecolor="white")
    return figure, figure.subplots(*grid, **options)


def palette(classes: int) -> list[Any]:
    """A colour a class; beyond ten, in the order of the classes along a colour map."""
    if classes <= len(BRIGHT):
        return list(BRIGHT[:classes])
    if classes <= len(MUTED):
        return list(MUTED[:classes])
    from matplotlib import colormaps

    return [colormaps["viridis"](v) for v in np.linspace(0, 1, classes)]


def every(count: int, most: int) -> int:
    """Every how many bars are labelled: 1, 2, 5, 10, 20 and so on, so that at most `most` are."""
    step = 1
    while count > most * step:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def add_legend(place: "Axes | Figure", size: float = 9, **options: Any) -> "Legend":
    """Name the curves, without a box around the names."""
    return place.legend(frameon=False, fontsize=size, labelcolor=INK, **options)


def count_on(*sides: "Axis") -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))


def scatter_risks(
    figure: "Figure", axes: "Axes", rounds: Any, weights: Any, risks: Any, size: float, edge: float
) -> "Colorbar":
    """Draw the weights of clients by round, coloured by risk, and the scale of the colours."""
    most = max(1e-9, float(np.abs(risks).max()))
    colours = {"c": risks, "cmap": "PuOr_r", "vmin": -most, "vmax": most}
    dots = axes.scatter(rounds, weights, s=size, linewidths=edge, edgecolors=INK, **colours)
    return figure.colorbar(dots, ax=axes, pad=0.02)


def tidy(axes: "Axes", grid: str) -> None:
    """Light grid behind the data, no box around it, one colour for all text but labels that have their line's."""
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=PALE, linewidth=0.8)  # type: ignore[arg-type]  # a literal in all calls
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=PALE)
    axes.title.set(color=INK, fontsize=11)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=label.get_color() if label.get_color() in BRIGHT else INK, fontsize=10)


def save(figure: "Figure", path: Path | str) -> None:
    """Write the figure in the format its name ends in; readers see the old file or the new one, never a part."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ConfigError(f"cannot draw to {path}: right would be a name that ends in .{', .'.join(FORMATS)}")
    content = BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # when it was drawn is nobody's business
    figure.savefig(content, format=kind, dpi=150, metadata=dates.get(kind))
    write_whole(path, content.getvalue(), durable=False)
