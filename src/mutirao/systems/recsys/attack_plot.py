"""A picture of what a server learns of a recommender's users: a bar a setting, against guessing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutirao.report.plot_style import BRIGHT, INK, add_legend, blank, save, tidy


def draw_exposure(told: Sequence[tuple[str, Any, bool]], path: Path) -> None:
    """Ratings read and items named, each beside what is guessed; settings that promise privacy are bold."""
    figure, sides = blank(11.0, 0.34 * len(told) + 1.6, 1, 2, sharey=True)
    names, places = [name for name, _, _ in told], list(range(len(told)))[::-1]
    panels = (
        (
            "ratings stated rightly",
            [e.read for _, e, _ in told],
            [e.guessed for _, e, _ in told],
            "the user's mean rating",
        ),
        ("items named rightly", [e.precision for _, e, _ in told], [e.popular for _, e, _ in told], "the most popular"),
    )
    for axes, (title, read, guessed, by), colour in zip(sides, panels, BRIGHT, strict=False):
        axes.barh(places, read, height=0.62, color=colour, label="read")
        axes.scatter(guessed, places, marker="|", s=170, linewidths=2.2, color=INK, label=f"guessed: {by}", zorder=3)
        axes.set(xlim=(0, 1.02), title=title)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
        axes.set_yticks(places, names)
        add_legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)
        tidy(axes, "x")
    for label, (_, _, private) in zip(sides[0].get_yticklabels(), told, strict=True):
        label.set_fontweight("bold" if private else "normal")
    save(figure, path)
