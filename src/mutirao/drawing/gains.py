"""What each of many policies gains in each of many cases: a field of colours a figure, with the numbers in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mutirao.drawing.looks import INK, PALE, blank, save


@dataclass(frozen=True)
class Field:
    """A gain by row and column, NaN where there is none, in units that `form` writes; `shown` is beyond chance."""

    title: str
    gain: Mapping[tuple[str, str], float]
    shown: frozenset[tuple[str, str]]
    form: str
    most: float  # from where on the colour is full


def draw_gains(rows: Mapping[str, str], columns: Sequence[str], fields: Sequence[Field], path: Path | str) -> None:
    """Draw the fields side by side, rows by their titles: blue is better, red worse; bold is shown, pale is not."""
    wide = 2.2 + len(fields) * (0.35 + 0.58 * len(columns))
    figure, axes = blank(wide, 1.3 + 0.38 * len(rows), 1, len(fields), sharey=True, squeeze=False)
    for field, panel in zip(fields, axes[0], strict=True):
        table = np.array([[field.gain.get((row, column), np.nan) for column in columns] for row in rows])
        panel.set_facecolor(PALE)
        panel.imshow(table, aspect="auto", cmap="RdBu", vmin=-field.most, vmax=field.most)
        for y, row in enumerate(rows):
            for x, column in enumerate(columns):
                if np.isnan(table[y, x]):
                    continue
                shown = (row, column) in field.shown
                strong = abs(table[y, x]) > 0.65 * field.most
                look = {"weight": "bold" if shown else "normal", "alpha": 1.0 if shown else 0.7}
                text = format(table[y, x], field.form)
                panel.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if strong else INK, **look)
        panel.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
        panel.set_yticks(range(len(rows)), list(rows.values()))
        panel.tick_params(colors=INK, labelsize=9, length=0)
        panel.set_title(field.title, color=INK, fontsize=10)
        for side in panel.spines.values():
            side.set_visible(False)
    save(figure, path)
