"""Sampling of clients in proportion to weights, and defaults for unknown values."""

import numpy as np
import numpy.typing as npt

from mutirao.core.roster import Roster
from mutirao.selection.scores import Floats, Rows


def sample_weighted(weights: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Positions sampled without replacement in proportion to their weights, at most as many as there are."""
    count = min(count, len(weights))
    if not count:
        return np.zeros(0, np.intp)
    p = np.maximum(weights / max(weights.max(), 1e-300), 1e-12)  # 0 is sampled only when no other is left
    return rng.choice(len(weights), count, replace=False, shuffle=False, p=p / p.sum())


def pass_over(roster: Roster, rows: Rows, most: float, needed: int) -> Rows:
    """These rows without clients selected more than `most` times as often as their mean (0: all), if enough are left.

    So a client with false metrics cannot be selected more often than that.
    """
    fair = rows[roster.selected[rows] <= most * roster.selected[rows].mean()] if most and len(rows) else rows
    if len(fair) >= needed:
        return fair
    return rows


def unseen_first(roster: Roster, kind: str, rows: Rows, wanted: int, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """At most `wanted` random rows without a vector of a kind, and the rows that have one.

    A client that was selected more often than the others and never answered is not due again.
    """
    if not len(rows):
        return rows, rows
    vectors = roster.vectors.get(kind)
    known = np.zeros(len(rows), np.bool_) if vectors is None else ~np.isnan(vectors[rows]).any(axis=1)
    due = ~known & (roster.selected[rows] <= roster.selected[rows].mean())
    few = max(0, wanted - int(np.count_nonzero(known)))  # so many must be unknown, due or not
    unknown = rows[due] if np.count_nonzero(due) >= few else rows[~known]
    return rng.choice(unknown, min(wanted, len(unknown)), replace=False, shuffle=False), rows[known]


def sizes(roster: Roster) -> Floats:
    """The samples of each client; if unknown, the mean of the known ones."""
    known = roster.n > 0
    return np.where(known, roster.n, roster.n[known].mean() if known.any() else 1.0).astype(np.float64)


def unknown_as_median(values: Floats) -> Floats:
    """Values with the unknown replaced by the median of the known, or 0 if there is none."""
    known = values[~np.isnan(values)]
    return np.where(np.isnan(values), np.median(known) if len(known) else 0.0, values)
