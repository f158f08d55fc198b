"""What a policy gains over random selection: three figures of a run, compared seed by seed.

- `final`, the mean accuracy of the last ten rounds; where devices have speeds, of the last ten that ended within half
  of the simulated seconds that random selection took for all of its rounds;
- `worst`, over the same rounds, the mean accuracy of the tenth of the clients that fare worst;
- `sooner`, the share of random's rounds (or simulated seconds) that is saved on the way to 95% of its final accuracy,
  by the mean of five rounds; a run that never gets there counts as one round more than all of random's.

A single crossing rewards curves that swing, hence the means. `draw_gains` puts all cases and policies on one picture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.report.plots import INK, PALE, blank, save
from mutirao.runs.reader import Record
from mutirao.stats import Comparison, holm, paired
from mutirao.studies.targets import values

BASELINE = "random"
LAST, SMOOTH, NEAR = 10, 5, 0.95
FIGURES = ("final", "worst", "sooner")

Runs = Mapping[str, Mapping[int, Record]]  # by policy and seed
Gains = dict[str, dict[tuple[str, str], Comparison]]  # by figure, then by case and policy


class Swing(NamedTuple):
    """How far a curve goes up and down: its standard deviation, and its mean change from one value to the next."""

    deviation: float
    change: float


def swing_of(record: Record, metric: str, last: int = 20) -> Swing:
    """The swing of a metric over so many last rounds, of those in which it was evaluated."""
    known = np.array(values(record, metric)[-last:])
    known = known[~np.isnan(known)]
    if not len(known):
        return Swing(math.nan, math.nan)
    return Swing(float(known.std()), float(np.abs(np.diff(known)).mean()) if len(known) > 1 else math.nan)


def clock(record: Record) -> npt.NDArray[np.float64]:
    """What has been spent after each round: simulated seconds if devices have speeds, else rounds."""
    return np.cumsum([row.get("sim_seconds", 1.0) for row in record.rows])


def end_of(record: Record, metric: str, budget: float) -> float:
    """The mean of the last rounds that are over when the budget is."""
    known = np.array(values(record, metric))[clock(record) <= budget]
    return float(np.nanmean(known[-LAST:])) if len(known) else math.nan


def spent_to(record: Record, target: float, never: float) -> float:
    """What it took until the mean of some rounds is at the target; `never` if it never is."""
    smooth = np.convolve(values(record, "accuracy"), np.full(SMOOTH, 1 / SMOOTH), "valid")
    there = np.flatnonzero(smooth >= target)
    return float(clock(record)[there[0] + SMOOTH - 1]) if len(there) else never


def figures_of(runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Each figure by policy and seed, of the seeds that random selection has."""
    base = runs[BASELINE]
    timed = any("sim_seconds" in record.rows[0] for record in base.values())
    whole = {seed: float(clock(record)[-1]) for seed, record in base.items()}
    budgets = {seed: total / 2 if timed else total for seed, total in whole.items()}
    both = {m: {s: record for s, record in of.items() if s in base} for m, of in runs.items()}
    found = {
        name: {m: {s: end_of(r, metric, budgets[s]) for s, r in of.items()} for m, of in both.items()}
        for name, metric in (("final", "accuracy"), ("worst", "accuracy_worst_decile"))
    }
    target = NEAR * float(np.mean(list(found["final"][BASELINE].values())))
    more = {s: total * (1 + 1 / base[s].rounds) for s, total in whole.items()}
    spent = {m: {s: spent_to(r, target, more[s]) for s, r in of.items()} for m, of in both.items()}
    usual = float(np.mean(list(spent[BASELINE].values())))
    return found | {"sooner": {m: {s: -value / usual for s, value in of.items()} for m, of in spent.items()}}


def gains(found: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Each policy against random selection, seed by seed."""
    base = found[BASELINE]
    return {m: paired([*of.values()], [base[s] for s in of]) for m, of in found.items() if m != BASELINE and of}


def compare_all(made: Mapping[str, Runs]) -> Gains:
    """All gains of all cases."""
    tables = {name: figures_of(runs) for name, runs in made.items()}
    return {
        figure: {(name, m): found for name in tables for m, found in gains(tables[name][figure]).items()}
        for figure in FIGURES
    }


def shown_of(found: Mapping[tuple[str, str], Comparison]) -> frozenset[tuple[str, str]]:
    """The gains that are beyond chance: Student's p below 0.05 after Holm's correction over all of one figure."""
    at = {f"{i}": key for i, key in enumerate(found)}
    corrected = holm({i: found[key].p_t for i, key in at.items() if not math.isnan(found[key].p_t)})
    return frozenset(at[i] for i, p in corrected.items() if p < 0.05)


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
