"""What all selectors have in common: the number of clients, and checks of settings."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.roster import ClientId, Roster


@dataclass(frozen=True)
class Counted:
    """`count` is a whole number of clients (1 is one client), or a share in (0, 1] of those present (1.0 is all)."""

    count: int | float

    def __post_init__(self) -> None:
        check_count(self.count)


def check_count(count: int | float) -> None:
    """Refuse a count that is neither a number of clients nor a share of them."""
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not (count >= 1 if whole else isinstance(count, float) and 0 < count <= 1):
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
