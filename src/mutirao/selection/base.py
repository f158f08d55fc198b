"""What all selectors have in common: the number of clients, probes, sampling by weights, and checks of settings.

A probe is what clients measure before a selection, and on how many samples.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.roster import ClientId, Roster
from mutirao.selection.scores import Floats, Rows


@dataclass(frozen=True)
class Counted:
    """`count` is a whole number of clients (1 is one client), or a share in (0, 1] of those present (1.0 is all)."""

    count: int | float

    def __post_init__(self) -> None:
        check_count(self.count)


def check_count(count: int | float) -> None:
    """Refuse a count that is neither a number of clients nor a share of them."""
    is_number = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    is_share = isinstance(count, float) and 0 < count <= 1
    if not (is_number or is_share):
        raise ValueError(f"count is {count!r}, but must be a whole number of at least 1 or a share above 0 up to 1.0")


def how_many(count: int | float, present: int) -> int:
    """A count or a share as a number of clients: at least one, at most all that are present."""
    wanted = round(count * present) if isinstance(count, float) else count
    return min(max(1, wanted), present)


def names_in(roster: Roster, rows: npt.NDArray[np.intp]) -> list[ClientId]:
    """The clients of these rows, sorted by name."""
    return [roster.ids[i] for i in np.sort(rows).tolist()]


def check_setting(name: str, right: bool, value: object, wanted: str) -> None:
    """Refuse a setting with a wrong value."""
    if not right:
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")


Refresh = Literal["selected", "all", "share"]
PROBE_SAMPLES = 100


def check_probe(refresh: str, share: float, samples: int) -> None:
    """Refuse wrong settings of a probe."""
    check_setting("refresh", refresh in ("selected", "all", "share"), refresh, "one of selected, all, share")
    check_setting("share", 0 < share <= 1, share, "above 0 and at most 1")
    check_setting("samples", samples >= 1, samples, "at least 1")


def sample_weighted(weights: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Positions sampled without replacement in proportion to their weights, at most as many as there are."""
    count = min(count, len(weights))
    if not count:
        return np.zeros(0, np.intp)
    # `choice` refuses a sample larger than the number of positive weights: 0 is sampled only when no other is left.
    p = np.maximum(weights / max(weights.max(), 1e-300), 1e-12)
    return rng.choice(len(weights), count, replace=False, shuffle=False, p=p / p.sum())


def pass_over(roster: Roster, rows: Rows, most: float, needed: int) -> Rows:
    """These rows without clients selected more than `most` times as often as their mean (0: all), if enough are left.

    So a client with false metrics cannot be selected more often than that.
    """
    if not most or not len(rows):
        return rows
    fair: Rows = rows[roster.selected[rows] <= most * roster.selected[rows].mean()]
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
    known: npt.NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
    if vectors is not None:
        known = np.asarray(~np.isnan(vectors[rows]).any(axis=1))
    due = ~known & (roster.selected[rows] <= roster.selected[rows].mean())
    # If there are too few known clients for the round, so many must be unknown, due or not.
    few = max(0, wanted - int(np.count_nonzero(known)))
    unknown = rows[~known]
    if np.count_nonzero(due) >= few:
        unknown = rows[due]
    return rng.choice(unknown, min(wanted, len(unknown)), replace=False, shuffle=False), rows[known]


def sizes(roster: Roster) -> Floats:
    """The samples of each client; if unknown, the mean of the known ones."""
    known = roster.n > 0
    return np.where(known, roster.n, roster.n[known].mean() if known.any() else 1.0).astype(np.float64)


def unknown_as_median(values: Floats) -> Floats:
    """Values with the unknown replaced by the median of the known, or 0 if there is none."""
    known = values[~np.isnan(values)]
    return np.where(np.isnan(values), np.median(known) if len(known) else 0.0, values)
